"""Items from rows of zarr arrays, `.npy` files and HDF5 datasets: one field per array, or per selection of columns."""

import copy
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.index import Index, join_presence
from penstock.core.types import Block, Field, Span
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import is_url, parse_place
from penstock.source.checks import allocate_block, check_items, check_out, check_span, keep_existing, sum_stored
from penstock.source.file_ranges import keep_whole_groups
from penstock.source.ranges import RemoteUse, join_ranges
from penstock.source.read_pool import ReadPool, map_at_once
from penstock.source.remote_parts import RemoteParts
from penstock.source.select.selectable import Selectable, check_fields
from penstock.source.stored.chunk_grid import Selection
from penstock.source.stored.folders import Folders
from penstock.source.stored.open_array import StoredArray, open_array
from penstock.source.stored.zarr.group import check_axes, find_arrays
from penstock.source.stored.zarr.record import MissingChunks, check_missing_chunks
from penstock.source.stored.zarr.store_folder import StoreFolder

__all__ = ["ZarrSource"]

_Key = int | slice
_Run = Callable[[list[Callable[[], int]]], list[int]]
FieldSpec = str | tuple[str, *tuple[_Key, ...]]
"""An array, or an array and a selection for each axis after the first."""


class ZarrSource(Selectable, RemoteParts):
    """Items are the rows of one or more stored arrays of equal length, read in whole chunks.

    1. A damaged chunk: DamageError, which names the array and the chunk. A chunk that was there when the source was
       opened and is missing: the same.
    2. An array that is resized or removed while it is open: ReadError. At a URL, the version of each object is pinned
       when it is first read; one that is replaced is a ReadError.
    3. A fork at any time is safe: zarr and `.npy` files do not stay open, and each process has its own HDF5 handles,
       connections and threads.

    `prepare` concerns the chunks that hold the selected columns of the items, each once, and only the rows themselves
    in local `.npy` files and, where they are read so, uncompressed chunks; it does nothing for local HDF5 files. In a
    call, at most 512 local files of an array (64 shards) are opened. Chunks at a URL are fetched at once, and those of
    one read also without `prepare`. `release` gives a chunk back only if all its rows are among the items.

    Parameters
    ----------
    path
        A zarr store (v2 or v3, with or without sharding), a `.npy` file or `FILE.h5`; zarr and HDF5 also by a URL:
        `s3://`, `gs://`, `az://`, `http://`, `https://`, `file://` or `hf://`. `fields` are relative to it.
    fields
        Name to array, or to an array and a selection of its columns: `("timeseries.zarr", slice(0, 100), 1)` takes
        columns 0 to 99 of the second axis and column 1 of the third. Only chunks that hold them are read. None: `path`
        itself as the field `data`, or all arrays in it.
    threads
        Chunks decompressed at once by all readers of this process. None: one per CPU of this process, and one in a
        worker process, because there are several of those.
    missing_chunks
        What a chunk that is not stored is. None: the fill value if it was not stored when the source was opened,
        as in sparse arrays, and DamageError otherwise, also if that is not known (at a URL, and in arrays of more than
        500,000 files). `"error"`: DamageError when it is read, for arrays that must be complete (a shard may leave out
        chunks of the fill value). `"fill"`: the fill value, as in zarr-python. An array without a fill value must have
        all chunks.
    store
        Of a URL: endpoint, credentials, retries. None: as the environment says.
    cache
        Of a URL: a folder of this machine for what was downloaded, which all processes share. None: nothing is kept.
    cache_bytes
        Size of the files in `cache` at most; None: as much as fits on its disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, FieldSpec] | Sequence[str] | None = None,
        *,
        threads: int | None = None,
        missing_chunks: MissingChunks = None,
        store: StoreOptions | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        check_missing_chunks(missing_chunks)
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f"path must be a path or a URL, got {path!r}. Give arrays by name as fields=...")
        self.path, self._threads = os.fspath(path), threads
        folders = Folders(store=store, cache=cache, cache_bytes=cache_bytes)
        specs = _parse_fields(folders.open(self.path), fields)
        folders.check_used()
        self._arrays: dict[str, StoredArray] = {}
        self._selections: dict[str, Selection] = {}
        self.fields: dict[str, Field] = {}
        try:
            arrays = _open_arrays([where for where, _ in specs.values()], missing_chunks)
        except SourceError as error:
            if fields is not None or len(specs) == 1:
                raise
            raise SourceError(f"{error} Choose arrays with fields=[...]; there are {', '.join(specs)}.") from error
        for name, (where, keys) in specs.items():
            array = arrays[str(where)]
            selection, shape = _parse_selection(name, where, array.shape, keys)
            self._arrays[name], self._selections[name] = array, selection
            self.fields[name] = Field(array.dtype, shape)
        lengths = {name: array.shape[0] for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SourceError(
                f"All arrays must have the same number of rows, got {lengths}. Choose those of one length, as in "
                f"fields={self._find_largest()}."
            )
        if len(specs) > 1:
            check_axes({name: where for name, (where, _) in specs.items()})
        self._n_items = next(iter(lengths.values()))
        self._remotes = RemoteUse(self._arrays.values())
        self._parts = self._remotes.folders
        rows = max(array.chunk_rows for array in self._arrays.values())
        index = Index.uniform(self._n_items, max(1, min(rows, self._n_items)), identity=self._identity())
        self.index = replace(index, presence=join_presence(array.presence for array in self._arrays.values()))
        # By process: after a fork, helper threads of the parent would count as busy although they do not exist.
        self._pools: dict[int, ReadPool] = {}

    def with_fields(self, fields: Sequence[str]) -> "ZarrSource":
        """Return a source of the same items with these fields alone; chunks of other fields are not read."""
        names = check_fields(self, fields)
        other = copy.copy(self)
        other.fields = {name: self.fields[name] for name in names}
        other._arrays = {name: self._arrays[name] for name in names}
        other._selections = {name: self._selections[name] for name in names}
        other._remotes, other._pools = RemoteUse(other._arrays.values()), {}
        other._parts = other._remotes.folders
        return other

    def __repr__(self) -> str:
        return f"ZarrSource({self.path!r}, {self._n_items} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span)) if out is None else check_out(out, self.fields, len(span))
        with self._remotes:
            self._fetch(np.arange(span.start, span.stop))
            self._read(span.start, span.stop, block, self._pool.run)
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; each chunk is decoded once."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        with self._remotes:
            self._take(items, block)
        return block

    def _take(self, items: NDArray[np.int64], block: Block) -> None:
        order = np.argsort(items, kind="stable")
        self._fetch(items[order])
        rows = max(array.chunk_rows for array in self._arrays.values())
        chunks = items[order] // rows
        borders = (np.flatnonzero(np.diff(chunks)) + 1).tolist()
        stretches = [places for places in np.split(order, borders) if len(places)]
        if len(stretches) == 1 or self._pool.threads == 1:
            for places in stretches:
                self._take_stretch(items, places, block, self._pool.run)
        else:  # of each stretch, one chunk after the other: there are enough of them for all threads
            run_here: _Run = lambda tasks: [task() for task in tasks]  # noqa: E731
            self._pool.run([partial(self._take_stretch, items, places, block, run_here) for places in stretches])

    def _take_stretch(self, items: NDArray[np.int64], places: NDArray[np.int64], block: Block, run: _Run) -> int:
        """Read items that share a chunk, which is decoded once, and put them into their places."""
        first, last = int(items[places[0]]), int(items[places[-1]]) + 1
        stretch = allocate_block(self.fields, last - first)
        decoded = self._read(first, last, stretch, run)
        for name, array in block.items():
            array[places] = stretch[name][items[places] - first]
        return sum(decoded.values())

    def prepare(self, items: NDArray[np.int64]) -> int:
        """Start reading the chunks of items into the page cache or from a URL; return the bytes that were not there."""
        rows = keep_existing(items, self)
        return sum(
            ranges.read_ahead()
            for array, selections in self._group_by_array()
            for ranges in join_ranges([array.locate_rows(rows, selection) for selection in selections])
        )

    def _fetch(self, rows: NDArray[np.int64]) -> None:
        """Start to fetch the chunks of rows that are read now and lie at a URL."""
        if not self._remotes:
            return
        parts = [
            array.locate_rows(rows, selection)
            for array, selections in self._group_by_array()
            if array.remote is not None
            for selection in selections
        ]
        for ranges in join_ranges(parts):
            ranges.read_ahead()

    def release(self, items: NDArray[np.int64]) -> None:
        """Give the pages of chunks back to the system, if all their rows are among the items; from a URL, the bytes."""
        given = keep_existing(items, self)
        for array, selections in self._group_by_array():
            rows = keep_whole_groups(given, max(map(array.piece_rows, selections)), self._n_items)
            for ranges in join_ranges([array.locate_rows(rows, selection) for selection in selections]):
                ranges.give_back()

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects of all arrays, estimated from some of them if there are many; None: unknown."""
        return sum_stored(*(array for array, _ in self._group_by_array()))

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether the chunks of an array are compressed, or have no rows that lie alone for another reason."""
        return any(array.decodes_chunks(each) for array, found in self._group_by_array() for each in found)

    def _find_largest(self) -> list[str]:
        """Return the fields of one length that hold most values."""
        by_rows: dict[int, dict[str, int]] = {}
        for name, array in self._arrays.items():
            by_rows.setdefault(array.shape[0], {})[name] = math.prod(array.shape)
        largest = max(by_rows.values(), key=lambda sizes: sum(sizes.values()))
        return list(largest)

    def _group_by_array(self) -> list[tuple[StoredArray, list[Selection]]]:
        """Return each array once, with the selections of its fields."""
        found: dict[int, tuple[StoredArray, list[Selection]]] = {}
        for name, array in self._arrays.items():
            found.setdefault(id(array), (array, []))[1].append(self._selections[name])
        return list(found.values())

    def read_amplification(self, span: Span) -> dict[str, float]:
        """Read a span; return for each field the ratio of bytes decoded to bytes delivered."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span))
        decoded = self._read(span.start, span.stop, block, self._pool.run)
        return {name: decoded[name] / max(1, block[name].nbytes) for name in block}

    def close(self) -> None:
        """Close files once the reads in progress are done; the next read opens them again."""
        for array in self._arrays.values():
            array.close()
        self._remotes.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}}

    @property
    def _pool(self) -> ReadPool:
        process = os.getpid()
        return self._pools.get(process) or self._pools.setdefault(process, ReadPool(self._threads))

    def _read(self, start: int, stop: int, block: Block, run: _Run) -> dict[str, int]:
        """Read rows [start, stop) into `block`; return the number of bytes decoded for each field."""
        tasks: list[tuple[str, Callable[[], int]]] = []
        copies: list[tuple[NDArray[Any], NDArray[Any]]] = []  # to outputs that cannot be read into
        for name, array in self._arrays.items():
            array.check_unchanged()
            selection = self._selections[name]
            # All axes of the array: an axis from which one column is selected has length 1.
            shape = (stop - start, *(high - low for low, high in selection))
            rows = block[name].reshape(shape) if block[name].flags.c_contiguous else np.empty(shape, array.dtype)
            tasks += [(name, task) for task in array.tasks(start, stop, selection, rows)]
            if not block[name].flags.c_contiguous:
                copies.append((rows, block[name]))
        decoded = dict.fromkeys(block, 0)
        for (name, _), n_bytes in zip(tasks, run([task for _, task in tasks]), strict=True):
            decoded[name] += n_bytes
        for rows, out in copies:
            out[...] = rows.reshape(out.shape)
        return decoded

    def _identity(self) -> str:
        """Return a hash of shapes, dtypes, selections and a little of the content, but not of the path."""
        digest = hashlib.sha256()
        arrays = [array for array, _ in self._group_by_array()]
        found = map_at_once(lambda array: array.fingerprint_bytes(), arrays) if self._remotes else []
        contents = dict(zip(map(id, arrays), found, strict=False))
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape} {self._selections[name]};".encode())
            digest.update(contents[id(array)] if self._remotes else array.fingerprint_bytes())
        return digest.hexdigest()[:32]


def _open_arrays(folders: Sequence[StoreFolder], missing: MissingChunks) -> dict[str, StoredArray]:
    """Open arrays, each once, and record their chunks; those at URLs at once."""
    distinct = {str(folder): folder for folder in folders}

    def open_one(folder: StoreFolder) -> StoredArray:
        return open_array(folder).record_chunks(missing)

    is_remote = any(folder.remote is not None for folder in distinct.values())
    opened = (map_at_once if is_remote else map)(open_one, list(distinct.values()))
    return dict(zip(distinct, opened, strict=True))


def _parse_fields(
    root: StoreFolder, fields: Mapping[str, FieldSpec] | Sequence[str] | None
) -> dict[str, tuple[StoreFolder, tuple[_Key, ...]]]:
    """Return the folder and the selection of each field."""
    if fields is None:
        names = find_arrays(root)
        return {"data": (root, ())} if names is None else {name: (root / name, ()) for name in names}
    if isinstance(fields, str) or not fields:
        raise OptionError(f"fields must be names of arrays, or a mapping from names to arrays, got {fields!r}.")
    named = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    specs = {}
    for name, chosen in named.items():
        parts: Any = (chosen,) if isinstance(chosen, str) else chosen
        if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], str) or not isinstance(name, str):
            raise OptionError(
                f"Field {name!r} must be an array, or a tuple of an array and its columns, got {chosen!r}."
            )
        if is_url(parts[0]):
            raise OptionError(f"Fields must be names of arrays below the path, got the URL {parse_place(parts[0])}.")
        specs[name] = (root if parts[0] in ("", ".") else root / parts[0], parts[1:])
    return specs


def _parse_selection(
    name: str, where: StoreFolder, shape: tuple[int, ...], keys: tuple[_Key, ...]
) -> tuple[Selection, tuple[int, ...]]:
    """Return the bounds on each axis after the first, and the shape of an item."""
    if len(keys) > len(shape) - 1:
        raise OptionError(
            f"Field {name!r} must select on at most {len(shape) - 1} axes, the axes of {where} besides rows, "
            f"got {len(keys)} selections."
        )
    bounds: list[tuple[int, int]] = []
    item: list[int] = []
    for axis, size in enumerate(shape[1:]):
        key: Any = keys[axis] if axis < len(keys) else slice(None)
        if isinstance(key, slice):
            within = all(n is None or (_is_integer(n) and -size <= n <= size) for n in (key.start, key.stop))
            if key.step not in (None, 1) or not within:
                raise OptionError(
                    f"Field {name!r} must select a range with step 1 within an axis of {size}, got {key}."
                )
            low, high, _ = key.indices(size)
            bounds.append((low, max(low, high)))
            item.append(max(0, high - low))
        elif _is_integer(key) and -size <= key < size:
            bounds.append((int(key) % size, int(key) % size + 1))
        else:
            raise OptionError(f"Field {name!r} must select a number or a range within an axis of {size}, got {key!r}.")
    return tuple(bounds), tuple(item)


def _is_integer(key: Any) -> bool:
    return isinstance(key, int | np.integer) and not isinstance(key, bool)
