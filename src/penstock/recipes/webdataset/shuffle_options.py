"""The shuffle options of WebDataset loaders, and the shards that a pattern selects."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np

from penstock.core.checks import check_integer
from penstock.core.errors import SourceError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.plan.orders import Sequential, WindowShuffle, shuffle_within
from penstock.shard.names import KEY
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["ShuffleOptions", "match_shards", "select_index"]


@dataclass(frozen=True, slots=True)
class ShuffleOptions:
    """The shuffle options, and the order of the core that they mean."""

    shuffle: bool
    shuffle_shards: bool
    buffer_size: int

    def __post_init__(self) -> None:
        check_integer("buffer_size", self.buffer_size, at_least=1)

    def source(self, shard_dir: str | os.PathLike[str], **options: Any) -> TarSource:
        """Return the source, in the chunks that `order` permutes; with the keys of items, if others wrote the tars."""
        source = TarSource(shard_dir, chunk_items=STRETCH_ITEMS if self.shuffle else None, **options)
        if options.get("fields") is None and source.manifest.shard_size is None:
            return source.with_fields([*source.fields, KEY])
        return source

    def order(self, source: TarSource, index: Index) -> Order:
        """Return the order over `index`: all shards of the source, or some."""
        compressed = source.manifest.compression != "none"
        if not self.shuffle:
            return WindowShuffle(1, permute_items=False, held=compressed) if self.shuffle_shards else Sequential()
        return shuffle_within(index, self.buffer_size, permute_chunks=self.shuffle_shards, held=compressed)


def match_shards(source: TarSource, pattern: str | None) -> list[int]:
    """Return the numbers of the shards whose names match; raise SourceError if none does."""
    names = [shard.name for shard in source.manifest.shards]
    found = [number for number, name in enumerate(names) if pattern is None or fnmatch(name, pattern)]
    if not found:
        raise SourceError(f"No shards found that match {pattern!r}. The dataset has {names[0]} … {names[-1]}.")
    return found


def select_index(source: TarSource, shards: Sequence[int]) -> Index:
    """Return the index of the items in some shards."""
    if len(shards) == len(source.manifest.shards):
        return source.index
    counts = [shard.n_items for shard in source.manifest.shards]
    return source.index.select(np.repeat(np.isin(np.arange(len(counts)), shards), counts))
