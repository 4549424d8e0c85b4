"""A look at the storage of a dataset, for commands: how fast it reads, and which order fits it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError, PenstockError
from penstock.core.protocols import Source
from penstock.core.types import Span
from penstock.files.machine import this_machine
from penstock.files.progress import track_progress
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import is_url
from penstock.observe.storage.advise import OrderAdvice, StoredDataset, advise_order
from penstock.observe.storage.measure import MOST_BYTES, StorageSpeed, leave_unmeasured, measure_storage
from penstock.observe.storage.shards import describe_shards
from penstock.plan.default_order import delivered_bytes
from penstock.source.array import ArraySource
from penstock.source.find_source import open_source
from penstock.source.stored.source import ZarrSource
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["StorageLook", "look_at_storage"]

_MOST_FILES = 20_000  # of a store that are listed: a tenth of a second
_METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
_ALONE = 1.5  # times as many bytes as an item has: it can be read without its chunk
_REACH_CHUNKS = 16  # in a window, at least, if memory allows
_READ_BYTES = 64 << 10  # of a recording whose items are not known


@dataclass(frozen=True, slots=True)
class StorageLook:
    """The storage of a dataset, and the order that fits it; no order for a recording that cannot be trained from."""

    speed: StorageSpeed
    advice: OrderAdvice | None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What to print: names and sentences."""
        found = [("Storage", f"{self.speed}.")]
        return found if self.advice is None else [*found, ("Order", str(self.advice))]

    def __str__(self) -> str:
        return "\n".join(f"{name:<7}  {sentence}" for name, sentence in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"storage": self.speed.to_dict(), "order": None if self.advice is None else self.advice.to_dict()}


def look_at_storage(
    where: str,
    source: Source | None = None,
    *,
    batch_size: int = 32,
    show: bool = True,
    store: StoreOptions | None = None,
) -> StorageLook:
    """Measure the storage of a dataset or recording, and say which order fits it.

    Parameters
    ----------
    source
        Reads the items; None: one is opened, if `where` has items.
    batch_size
        Items per batch, for the mixing score.
    show
        Show progress on stderr if it takes more than a second.
    store
        How to reach a URL.
    """
    items: StoredDataset | None = None
    url: object = where if is_url(where) else None
    with suppress(PenstockError, OSError):  # the command itself reports what is wrong
        opened = _open(where, store) if source is None else source
        url = getattr(opened, "url", None) or url  # the archives of an index on this machine
        try:
            is_described = isinstance(opened, TarSource | ZarrSource | ArraySource) and len(opened.index)
            items = _describe_items(opened, where) if is_described else None
        finally:
            if source is None:
                opened.close()
    if url is not None:
        speed = leave_unmeasured(url, _READ_BYTES if items is None else items.read_bytes)
        return _advise(speed, items, batch_size)
    files = _list_files(Path(where)) if items is None else items.files
    with track_progress("Measuring the storage", MOST_BYTES, "bytes", show=show) as bar:
        speed = measure_storage(files, _READ_BYTES if items is None else items.read_bytes, bar.advance)
    return _advise(speed, items, batch_size)


def _advise(speed: StorageSpeed, items: StoredDataset | None, batch_size: int) -> StorageLook:
    if items is None:
        return StorageLook(speed, None)
    memory_bytes, reach_items = this_machine().memory_bytes, _REACH_CHUNKS * items.chunk_items
    advice = advise_order(speed, items, memory_bytes=memory_bytes, batch_size=batch_size, reach_items=reach_items)
    return StorageLook(speed, advice)


def _open(where: str, store: StoreOptions | None) -> Source:
    """Return the source of a dataset; only shards may be at a URL while their index is on this machine."""
    if store is not None:
        with suppress(OptionError):  # nothing is at a URL
            return open_source(where, store=store)
    return open_source(where)


def _describe_items(source: Source, where: str) -> StoredDataset:
    held_bytes = delivered_bytes(source)
    if isinstance(source, TarSource):
        return describe_shards(source.manifest, chunk_items=STRETCH_ITEMS, held_bytes=held_bytes)
    files = _list_files(Path(where))
    if isinstance(source, ZarrSource):
        return _describe_chunks(source, files, held_bytes or 0)
    return StoredDataset(
        files=files,
        n_items=[len(source.index)],
        stored_bytes=files[0].stat().st_size,
        read_bytes=held_bytes or 0,
        chunk_items=source.index.usual_chunk,
        held_bytes=held_bytes,
    )


def _describe_chunks(source: ZarrSource, files: list[Path], held_bytes: int) -> StoredDataset:
    """Describe the items of a store; if it has very many files, by their size in memory."""
    index = source.index
    is_complete = len(files) < _MOST_FILES
    stored_bytes = sum(file.stat().st_size for file in files) if is_complete else len(index) * held_bytes
    is_whole = max(source.read_amplification(Span(0, 1)).values()) > _ALONE
    return StoredDataset(
        files=files,
        n_items=[len(index)],
        stored_bytes=stored_bytes,
        read_bytes=stored_bytes / index.n_chunks if is_whole else held_bytes,
        chunk_items=index.usual_chunk,
        held_bytes=held_bytes,
        is_whole=is_whole,
        is_fixed=True,
    )


def _list_files(path: Path) -> list[Path]:
    return list(islice(_walk(path), _MOST_FILES)) if path.is_dir() else [path]


def _walk(path: Path) -> Iterator[Path]:
    """Yield the files of a store that hold data, in the order of their names."""
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name not in _METADATA)
