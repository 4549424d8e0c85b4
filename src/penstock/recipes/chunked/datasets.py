"""Data modules that walk their data in chunks, if they have chunk sizes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Subset

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError, ResumeError
from penstock.core.seeds import generator_for
from penstock.feed.position import Position
from penstock.plan.cursor import check_state, show_value
from penstock.recipes.chunked.loader import ChunkedDataLoader

__all__ = ["ChunkSizes", "ChunkedSequenceDataset", "SequenceDataset", "is_unlimited", "resolve_chunk_sizes"]

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Batches per chunk of each partition; both None without chunks."""

    train: int | None
    val: int | None

    @property
    def enabled(self) -> bool:
        """Whether there are chunks."""
        return self.train is not None


def resolve_chunk_sizes(
    train_chunk_size: int | None,
    val_chunk_size: int | None,
    *,
    train_batches: int,
    val_batches: int,
    limits: Mapping[str, Any] | None = None,
) -> ChunkSizes:
    """Return the chunk sizes of both partitions.

    Either size turns chunks on; a partition without a size then runs whole. With chunks, limits of the trainer
    (`limit_train_batches`, `limit_val_batches`) are ignored, with a warning. Without chunks, limits are left to the
    trainer, and never turn chunks on.

    Parameters
    ----------
    train_chunk_size, val_chunk_size
        Batches per chunk, from the configuration.
    train_batches, val_batches
        Batches of the whole partitions; known after `setup()`.
    limits
        Limits of the trainer.

    Examples
    --------
    >>> resolve_chunk_sizes(2000, None, train_batches=9000, val_batches=450)
    ChunkSizes(train=2000, val=450)
    """
    _check_sizes(train_chunk_size, val_chunk_size)
    if train_chunk_size is None and val_chunk_size is None:
        return ChunkSizes(None, None)
    given = {name: value for name, value in (limits or {}).items() if not is_unlimited(value)}
    if given:
        _LOG.warning(
            "%s: ignored, because %s is set. Partitions are walked in chunks, or whole.",
            ", ".join(f"{name}={value}" for name, value in given.items()),
            "train_chunk_size" if train_chunk_size is not None else "val_chunk_size",
        )
    return ChunkSizes(train_chunk_size or max(1, train_batches), val_chunk_size or max(1, val_batches))


class SequenceDataset:
    """An S4-style data module: `setup()` makes the partitions, the other methods make their loaders.

    In `setup`, subclasses set `dataset_train`, `dataset_test` and `dataset_val`, or call `split_train_val`.

    Parameters
    ----------
    data_dir
        Folder of the data, for use in `setup`.
    seed
        Seed of the split.
    """

    def __init__(self, data_dir: Any = None, *, seed: int = 42, **options: Any) -> None:
        self.data_dir, self.seed = data_dir, seed
        self.dataset_train: Any = None
        self.dataset_val: Any = None
        self.dataset_test: Any = None
        for name, value in options.items():
            setattr(self, name, value)

    def setup(self) -> None:
        """Make the partitions."""
        raise NotImplementedError(
            f"{type(self).__name__} must define setup(), which sets dataset_train and the other partitions."
        )

    def split_train_val(self, val_split: float) -> None:
        """Move a fraction of the training items to validation; the seed determines which."""
        if not 0 < val_split < 1:
            raise OptionError(f"val_split must be a fraction between 0 and 1, such as 0.1, got {val_split!r}.")
        items = len(self._partition("train"))
        order = generator_for(self.seed, "split").permutation(items)
        n_val = min(items - 1, max(1, round(items * val_split)))
        train = self._partition("train")
        self.dataset_train, self.dataset_val = (
            Subset(train, sorted(order[n_val:].tolist())),
            Subset(train, sorted(order[:n_val].tolist())),
        )

    def train_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the training partition, shuffled."""
        return DataLoader(self._partition("train"), **{"shuffle": True, **loader})

    def val_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the validation partition: all of it, in order."""
        return DataLoader(self._partition("val"), **{"shuffle": False, **loader, "drop_last": False})

    def test_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the test partition: all of it, in order."""
        return DataLoader(self._partition("test"), **{"shuffle": False, **loader, "drop_last": False})

    def _partition(self, name: str) -> Any:
        found = getattr(self, f"dataset_{name}")
        if found is None:
            raise LoaderError(
                f"dataset_{name} must be set before its loader is made. Set it in setup(), and call that."
            )
        return found


class ChunkedSequenceDataset(SequenceDataset):
    """A data module whose loaders walk their partitions in chunks, if it has a chunk size.

    The position in a partition belongs to the data module: each loader of it continues where the last one stopped, so a
    loop may ask for the loader again in every epoch. `rewind()` starts again.

    Parameters
    ----------
    train_chunk_size, val_chunk_size
        Batches per chunk. Either turns chunks on; a partition without a size then runs whole. Neither: a plain module.
    limits
        `limit_train_batches` and `limit_val_batches` of the trainer, for a warning if they are ignored.
    kwargs
        Arguments of `SequenceDataset`.
    """

    def __init__(
        self,
        train_chunk_size: int | None = None,
        val_chunk_size: int | None = None,
        *,
        limits: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_sizes(train_chunk_size, val_chunk_size)
        self.explicit_train_chunk_size, self.explicit_val_chunk_size = train_chunk_size, val_chunk_size
        self.use_chunked_training = train_chunk_size is not None or val_chunk_size is not None
        self.limits, self._sizes = dict(limits or {}), dict[int, ChunkSizes]()
        self._positions: dict[str, Position] = {}
        self._saved: dict[str, Mapping[str, Any]] = {}  # loaded states, where loaders start

    def chunk_sizes(self, batch_size: int) -> ChunkSizes:
        """Return the chunk sizes of both partitions; call after `setup()`."""
        check_integer("batch_size", batch_size, at_least=1)
        if batch_size not in self._sizes:
            self._sizes[batch_size] = resolve_chunk_sizes(
                self.explicit_train_chunk_size,
                self.explicit_val_chunk_size,
                train_batches=-(-len(self._partition("train")) // batch_size),
                val_batches=0 if self.dataset_val is None else -(-len(self.dataset_val) // batch_size),
                limits=self.limits,
            )
        return self._sizes[batch_size]

    @property
    def train_chunk_size(self) -> int | None:
        """Batches per training chunk; an inferred size is known once the loader is made."""
        return self._size("train", self.explicit_train_chunk_size)

    @property
    def val_chunk_size(self) -> int | None:
        """Batches per validation chunk; an inferred size is known once the loader is made."""
        return self._size("val", self.explicit_val_chunk_size)

    def _size(self, name: str, explicit: int | None) -> int | None:
        if explicit is not None or name not in self._positions:
            return explicit
        return int(self._positions[name].plan.identity()["segment"])

    def train_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the training partition: an endless stream of chunks, or shuffled if without chunks."""
        if not self.use_chunked_training:
            return super().train_dataloader(**loader)
        _check_shuffle(loader, "train", allowed=True)
        size = self.chunk_sizes(loader.get("batch_size", 1)).train
        return self._make_chunked("train", chunk_size=size, seed=self.seed, **{**loader, "shuffle": True})

    def val_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the validation partition: the chunks of one pass after another, in order."""
        if not self.use_chunked_training:
            return super().val_dataloader(**loader)
        _check_shuffle(loader, "val", allowed=False)
        size = self.chunk_sizes(loader.get("batch_size", 1)).val
        return self._make_chunked("val", chunk_size=size, **{**loader, "shuffle": False, "drop_last": False})

    def test_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the test partition: all of it, in order; with chunks, dealt to the ranks."""
        if not self.use_chunked_training:
            return super().test_dataloader(**loader)
        _check_shuffle(loader, "test", allowed=False)
        items, batch_size = self._partition("test"), loader.get("batch_size", 1)
        whole = max(1, -(-len(items) // batch_size))
        return ChunkedDataLoader(items, chunk_size=whole, **{**loader, "shuffle": False, "drop_last": False})

    def _make_chunked(self, name: str, **options: Any) -> ChunkedDataLoader:
        loader = ChunkedDataLoader(self._partition(name), **options)
        assert loader.chunked is not None, "it has a chunk size"
        loader.chunked.position = self._positions[name] = self._continue(name, loader.position)
        return loader

    def _continue(self, name: str, start: Position) -> Position:
        """Return the position of a loader that would begin at `start`: the one that all loaders of the partition share.

        A loader for another rank gets a position of its own at the same batch. One with other batches cannot continue.
        """
        held = self._positions.get(name)
        if held is None:
            if name in self._saved:
                start.load_state_dict(self._saved[name])
            return start
        if held.world == start.world and held.plan.identity() == start.plan.identity():
            return held
        try:
            start.load_state_dict(held.state_dict())
        except ResumeError as error:
            _LOG.warning("The %s loader starts at its first chunk, unlike the one before: %s", name, error)
        return start

    @property
    def current_train_chunk(self) -> int:
        """The next training chunk, counted over all passes."""
        return self._chunk("train")

    @property
    def current_val_chunk(self) -> int:
        """The next validation chunk, counted over all passes."""
        return self._chunk("val")

    def _chunk(self, name: str) -> int:
        state = self.state_dict().get(name)
        return 0 if state is None else int(state["epoch"])

    def rewind(self) -> None:
        """Let the next loaders start again: at the first chunk, or at the state that was loaded."""
        self._positions.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in the partitions that had a loader or a state."""
        return {**self._saved, **{name: position.state_dict() for name, position in self._positions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: now if the loaders have been made, otherwise when they are made."""
        if not isinstance(state, Mapping) or not set(state) <= {"train", "val"}:
            raise ResumeError(f"state must be what state_dict() returned, got {show_value(state)}.")
        for name, entry in state.items():
            check_state(entry)
            if name in self._positions:
                self._positions[name].load_state_dict(entry)
            self._saved[name] = entry


def _check_shuffle(loader: Mapping[str, Any], name: str, *, allowed: bool) -> None:
    given = loader.get("shuffle")
    if given is not None and bool(given) != allowed:
        raise OptionError(
            f"shuffle must not be set with chunk sizes, got shuffle={given!r} for the {name} loader. Leave it out: "
            "training is shuffled, and validation and test are in order."
        )


def _check_sizes(train: Any, val: Any) -> None:
    for name, size in (("train_chunk_size", train), ("val_chunk_size", val)):
        if size is not None:
            check_integer(name, size, at_least=1)


def is_unlimited(limit: Any) -> bool:
    """Return whether a limit of a trainer, a number or a fraction of batches, limits nothing."""
    return limit is None or (isinstance(limit, float) and limit == 1.0)
