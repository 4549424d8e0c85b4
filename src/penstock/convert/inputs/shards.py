"""Shards as an input, to change the shard size, shuffle items, or replace pickles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.core.errors import SourceError
from penstock.shard.manifest import METADATA
from penstock.shard.names import automatic_key
from penstock.shard.sample_form import RESERVED_KEYS
from penstock.source.tar.source import TarSource

__all__ = ["ShardsInput"]

_READ_ITEMS = 32


@dataclass(frozen=True, slots=True)
class ShardsInput:
    """A folder of shards that Penstock wrote or indexed. Every byte is verified as it is read.

    Images are copied as they are stored. Items get new ids. An id that is not automatic is kept in the metadata as
    `original_id`.
    """

    path: Path

    def open(self) -> "_Shards":
        """Open the shards."""
        return _Shards(TarSource(self.path, decode="basic"))  # images stay the files that they are


class _Shards:
    def __init__(self, source: TarSource) -> None:
        if not source.fields.keys() - {METADATA}:
            raise SourceError(f"A dataset must have fields besides metadata to be converted, but {source!r} has none.")
        self._source = source
        self.n_samples = source.index.n_items
        self.about: Mapping[str, Any] = {"format": "shards", "fields": list(source.fields)}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = ()

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of each item, and the next number."""
        return np.stack([numbers, numbers + 1], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        names = [name for name in self._source.fields if name != METADATA]
        for start in range(0, len(numbers), _READ_ITEMS):
            some = numbers[start : start + _READ_ITEMS]
            block = self._source.take(some)
            for row, number in enumerate(some.tolist()):
                stored = dict(block[METADATA][row]) if METADATA in block else {}
                about = {name: value for name, value in stored.items() if name not in RESERVED_KEYS}
                if stored.get("sample_id", automatic_key(number)) != automatic_key(number):
                    about.setdefault("original_id", stored["sample_id"])
                yield {name: block[name][row] for name in names}, about

    def close(self) -> None:
        """Close the shards."""
        self._source.close()
