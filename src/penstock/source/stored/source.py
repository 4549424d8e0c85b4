"""Rows of large arrays, in zarr stores, `.npy` and HDF5 files: several arrays side by side, some columns of each."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.source.checks import allocate_block, check_items, check_out, check_span
from penstock.source.read_pool import ReadPool
from penstock.source.stored.open_array import StoredArray, opened_array
from penstock.source.stored.zarr.local import Selection

__all__ = ["ZarrSource"]

_Key = int | slice
Selected = str | tuple[str, *tuple[_Key, ...]]
"""An array, or an array and what is wanted of each of its axes but the first."""


class ZarrSource:
    """Items are the rows of one or more stored arrays of equal length, read in whole chunks.

    1. A chunk that is damaged: DamageError, which names the array and the chunk. One that is missing: the fill value,
       where the store says what that is; DamageError where it does not.
    2. An array that is resized, or goes away, while it is open: ReadError.
    3. A fork in the middle: no file is open, and each process has threads of its own.

    Parameters
    ----------
    path
        A zarr store (v2 or v3, with or without sharding), a `.npy` file, `FILE.h5`, or a URL that fsspec or obstore
        knows; fields are looked for in it.
    fields
        Name to array, or to an array and a selection of its columns: `("timeseries.zarr", slice(0, 100), 1)` takes
        columns 0 to 99 of the second axis and column 1 of the third. Only chunks that hold them are read. None: `path`
        itself, as the field `data`, or all arrays in it.
    threads
        Chunks decompressed at once, by all readers of this process together; None: one for each CPU of this process,
        and one in a worker process, of which there are several.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, Selected] | Sequence[str] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f"path={path!r}; give a path or a URL first, and arrays by name as fields=...")
        self.path, self._threads = os.fspath(path), threads
        wanted = _wanted(self.path, fields)
        self._arrays: dict[str, StoredArray] = {}
        self._selections: dict[str, Selection] = {}
        self.fields: dict[str, Field] = {}
        for name, (where, keys) in wanted.items():
            array = opened_array(where)
            selection, shape = _selected(name, where, array.shape, keys)
            self._arrays[name], self._selections[name] = array, selection
            self.fields[name] = Field(array.dtype, shape)
        lengths = {name: array.shape[0] for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SourceError(f"The arrays have different numbers of rows, {lengths}; give those that belong together.")
        self._n_items = next(iter(lengths.values()))
        rows = max(array.chunk_rows for array in self._arrays.values())
        self.index = Index.uniform(self._n_items, max(1, min(rows, self._n_items)), identity=self._identity())
        # By process: threads of a parent do not run in its fork, but may have been counted there.
        self._helpers: dict[int, ReadPool] = {}

    def __repr__(self) -> str:
        return f"ZarrSource({self.path!r}, {self._n_items} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span)) if out is None else check_out(out, self.fields, len(span))
        self._read(span.start, span.stop, block)
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; each chunk that holds one of them is decoded once."""
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
            part = allocate_block(self.fields, last - first)
            self._read(first, last, part)
            for name, array in block.items():
                array[places] = part[name][items[places] - first]
        return block

    def read_amplification(self, span: Span) -> dict[str, float]:
        """Return, for each field, the bytes that are decoded to read a span, over the bytes that are given."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span))
        decoded = self._read(span.start, span.stop, block)
        return {name: decoded[name] / max(1, block[name].nbytes) for name in block}

    def close(self) -> None:
        """Let go of files, when the reads under way are done; the next read starts anew."""
        for array in self._arrays.values():
            array.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_helpers": {}}

    def _read(self, start: int, stop: int, block: Block) -> dict[str, int]:
        """Read rows into `block`; return the bytes that were decoded for each field."""
        tasks: list[tuple[str, Callable[[], int]]] = []
        for name, array in self._arrays.items():
            array.check_unchanged()
            selection = self._selections[name]
            # With all its axes: an axis of which one column is taken has length 1 there.
            shape = (stop - start, *(high - low for low, high in selection))
            rows = block[name].reshape(shape) if block[name].flags.c_contiguous else np.empty(shape, array.dtype)
            tasks += [(name, task) for task in array.tasks(start, stop, selection, rows)]
            if not block[name].flags.c_contiguous:
                tasks.append((name, _Copy(rows, block[name])))
        decoded = dict.fromkeys(block, 0)
        for (name, _), n_bytes in zip(tasks, self._done([task for _, task in tasks]), strict=True):
            decoded[name] += n_bytes
        return decoded

    def _done(self, tasks: list[Callable[[], int]]) -> list[int]:
        """Do the tasks, several at once where there are threads."""
        copies = [task for task in tasks if isinstance(task, _Copy)]
        reads = [task for task in tasks if not isinstance(task, _Copy)]
        process = os.getpid()
        helpers = self._helpers.get(process) or self._helpers.setdefault(process, ReadPool(self._threads))
        found = dict(zip(map(id, reads), helpers.run(reads), strict=True))
        found |= {id(copy): copy() for copy in copies}
        return [found[id(task)] for task in tasks]

    def _identity(self) -> str:
        """Return what stands for the content: shapes, types, selections and a little of it; not where it lies."""
        digest = hashlib.sha256()
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape} {self._selections[name]};".encode())
            digest.update(array.sampled())
        return digest.hexdigest()[:32]


class _Copy:
    """Brings rows to where they could not be read to; done after all reads."""

    def __init__(self, rows: NDArray[Any], out: NDArray[Any]) -> None:
        self._rows, self._out = rows, out

    def __call__(self) -> int:
        self._out[...] = self._rows.reshape(self._out.shape)
        return 0


def _wanted(
    path: str, fields: Mapping[str, Selected] | Sequence[str] | None
) -> dict[str, tuple[str, tuple[_Key, ...]]]:
    """Return for each field its array and what is wanted of it."""
    if fields is None:
        found = _arrays_in(path)
        return {name: (where, ()) for name, where in found.items()}
    if isinstance(fields, str) or not fields:
        raise OptionError(f"fields={fields!r}; give names of arrays, or a mapping from names to arrays.")
    named = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    wanted = {}
    for name, chosen in named.items():
        parts: Any = (chosen,) if isinstance(chosen, str) else chosen
        if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], str) or not isinstance(name, str):
            raise OptionError(f"Field {name!r} is {chosen!r}; give an array, or a tuple of an array and its columns.")
        wanted[name] = (_joined(path, parts[0]), parts[1:])
    return wanted


def _joined(path: str, name: str) -> str:
    return path if name in ("", ".") else f"{path.rstrip('/')}/{name}"


def _arrays_in(path: str) -> dict[str, str]:
    """Return the arrays in a folder, or the one that it is."""
    folder = Path(path)
    if "://" in path or not folder.is_dir() or (folder / ".zarray").exists():
        return {"data": path}
    if (folder / "zarr.json").exists() and b'"array"' in (folder / "zarr.json").read_bytes():
        return {"data": path}
    found = {
        entry.name: str(entry)
        for entry in sorted(folder.iterdir())
        if (entry / ".zarray").exists()
        or ((entry / "zarr.json").exists() and b'"array"' in (entry / "zarr.json").read_bytes())
    }
    if not found:
        raise SourceError(f"There are no zarr arrays in {path}; name them with fields=.")
    return found


def _selected(
    name: str, where: str, shape: tuple[int, ...], keys: tuple[_Key, ...]
) -> tuple[Selection, tuple[int, ...]]:
    """Return what is wanted of each axis but the first, and the shape of an item."""
    if len(keys) > len(shape) - 1:
        raise OptionError(f"Field {name!r} selects on {len(keys)} axes, but {where} has {len(shape) - 1} besides rows.")
    bounds: list[tuple[int, int]] = []
    item: list[int] = []
    for axis, size in enumerate(shape[1:]):
        key: Any = keys[axis] if axis < len(keys) else slice(None)
        if isinstance(key, slice):
            within = all(n is None or (_is_number(n) and -size <= n <= size) for n in (key.start, key.stop))
            if key.step not in (None, 1) or not within:
                raise OptionError(f"Field {name!r} selects {key} of an axis of {size}; use a plain range within it.")
            low, high, _ = key.indices(size)
            bounds.append((low, max(low, high)))
            item.append(max(0, high - low))
        elif _is_number(key) and -size <= key < size:
            bounds.append((int(key) % size, int(key) % size + 1))
        else:
            raise OptionError(
                f"Field {name!r} selects {key!r} of an axis of {size}; use a number or a range within it."
            )
    return tuple(bounds), tuple(item)


def _is_number(key: Any) -> bool:
    return isinstance(key, int | np.integer) and not isinstance(key, bool)
