"""Items from rows of zarr arrays, `.npy` files and HDF5 datasets: one field per array, or per selection of columns."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.index import Index, join_presence
from penstock.core.text import cause
from penstock.core.types import Block, Field, Span
from penstock.files.regular import read_regular
from penstock.files.staging import describe_unfinished, is_half_published
from penstock.source.checks import allocate_block, check_items, check_out, check_span, keep_existing, sum_stored
from penstock.source.file_ranges import FileRanges, keep_whole_groups
from penstock.source.read_pool import ReadPool
from penstock.source.stored.chunk_grid import Selection
from penstock.source.stored.n5 import refuse_n5
from penstock.source.stored.open_array import StoredArray, open_array
from penstock.source.stored.zarr.record import MissingChunks, check_missing_chunks

__all__ = ["ZarrSource"]

_Key = int | slice
FieldSpec = str | tuple[str, *tuple[_Key, ...]]
"""An array, or an array and a selection for each axis after the first."""


class ZarrSource:
    """Items are the rows of one or more stored arrays of equal length, read in whole chunks.

    1. A damaged chunk: DamageError, which names the array and the chunk. A chunk that was there when the source was
       opened and is missing: the same.
    2. An array that is resized or removed while it is open: ReadError.
    3. A fork at any time is safe: zarr and `.npy` files do not stay open, and each process has its own HDF5 handles and
       threads.

    `prepare` concerns local files: the chunks that hold the selected columns of the items, each once, and only the rows
    themselves in `.npy` files, contiguous HDF5 datasets and, where they are read so, uncompressed chunks. In a call, at
    most 512 files of an array (64 shards) are opened. `release` gives a chunk back only if all its rows are among the
    items.

    Parameters
    ----------
    path
        A zarr store (v2 or v3, with or without sharding), a `.npy` file, `FILE.h5`, or a URL supported by fsspec or
        obstore. `fields` are relative to it.
    fields
        Name to array, or to an array and a selection of its columns: `("timeseries.zarr", slice(0, 100), 1)` takes
        columns 0 to 99 of the second axis and column 1 of the third. Only chunks that hold them are read. None: `path`
        itself as the field `data`, or all arrays in it.
    threads
        Chunks decompressed at once by all readers of this process. None: one per CPU of this process, and one in a
        worker process, because there are several of those.
    missing_chunks
        What a chunk that is not stored is. `"error"`: the fill value if it was not stored when the source was opened,
        as in sparse arrays, and DamageError otherwise, also if that is not known (at a URL, and in arrays of more than
        500,000 files). `"fill"`: the fill value, as in zarr-python. An array without a fill value must have all chunks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, FieldSpec] | Sequence[str] | None = None,
        *,
        threads: int | None = None,
        missing_chunks: MissingChunks = "error",
    ) -> None:
        check_missing_chunks(missing_chunks)
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f"path must be a path or a URL, got {path!r}. Give arrays by name as fields=...")
        self.path, self._threads = os.fspath(path), threads
        specs = _parse_fields(self.path, fields)
        self._arrays: dict[str, StoredArray] = {}
        self._selections: dict[str, Selection] = {}
        self.fields: dict[str, Field] = {}
        arrays = {where: open_array(where) for where, _ in specs.values()}
        arrays = {where: array.record_chunks(missing_chunks) for where, array in arrays.items()}
        for name, (where, keys) in specs.items():
            array = arrays[where]
            selection, shape = _parse_selection(name, where, array.shape, keys)
            self._arrays[name], self._selections[name] = array, selection
            self.fields[name] = Field(array.dtype, shape)
        lengths = {name: array.shape[0] for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SourceError(f"All arrays must have the same number of rows, got {lengths}.")
        self._n_items = next(iter(lengths.values()))
        rows = max(array.chunk_rows for array in self._arrays.values())
        index = Index.uniform(self._n_items, max(1, min(rows, self._n_items)), identity=self._identity())
        self.index = replace(index, presence=join_presence(array.presence for array in self._arrays.values()))
        # By process: after a fork, helper threads of the parent would count as busy although they do not exist.
        self._pools: dict[int, ReadPool] = {}

    def __repr__(self) -> str:
        return f"ZarrSource({self.path!r}, {self._n_items} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span)) if out is None else check_out(out, self.fields, len(span))
        self._read(span.start, span.stop, block)
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; each chunk is decoded once."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        order = np.argsort(items, kind="stable")
        rows = max(array.chunk_rows for array in self._arrays.values())
        chunks = items[order] // rows
        borders = (np.flatnonzero(np.diff(chunks)) + 1).tolist()
        for begin, end in zip([0, *borders], [*borders, len(items)], strict=True):
            if begin == end:
                continue
            places = order[begin:end]
            first, last = int(items[places[0]]), int(items[places[-1]]) + 1
            stretch = allocate_block(self.fields, last - first)
            self._read(first, last, stretch)
            for name, array in block.items():
                array[places] = stretch[name][items[places] - first]
        return block

    def prepare(self, items: NDArray[np.int64]) -> int:
        """Start reading the chunks of items into the page cache; return the bytes that were not there."""
        rows = keep_existing(items, self)
        return sum(
            FileRanges.join([array.locate_rows(rows, selection) for selection in selections]).read_ahead()
            for array, selections in self._group_by_array()
        )

    def release(self, items: NDArray[np.int64]) -> None:
        """Give the pages of chunks back to the system, if all their rows are among the items."""
        given = keep_existing(items, self)
        for array, selections in self._group_by_array():
            rows = keep_whole_groups(given, max(map(array.piece_rows, selections)), self._n_items)
            FileRanges.join([array.locate_rows(rows, selection) for selection in selections]).give_back()

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the local files of all arrays, estimated from some of them if there are many; None for a URL."""
        return sum_stored(*(array for array, _ in self._group_by_array()))

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
        decoded = self._read(span.start, span.stop, block)
        return {name: decoded[name] / max(1, block[name].nbytes) for name in block}

    def close(self) -> None:
        """Close files once the reads in progress are done; the next read opens them again."""
        for array in self._arrays.values():
            array.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}}

    def _read(self, start: int, stop: int, block: Block) -> dict[str, int]:
        """Read rows [start, stop) into `block`; return the number of bytes decoded for each field."""
        tasks: list[tuple[str, Callable[[], int]]] = []
        for name, array in self._arrays.items():
            array.check_unchanged()
            selection = self._selections[name]
            # All axes of the array: an axis from which one column is selected has length 1.
            shape = (stop - start, *(high - low for low, high in selection))
            rows = block[name].reshape(shape) if block[name].flags.c_contiguous else np.empty(shape, array.dtype)
            tasks += [(name, task) for task in array.tasks(start, stop, selection, rows)]
            if not block[name].flags.c_contiguous:
                tasks.append((name, _CopyRows(rows, block[name])))
        decoded = dict.fromkeys(block, 0)
        for (name, _), n_bytes in zip(tasks, self._run([task for _, task in tasks]), strict=True):
            decoded[name] += n_bytes
        return decoded

    def _run(self, tasks: list[Callable[[], int]]) -> list[int]:
        """Run the reads in the thread pool, then the copies."""
        copies = [task for task in tasks if isinstance(task, _CopyRows)]
        reads = [task for task in tasks if not isinstance(task, _CopyRows)]
        process = os.getpid()
        pool = self._pools.get(process) or self._pools.setdefault(process, ReadPool(self._threads))
        found = dict(zip(map(id, reads), pool.run(reads), strict=True))
        found |= {id(copy): copy() for copy in copies}
        return [found[id(task)] for task in tasks]

    def _identity(self) -> str:
        """Return a hash of shapes, dtypes, selections and a little of the content, but not of the path."""
        digest = hashlib.sha256()
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape} {self._selections[name]};".encode())
            digest.update(array.fingerprint_bytes())
        return digest.hexdigest()[:32]


class _CopyRows:
    """Copies rows to a non-contiguous output, which cannot be read into; runs after all reads."""

    def __init__(self, rows: NDArray[Any], out: NDArray[Any]) -> None:
        self._rows, self._out = rows, out

    def __call__(self) -> int:
        self._out[...] = self._rows.reshape(self._out.shape)
        return 0


def _parse_fields(
    path: str, fields: Mapping[str, FieldSpec] | Sequence[str] | None
) -> dict[str, tuple[str, tuple[_Key, ...]]]:
    """Return the path and the selection of each field."""
    if fields is None:
        found = _find_arrays(path)
        return {name: (where, ()) for name, where in found.items()}
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
        specs[name] = (_join_path(path, parts[0]), parts[1:])
    return specs


def _join_path(path: str, name: str) -> str:
    return path if name in ("", ".") else f"{path.rstrip('/')}/{name}"


def _find_arrays(path: str) -> dict[str, str]:
    """Return the zarr arrays in a folder by name, or `path` itself as `data`."""
    folder = Path(path)
    if "://" in path or not folder.is_dir() or _is_zarr_array(folder):
        return {"data": path}
    found = {entry.name: str(entry) for entry in sorted(folder.iterdir()) if _is_zarr_array(entry)}
    if not found or is_half_published(folder):
        refuse_n5(path)
        unfinished = describe_unfinished(folder)
        advice = f": {unfinished}" if unfinished else ". Give the folder of the arrays, or of one of them."
        raise SourceError(f"No zarr arrays in {path}{advice}")
    return found


def _is_zarr_array(folder: Path) -> bool:
    metadata = folder / "zarr.json"
    try:
        return (folder / ".zarray").exists() or (metadata.exists() and b'"array"' in read_regular(metadata))
    except OSError as error:
        raise SourceError(f"Could not read {metadata}: {cause(error)}.") from error


def _parse_selection(
    name: str, where: str, shape: tuple[int, ...], keys: tuple[_Key, ...]
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
