"""A training loop that walks its data in chunks, if the configuration has chunk sizes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from penstock.core.errors import LoaderError
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset, SequenceDataset, is_unlimited

__all__ = ["ChunkedTrainingMixin"]


class ChunkedTrainingMixin:
    """A training loop in chunks if the configuration has chunk sizes, else in whole epochs.

    A class that uses it sets `self.data` to a `ChunkedSequenceDataset` after `setup()`, calls this initializer, and
    defines `training_step(batch)` and `validation_step(batch)`. The data module holds position and order.

    Parameters
    ----------
    config
        A mapping or OmegaConf configuration with `train.train_chunk_size`, `train.val_chunk_size`, `loader` (arguments
        of the loaders) and `trainer.limit_*_batches`.
    """

    data: ChunkedSequenceDataset
    _own_loaders: dict[str, Any] | None = None

    def __init__(self, config: Any) -> None:
        train = _section(config, "train")
        self.explicit_train_chunk_size = train.get("train_chunk_size")
        self.explicit_val_chunk_size = train.get("val_chunk_size")
        self.chunked_training_enabled = (
            self.explicit_train_chunk_size is not None or self.explicit_val_chunk_size is not None
        )
        self._loader_options = dict(_section(config, "loader"))
        limits = {**_limits(train), **_limits(_section(config, "trainer"))}
        self._limits = {} if self.chunked_training_enabled else limits
        self._own_loaders = {}
        if self.chunked_training_enabled:
            self.setup_chunked_training(config)

    def setup_chunked_training(self, config: Any) -> None:
        """Pass the sizes to the data module, which resolves them once it has its partitions."""
        train, data = _section(config, "train"), self._chunked_data()
        data.explicit_train_chunk_size = train.get("train_chunk_size")
        data.explicit_val_chunk_size = train.get("val_chunk_size")
        data.use_chunked_training = True
        data.limits = {**_limits(train), **_limits(_section(config, "trainer"))}

    @property
    def train_chunk_size(self) -> int | None:
        """Batches per training chunk; see `ChunkedSequenceDataset`."""
        return self.data.train_chunk_size if self.chunked_training_enabled else None

    @property
    def val_chunk_size(self) -> int | None:
        """Batches per validation chunk; see `ChunkedSequenceDataset`."""
        return self.data.val_chunk_size if self.chunked_training_enabled else None

    def train_epoch_with_chunking(self) -> dict[str, Any]:
        """Train on the next chunk, validate, and return counts and results; without chunk sizes, a standard epoch."""
        self._check_initialized()
        if not self.chunked_training_enabled:
            return self.standard_training_epoch()
        train, val = self._loader("train"), self._loader("val")
        about = {"train_chunk": train.current_chunk, "val_chunk": val.current_chunk, "total_chunks": train.total_chunks}
        return {**about, **self._run(train, val)}

    def standard_training_epoch(self) -> dict[str, Any]:
        """Train and validate on whole partitions, or up to the limits of the trainer."""
        self._check_initialized()
        train, val = self._loader("train"), self._loader("val")
        return self._run(
            _iterate_up_to(train, self._limits.get("limit_train_batches")),
            _iterate_up_to(val, self._limits.get("limit_val_batches")),
        )

    def _run(self, train: Iterable[Any], val: Iterable[Any]) -> dict[str, Any]:
        losses = [self.training_step(batch) for batch in train]
        checks = [self.validation_step(batch) for batch in val]
        return {"train_batches": len(losses), "val_batches": len(checks), "train": losses, "val": checks}

    def _loader(self, name: str) -> Any:
        assert self._own_loaders is not None, "it is initialized"
        if name not in self._own_loaders:
            data = self._chunked_data() if self.chunked_training_enabled else getattr(self, "data", None)
            if not isinstance(data, SequenceDataset):
                raise LoaderError(self._describe_need("a SequenceDataset"))
            self._own_loaders[name] = getattr(data, f"{name}_dataloader")(**self._loader_options)
        return self._own_loaders[name]

    def _chunked_data(self) -> ChunkedSequenceDataset:
        data = getattr(self, "data", None)
        if not isinstance(data, ChunkedSequenceDataset):
            raise LoaderError(self._describe_need("a ChunkedSequenceDataset"))
        return data

    def _describe_need(self, kind: str) -> str:
        given = type(self.data).__name__ if getattr(self, "data", None) is not None else "none"
        return (
            f"{type(self).__name__}.data must be {kind}, got {given}. Set self.data and call its setup() before "
            "ChunkedTrainingMixin.__init__(self, config)."
        )

    def _check_initialized(self) -> None:
        if self._own_loaders is None:
            raise LoaderError(
                f"{type(self).__name__} must call ChunkedTrainingMixin.__init__(self, config) in its __init__, after "
                "self.data is set."
            )

    def training_step(self, batch: Any) -> Any:
        """Train on one batch; defined by the class that uses this mixin."""
        raise NotImplementedError(f"{type(self).__name__} must define training_step(batch).")

    def validation_step(self, batch: Any) -> Any:
        """Evaluate one batch; defined by the class that uses this mixin."""
        raise NotImplementedError(f"{type(self).__name__} must define validation_step(batch).")


def _section(config: Any, name: str) -> Mapping[str, Any]:
    found = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    return found if found is not None else {}


def _limits(section: Mapping[str, Any]) -> dict[str, Any]:
    names = ("limit_train_batches", "limit_val_batches")
    return {name: section.get(name) for name in names if section.get(name) is not None}


def _iterate_up_to(loader: Any, limit: float | None) -> Iterator[Any]:
    """Yield the first batches of a loader: a number (int) or a fraction (float) of them, as in Lightning."""
    if is_unlimited(limit):
        yield from loader
    else:
        assert limit is not None, "None is unlimited"
        yield from islice(loader, int(len(loader) * limit) if isinstance(limit, float) else int(limit))
