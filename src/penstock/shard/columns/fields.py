"""The rows of one field, collected until a block is full."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shard.codec import Payload, npy_header_bytes
from penstock.shard.columns.build_index import StoredRows
from penstock.shard.columns.row_index import Kind
from penstock.shard.names import has_extension

__all__ = ["FieldRows", "member_names"]

_Int64s = NDArray[np.int64]
_Shape = tuple[int, ...]


def member_names(suffix: str, *, is_array: bool) -> tuple[str, ...]:
    """Return the members in which a field may be stored."""
    return (suffix, f"{suffix}.npy") if is_array else (f"{suffix}.npy",)


class FieldRows:
    """Collects the rows of a field. Arrays are stored as such until their shapes differ in more than the first axis.

    Within a shard, the form of a field only widens: arrays of one shape, arrays whose first axis varies, complete
    `.npy` files.
    """

    def __init__(self, suffix: str, dtype: np.dtype[Any] | None) -> None:
        self.suffix, self.dtype = suffix, dtype
        self._kind: Kind = "bytes" if dtype is None else "array"
        self._shape: _Shape | None = None
        # Used again for every block: fresh memory takes longer than copies.
        self._buffer, self._n_bytes = bytearray(), 0
        self._added: bytes | memoryview = b""  # what was added last
        self._sizes: list[int] = []  # of rows that are no arrays
        self._counts: list[tuple[int, _Shape]] = []
        self._last: StoredRows | None = None  # of the last block, while all arrays have one shape

    def add(self, payload: Payload) -> int:
        """Add one row, and return its bytes. They may still be the user's: see `own`."""
        self._added = payload.buffers[0] if self.dtype is None else payload.buffers[1]
        if self.dtype is None:
            self._sizes.append(len(self._added))
        else:
            self._counts.append((1, payload.shape or ()))
        return len(self._added)

    def add_rows(self, array: NDArray[Any]) -> None:
        """Add the rows of a contiguous array. Its bytes may still be the user's: see `own`."""
        self._added = array.reshape(-1).view(np.uint8).data if array.size else b""
        self._counts.append((len(array), array.shape[1:]))

    def own(self) -> None:
        """Copy what was added last, before more is added, or the user has its memory again."""
        end = self._n_bytes + len(self._added)
        if end > len(self._buffer):
            grown = bytearray(max(end, 2 * len(self._buffer)))
            grown[: self._n_bytes] = memoryview(self._buffer)[: self._n_bytes]
            self._buffer = grown
        self._buffer[self._n_bytes : end] = self._added
        self._n_bytes, self._added = end, b""

    def take(self) -> tuple[StoredRows, bytes | memoryview]:
        """Return the rows of a block, and their bytes; forget them, and use their memory again."""
        if self._n_bytes:
            self.own()
        data = memoryview(self._buffer)[: self._n_bytes] if self._n_bytes else memoryview(self._added)
        counts, given = self._counts, self._sizes
        self._n_bytes, self._added, self._counts, self._sizes = 0, b"", [], []
        if self.dtype is None:
            return self._make_rows("bytes", np.array(given, np.int64)), data
        if self._last is not None and counts == [(self._last.n_rows, self._last.shape)]:
            return self._last, data
        shapes = {shape for _, shape in counts}
        if self._kind != "bytes":
            self._kind, self._shape = self._widen(shapes)
        n_bytes = {shape: math.prod(shape) * self.dtype.itemsize for shape in shapes}
        sizes = np.repeat([n_bytes[shape] for _, shape in counts], [count for count, _ in counts])
        if self._kind != "bytes":
            rows = self._make_rows(self._kind, sizes)
            self._last = rows if self._kind == "array" else None
            return rows, data
        self._last = None
        files, sizes = self._as_files(data, counts)
        return self._make_rows("bytes", sizes), files

    def _widen(self, shapes: set[_Shape]) -> tuple[Kind, _Shape | None]:
        """Return the form that holds for earlier rows and for those of other shapes."""
        if self._kind == "array":
            known = shapes if self._shape is None else shapes | {self._shape}
            if len(known) == 1:
                return "array", next(iter(known))
            if () in known:
                return "bytes", None
            trailing = {shape[1:] for shape in known}
        else:
            assert self._shape is not None, "ragged rows have a trailing shape"
            trailing = {self._shape, *(shape[1:] for shape in shapes if shape)}
            if () in shapes:
                return "bytes", None
        one = next(iter(trailing))
        assert self.dtype is not None, "called for arrays only"
        # Bytes of 1-D uint8 arrays under the name of a file could not be told from files.
        ambiguous = self.dtype == np.uint8 and one == () and has_extension(self.suffix.removesuffix(".npy"))
        if len(trailing) > 1 or not math.prod(one) * self.dtype.itemsize or ambiguous:
            return "bytes", None
        return "ragged", one

    def _as_files(self, data: memoryview, counts: list[tuple[int, _Shape]]) -> tuple[bytes, _Int64s]:
        """Return each row as a complete `.npy` file."""
        assert self.dtype is not None, "called for arrays only"
        files, begin = list[bytes](), 0
        for count, shape in counts:
            head, size = npy_header_bytes(self.dtype, shape), math.prod(shape) * self.dtype.itemsize
            files += [head + data[begin + row * size : begin + (row + 1) * size] for row in range(count)]
            begin += count * size
        return b"".join(files), np.fromiter(map(len, files), np.int64, len(files))

    def _make_rows(self, kind: Kind, sizes: _Int64s) -> StoredRows:
        is_bytes = kind == "bytes"
        member = f"{self.suffix}.npy" if is_bytes else self.suffix
        return StoredRows(self.suffix, member, kind, self.dtype, None if is_bytes else self._shape, len(sizes), sizes)
