"""Lightning: chunks as epochs of the Trainer, exact places in every checkpoint, and progress that names the chunk."""

import logging
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import LoaderError, MissingDependency, OptionError, ResumeError
from penstock.feed.loader import Loader
from penstock.recipes.chunked_epochs import ChunkedDataLoader
from penstock.recipes.chunked_training import ChunkedSequenceDataset, SequenceDataset
from penstock.recipes.trainer_feed import Feed

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
except ImportError as error:
    raise MissingDependency("lightning", "lightning", "PenstockDataModule") from error

__all__ = ["ChunkProgress", "PenstockDataModule"]

_LOG = logging.getLogger("penstock")
_LIMITS = ("limit_train_batches", "limit_val_batches")


class PenstockDataModule(LightningDataModule):
    """Feeds a Lightning Trainer, whose epochs are then those of the loader: a pass, or a chunk of one.

    Where the loaders stand is part of every checkpoint; `trainer.fit(ckpt_path=...)` goes on at the very next batch.
    Batches are dealt to the ranks by the loader itself. With chunks, `limit_train_batches` and `limit_val_batches` of
    the Trainer are put out of action, with a warning; `fast_dev_run` and `overfit_batches` are not. A data module
    without chunk sizes gives plain torch DataLoaders, and everything is Lightning's own.

    Parameters
    ----------
    data
        A data module in the manner of S4, such as a `ChunkedSequenceDataset`; its `setup()` is called once.
    loader
        Options of its loaders, such as `{"batch_size": 32, "num_workers": 4}`.
    train, val, test
        In place of `data`: a `Loader`, a `ChunkedDataLoader`, or a function that makes one in each rank.

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
            raise OptionError("Give either `data`, or loaders as train=, val= and test=.")
        if data is None and loader is not None:
            raise OptionError(
                "`loader` are options of the loaders that `data` makes; train=, val= and test= have theirs."
            )
        self.data = data
        self._options = dict(loader or {})
        self._given: dict[str, Any] = {"train": train, "val": val, "test": test}
        self._set_up = False
        self._resumed: dict[str, Any] = {}
        self.feeds: dict[str, Feed] = {}
        """What the Trainer is given in place of a loader, by partition."""

    @property
    def chunked(self) -> bool:
        """Whether the partitions of `data` are walked in chunks."""
        return isinstance(self.data, ChunkedSequenceDataset) and self.data.use_chunked_training

    def setup(self, stage: str) -> None:
        """Make the partitions, once; called by the Trainer."""
        if self.data is not None and not self._set_up:
            self.data.setup()
        self._set_up = True
        trainer = self._trainer()
        if not any(isinstance(callback, ChunkProgress) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.append(ChunkProgress())  # type: ignore[attr-defined]
        if stage == "fit" and self.chunked and not _is_trial(trainer):
            assert isinstance(self.data, ChunkedSequenceDataset), "only those have chunks"
            self.data.limits.update({name: getattr(trainer, name) for name in _LIMITS})
            for name in _LIMITS:
                setattr(trainer, name, 1.0)

    def train_dataloader(self) -> Any:
        """Return what gives the training batches."""
        return self._feed("train")

    def val_dataloader(self) -> Any:
        """Return what gives the validation batches: chunks in `fit`, all of it in `validate`."""
        if self._given["val"] is None and self.data is None:
            return []
        return self._feed("val") if self._trainer().state.fn == "fit" else self._whole("val")

    def test_dataloader(self) -> Any:
        """Return what gives the test batches: all of them."""
        return self._whole("test")

    def _feed(self, name: str) -> Any:
        if name not in self.feeds:
            made = self._made(name)
            if not _has_position(made):
                return made
            self.feeds[name] = Feed(made, self._trainer().world_size)
        if name in self._resumed:
            self.feeds[name].load_state_dict(self._resumed.pop(name))
        return self.feeds[name]  # the same one where the Trainer asks again: it goes on

    def _made(self, name: str) -> Any:
        if self.data is not None:
            return getattr(self.data, f"{name}_dataloader")(**self._options)
        given = self._given[name]
        if given is None:
            raise LoaderError(f"There is no {name} loader; give PenstockDataModule one as {name}=.")
        return given() if callable(given) else given

    def _whole(self, name: str) -> Any:
        """Return a loader of the whole partition: one pass from its beginning, dealt to the ranks exactly."""
        if not self.chunked:
            made = self._made(name)
            return _Pass(Feed(made, self._trainer().world_size)) if _has_position(made) else made
        assert self.data is not None, "chunks are those of data"
        options = {**self._options, "shuffle": False, "drop_last": False}
        partition = getattr(self.data, f"dataset_{name}")
        if partition is None:
            raise LoaderError(f"dataset_{name} is not there; set it in setup() of {type(self.data).__name__}.")
        batches = -(-len(partition) // options.get("batch_size", 1))
        return _Pass(
            Feed(ChunkedDataLoader(partition, chunk_size=max(1, batches), **options), self._trainer().world_size)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where the loaders of `fit` stand; part of every checkpoint."""
        return {name: feed.state_dict() for name, feed in self.feeds.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the places of a checkpoint for the loaders that the Trainer is about to ask for."""
        self._resumed = dict(state_dict)

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise LoaderError(
                "This data module belongs to no Trainer yet; give it to trainer.fit(model, datamodule=...)."
            )
        return self.trainer


class ChunkProgress(Callback):
    """Shows pass and chunk in the progress bar and the log, and watches that Trainer and loader agree.

    `PenstockDataModule` adds one where there is none. One line is logged where a run is resumed.

    Parameters
    ----------
    bar
        Show `pass` and `chunk` in the progress bar.
    """

    def __init__(self, *, bar: bool = True) -> None:
        self._bar, self._shown = bar, -1

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to where validation stood: a sanity check is no validation."""
        feed = _feeds(trainer).get("val")
        if feed is not None:
            feed.load_state_dict(feed.begun_at)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the Trainer will take all batches of an epoch, and say where a resumed run goes on."""
        feed, self._shown = _feeds(trainer).get("train"), -1
        if feed is None:
            return
        if not _is_trial(trainer) and trainer.num_training_batches != len(feed):
            raise LoaderError(
                f"The Trainer will take {trainer.num_training_batches} of the {len(feed)} batches of an epoch: "
                f"limit_train_batches={trainer.limit_train_batches!r}. Leave it out, and give the loader a chunk size."
            )
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        _LOG.info("resumed at %s", feed.said())
        half_done = feed.place()["batch"] % trainer.accumulate_grad_batches
        if half_done and feed.loader.remaining:
            _LOG.warning(
                "The gradients of %s batches are lost: the checkpoint was saved while they were accumulated over %s. "
                "Save after a step of the optimizer to resume exactly.",
                half_done, trainer.accumulate_grad_batches,
            )  # fmt: skip

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check that this is the batch that the Trainer counts; show and log a chunk that begins, or goes on."""
        feed = _feeds(trainer).get("train")
        if feed is None:
            return
        if feed.delivered != batch_idx + 1:
            raise ResumeError(
                f"The Trainer is at batch {batch_idx} of epoch {trainer.current_epoch}, and the loader gave its batch "
                f"{feed.delivered - 1} on rank {trainer.global_rank}: this checkpoint was saved in the middle of an "
                "epoch with another number of ranks, or has lost the loader's place. Resume with as many ranks, or "
                "from a checkpoint at the end of an epoch."
            )
        at = feed.place()
        if self._bar and (batch_idx == 0 or self._first):
            pl_module.log_dict({"pass": float(at["pass"]), "chunk": float(at["chunk"])}, prog_bar=True, logger=False)
        self._first = False

    _first = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log pass, chunk and number of chunks."""
        self._first = True
        feed = _feeds(trainer).get("train")
        if feed is None:
            return
        at = feed.place()
        for logger in trainer.loggers:
            logger.log_metrics(
                {name: float(at[name]) for name in ("pass", "chunk", "chunks")}, step=trainer.global_step
            )


class _Pass:
    """One pass, from the beginning each time: for `validate` and `test`."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Any:
        self._feed.go_to(0)
        return iter(self._feed)

    def __len__(self) -> int:
        return len(self._feed)


def _has_position(loader: Any) -> bool:
    return isinstance(loader, Loader) or (isinstance(loader, ChunkedDataLoader) and loader.is_chunked)


def _feeds(trainer: Trainer) -> dict[str, Feed]:
    module = trainer.datamodule  # type: ignore[attr-defined]
    return module.feeds if isinstance(module, PenstockDataModule) else {}


def _is_trial(trainer: Trainer) -> bool:
    """Say whether this is a run that is meant to be cut short."""
    return bool(trainer.fast_dev_run) or trainer.overfit_batches > 0  # type: ignore[attr-defined]
