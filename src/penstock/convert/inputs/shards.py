"""Shards as an input, to change the shard size, shuffle items, or replace pickles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.core.errors import SourceError
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.manifest import METADATA
from penstock.shard.names import automatic_key, stored_extension
from penstock.shard.sample_form import RESERVED_KEYS
from penstock.source.tar.source import TarSource
from penstock.transform.read_values import ItemsAhead

__all__ = ["OpenShards", "ShardsInput"]

_READ_ITEMS, _READ_METADATA = 32, 1024
_TOLD_BYTES, _MOST_TOLD = 16 << 20, 4096  # that are read ahead at once


@dataclass(frozen=True, slots=True)
class ShardsInput:
    """A folder of shards that Penstock wrote or indexed. Every byte is verified as it is read.

    Images, sounds and the like are copied as they are stored. Items keep ids that are not automatic, unless several
    items of a conversion have the same.
    """

    path: Path | Url
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    is_folder: ClassVar[bool] = True

    def open(self) -> "OpenShards":
        """Open the shards."""
        return OpenShards(self.path, self.remote)


class OpenShards:
    """The items of shards, with all fields or some of them."""

    def __init__(
        self, path: Path | Url, remote: RemoteOptions | None = None, fields: Sequence[str] | None = None
    ) -> None:
        # The cache folder is not used: every item is read once.
        self._open = partial(TarSource, str(path) if isinstance(path, Url) else path, **_store_of(path, remote))
        whole = self._open(fields=fields)
        self._names = list(whole.fields)
        if not {*self._names} - {METADATA}:
            raise SourceError(f"A dataset must have fields besides metadata to be converted, but {whole!r} has none.")
        copied = [name for name in self._names if stored_extension(name) not in ("bin", "txt", "json")]
        decoded = [name for name in self._names if name not in copied]
        self._sources = [
            self._open(fields=names, decode=decode) for names, decode in ((copied, False), (decoded, True)) if names
        ]
        self.manifest = whole.manifest
        self.n_samples = whole.index.n_items
        self.about: Mapping[str, Any] = {"format": "shards", "fields": self._names}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = ()

    @property
    def ids(self) -> Sequence[str | None]:
        """The id of each item; None if it is automatic."""
        return [metadata.get("sample_id") for metadata in self.metadata(np.arange(self.n_samples))]

    def metadata(self, numbers: NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        """Yield the metadata of items, without reading fields."""
        if METADATA not in self._names:
            yield from ({} for _ in numbers)
            return
        source = self._open(fields=[METADATA])
        ahead = ItemsAhead(source, np.asarray(numbers, np.int64), _READ_METADATA)
        try:
            for start in range(0, len(numbers), _READ_METADATA):
                ahead.follow(start)
                some = numbers[start : start + _READ_METADATA]
                for number, about in zip(some.tolist(), source.take(some)[METADATA], strict=True):
                    yield _own_metadata(about, number)
        finally:
            source.close()

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of each item, and the next number."""
        return np.stack([numbers, numbers + 1], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        names = [name for name in self._names if name != METADATA]
        item_bytes = max(1, self._sources[0].stored_bytes // max(1, self.n_samples))
        at_once = min(max(_READ_ITEMS, _TOLD_BYTES // item_bytes), _MOST_TOLD)
        ahead = [ItemsAhead(source, np.asarray(numbers, np.int64), at_once) for source in self._sources]
        for start in range(0, len(numbers), _READ_ITEMS):
            some = numbers[start : start + _READ_ITEMS]
            for one in ahead:
                one.follow(start)
            block = {name: array for source in self._sources for name, array in source.take(some).items()}
            for row, number in enumerate(some.tolist()):
                about = _own_metadata(block[METADATA][row], number) if METADATA in block else {}
                yield {name: block[name][row] for name in names}, about

    def close(self) -> None:
        """Close the shards."""
        for source in self._sources:
            source.close()


def _store_of(path: Path | Url, remote: RemoteOptions | None) -> dict[str, Any]:
    return {"store": remote.store} if isinstance(path, Url) and remote is not None else {}


def _own_metadata(about: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the metadata of item `number` without an automatic id, and without its place in the shard."""
    found = {name: value for name, value in about.items() if name not in RESERVED_KEYS}
    sample_id = about.get("sample_id")
    return found if sample_id in (None, automatic_key(number)) else {"sample_id": sample_id, **found}
