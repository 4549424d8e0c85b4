"""Lightning: chunks as epochs of the Trainer, exact positions in every checkpoint, and progress by chunk."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import LoaderError, MissingDependency, OptionError, ResumeError
from penstock.plan.cursor import check_state, show_value
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset, SequenceDataset
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.recipes.trainers.feed import Feed

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
except ImportError as error:
    raise MissingDependency("lightning", "lightning", "PenstockDataModule") from error

__all__ = ["ChunkProgress", "PenstockDataModule"]

_LOG = logging.getLogger("penstock")
_LIMITS = ("limit_train_batches", "limit_val_batches")


class PenstockDataModule(LightningDataModule):
    """Feeds a Lightning Trainer; an epoch of the Trainer is an epoch of the loader: a pass, or a chunk of one.

    Without a Trainer, such as in a notebook, `train_dataloader()` and the others return loaders, to look at batches; a
    training starts at its beginning all the same.

    Every checkpoint holds the positions of the loaders; `trainer.fit(ckpt_path=...)` resumes at the next batch. The
    loader itself deals batches to the ranks. With chunks, `limit_train_batches` and `limit_val_batches` of the Trainer
    are ignored, with a warning; `fast_dev_run` and `overfit_batches` are not. A data module without chunk sizes gives
    plain torch DataLoaders, and Lightning behaves as usual.

    Parameters
    ----------
    data
        An S4-style data module, such as a `ChunkedSequenceDataset`; its `setup()` is called once.
    loader
        Arguments of its loaders, such as `{"batch_size": 32, "num_workers": 4}`.
    train, val, test
        Instead of `data`: a `Loader`, a `ChunkedDataLoader`, or a function that makes one in each rank.

    Examples
    --------
    >>> from penstock import ArraySource, Loader, Plan, Segments, Shuffle
    >>> import numpy as np
    >>> source = ArraySource({"x": np.arange(1000)})
    >>> plan = Segments(Plan(source.index, Shuffle(), batch_size=10), length=20)
    >>> module = PenstockDataModule(train=lambda: Loader(source, plan))
    """

    def __init__(
        self,
        data: SequenceDataset | None = None,
        loader: Mapping[str, Any] | None = None,
        *,
        train: Any = None,
        val: Any = None,
        test: Any = None,
    ) -> None:
        super().__init__()
        if (data is None) == (train is None and val is None and test is None):
            raise OptionError("Exactly one of `data` and the loaders (train=, val=, test=) must be given.")
        if data is None and loader is not None:
            raise OptionError(
                "`loader` must be None without `data`. Set the options of train=, val= and test= when making them."
            )
        self.data = data
        self._options = dict(loader or {})
        self._given: dict[str, Any] = {"train": train, "val": val, "test": test}
        self._set_up = False
        self._resumed: dict[str, Any] = {}
        self._looked_at: dict[str, Any] = {}  # where the given loaders were before
        self._fitted_by: Trainer | None = None
        self.feeds: dict[str, Feed] = {}
        """What the Trainer gets in place of a loader, by partition."""
        if data is None and val is None:  # the Trainer checks whether the method is overridden
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    @property
    def chunked(self) -> bool:
        """Whether the partitions of `data` are walked in chunks."""
        return isinstance(self.data, ChunkedSequenceDataset) and self.data.use_chunked_training

    def setup(self, stage: str) -> None:
        """Make the partitions, once; called by the Trainer. Without a Trainer, it does nothing else."""
        if self.data is not None and not self._set_up:
            self.data.setup()
        self._set_up = True
        trainer = self.trainer
        if trainer is None:
            return
        if not any(isinstance(callback, ChunkProgress) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.append(ChunkProgress())  # type: ignore[attr-defined]
        if stage in ("fit", "validate") and not _is_trial(trainer):
            self._disable_limits(trainer)
        if stage == "fit":
            self._begin(trainer)

    def _disable_limits(self, trainer: Trainer) -> None:
        if not self.chunked:
            return
        assert isinstance(self.data, ChunkedSequenceDataset), "no other data module has chunks"
        for name in _LIMITS:
            limit = getattr(trainer, name)
            if isinstance(limit, int) or limit != 1.0:
                self.data.limits[name] = limit
                setattr(trainer, name, 1.0)
        self.data.chunk_sizes(self._options.get("batch_size", 1))  # which warns

    def _begin(self, trainer: Trainer) -> None:
        """Start from the beginning under another Trainer; under the same one, continue after what it has seen."""
        self._resumed = {}
        if trainer is not self._fitted_by:
            self.feeds, self._fitted_by = {}, trainer
            if isinstance(self.data, ChunkedSequenceDataset):
                self.data.rewind()
        for feed in self.feeds.values():
            feed.begin_whole()

    def teardown(self, stage: str) -> None:
        """End the workers of chunked loaders; called by the Trainer."""
        for feed in self.feeds.values():
            if isinstance(feed.loader, ChunkedDataLoader):
                feed.loader.end_workers()

    def train_dataloader(self) -> Any:
        """Return the feed of training batches; without a Trainer, the loader."""
        return self._look("train") if self.trainer is None else self._feed("train")

    def val_dataloader(self) -> Any:
        """Return the feed of validation batches: chunks in `fit`, the whole partition in `validate`.

        Without a Trainer, the loader.
        """
        if self.data is None and self._given["val"] is None:
            return []
        if self.trainer is None:
            return self._look("val")
        return self._feed("val") if self._trainer().state.fn == "fit" else self._whole("val")

    def test_dataloader(self) -> Any:
        """Return the feed of test batches: the whole partition; without a Trainer, the loader."""
        return self._look("test") if self.trainer is None else self._whole("test")

    def _look(self, name: str) -> Any:
        """Return a loader to look at batches with; a training starts as if nothing had been looked at."""
        self.setup("fit")
        loader = self._make_loader(name)
        if loader is self._given[name] and Feed.can_feed(loader):
            self._looked_at.setdefault(name, loader.state_dict())
        return loader

    def _feed(self, name: str) -> Any:
        if name not in self.feeds:
            loader = self._make_loader(name)
            if not Feed.can_feed(loader):
                return loader
            if name in self._looked_at:
                loader.load_state_dict(self._looked_at.pop(name))
            kind = _TrainFeed if name == "train" else _ValFeed
            feed = kind(loader, self._trainer().world_size)
            if self._trainer().overfit_batches > 0:  # type: ignore[attr-defined]
                return _Repeated(feed, 1)
            self.feeds[name] = feed
            feed.begin_whole()
        if name in self._resumed:
            self._load_position(name, self._resumed.pop(name))
        return self.feeds[name]  # the same object if the Trainer asks again, so that it continues

    def _make_loader(self, name: str) -> Any:
        if self.data is not None:
            return getattr(self.data, f"{name}_dataloader")(**self._options)
        given = self._given[name]
        if given is None:
            raise LoaderError(f"No {name} loader. Pass one to PenstockDataModule as {name}=.")
        return given() if callable(given) else given

    def _whole(self, name: str) -> Any:
        """Return a feed of the whole partition: one pass from its start, dealt to the ranks exactly."""
        loader = self.feeds[name].loader if name in self.feeds else self._make_loader(name)
        if not Feed.can_feed(loader):
            return loader
        feed = Feed(loader, self._trainer().world_size)
        if not feed.has_passes:
            raise LoaderError(
                f"The {name} loader must have whole passes, got chunks of an endless stream. Use shuffle=False, or a "
                "plan with tail='short' or 'pad'."
            )
        return _Repeated(feed, len(feed.lengths))

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders of `fit`, None for one that has not started; in every checkpoint."""
        if self.data is not None and not self.chunked:
            return {}
        return {
            name: self.feeds[name].state_dict() if name in self.feeds else self._resumed.get(name)
            for name in ("train", "val")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the positions of a checkpoint, now or when the Trainer asks for a loader."""
        if not isinstance(state_dict, Mapping) or not set(state_dict) <= {"train", "val"}:
            raise ResumeError(f"state_dict must be what state_dict() returned, got {show_value(state_dict)}.")
        for name, position in state_dict.items():
            if position is not None:
                check_state(position)
            if name in self.feeds:
                self._load_position(name, position)
            else:
                self._resumed[name] = position

    def _load_position(self, name: str, position: dict[str, Any] | None) -> None:
        self.feeds[name].load_state_dict(self.feeds[name].begun_at if position is None else position)

    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "without a Trainer there are no feeds"
        return self.trainer


class ChunkProgress(Callback):
    """Shows pass and chunk in the progress bar and the log, and checks that Trainer and loader agree.

    `PenstockDataModule` adds one if there is none. When a run resumes, it logs the position.

    Parameters
    ----------
    bar
        Show `pass`, `chunk` and `chunks` (of a pass) in the progress bar.
    """

    def __init__(self, *, bar: bool = True) -> None:
        self._bar, self._shown, self._counted = bar, -1, True

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the position of validation: a sanity check does not count."""
        feed = _feeds(trainer).get("val")
        if feed is not None:
            feed.load_state_dict(feed.begun_at)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the Trainer will use all batches of an epoch, and log where a run resumes."""
        feed, self._shown = _feeds(trainer).get("train"), -1
        # A step with dataloader_iter fetches its batches itself, after the Trainer has counted.
        self._counted = "dataloader_iter" not in inspect.signature(pl_module.training_step).parameters
        if feed is None:
            return
        if not _is_trial(trainer) and trainer.num_training_batches != len(feed):
            raise LoaderError(
                f"The Trainer must use all {len(feed)} batches of an epoch, got {trainer.num_training_batches}, since "
                f"limit_train_batches={trainer.limit_train_batches!r}. Leave it out, and give the loader a chunk size."
            )
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        if not feed.resumed:
            _LOG.warning("The checkpoint has no position of the training loader, which starts at %s.", feed.describe())
            return
        _LOG.info("resumed at %s", feed.describe())
        half_done = feed.place()["batch"] % trainer.accumulate_grad_batches
        if half_done and feed.loader.remaining:
            _LOG.warning(
                "The gradients of %s batches are lost: the checkpoint was saved while they were accumulated over %s. "
                "Save after a step of the optimizer to resume exactly.",
                half_done, trainer.accumulate_grad_batches,
            )  # fmt: skip

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check that this is the batch that the Trainer counts; show and log the chunk if it is a new one."""
        feed = _feeds(trainer).get("train")
        if feed is None:
            return
        if self._counted and feed.delivered != batch_idx + 1:
            raise ResumeError(
                f"Trainer and loader must be at the same batch, got {batch_idx} of epoch {trainer.current_epoch} and "
                f"{feed.delivered - 1} on rank {trainer.global_rank}: the checkpoint was saved in the middle of an "
                "epoch with another number of ranks, or without the position of the loader. Resume with as many ranks, "
                "or from a checkpoint at the end of an epoch."
            )
        if feed.epoch == self._shown:
            return
        self._shown = feed.epoch
        at = {name: float(value) for name, value in feed.place().items() if name != "batch"}
        if self._bar:
            pl_module.log_dict(at, prog_bar=True, logger=False, batch_size=1)
        for logger in trainer.loggers:
            logger.log_metrics(at, step=trainer.global_step)


class _TrainFeed(Feed):
    """All epochs have one length, because the Trainer asks for it only once, and validates after that many batches."""

    def __init__(self, loader: Any, ranks: int) -> None:
        super().__init__(loader, ranks)
        if len(set(self.lengths)) > 1:
            raise LoaderError(
                f"All epochs of the training loader must have the same number of batches, got {min(self.lengths)} to "
                f"{max(self.lengths)}. Use shuffle=True, or a plan with tail='drop'."
            )


class _ValFeed(Feed):
    """`len()` is that of the longest chunk, because the Trainer asks for the length only once."""

    def __len__(self) -> int:
        return max(self.lengths)


class _Repeated:
    """Repeats the first epochs; the loader keeps its position."""

    def __init__(self, feed: Feed, epochs: int) -> None:
        self._feed, self._epochs = feed, epochs

    def __iter__(self) -> Iterator[Any]:
        position = self._feed.state_dict()
        try:
            for epoch in range(self._epochs):
                self._feed.go_to(epoch)
                yield from self._feed
        finally:
            self._feed.load_state_dict(position)

    def __len__(self) -> int:
        return sum(self._feed.lengths[: self._epochs])


def _feeds(trainer: Trainer) -> dict[str, Feed]:
    module = trainer.datamodule  # type: ignore[attr-defined]
    return module.feeds if isinstance(module, PenstockDataModule) else {}


def _is_trial(trainer: Trainer) -> bool:
    """Return whether the run is meant to be cut short."""
    return bool(trainer.fast_dev_run) or trainer.overfit_batches > 0  # type: ignore[attr-defined]
