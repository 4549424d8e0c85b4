"""An unpickler for data only: pickles may use a closed list of names and cannot run code.

A pickle is a program. Existing shards hold `.pyd` members, which are pickled arrays and tensors. This unpickler accepts
numpy arrays, dtypes and scalars, torch tensors and plain containers, and refuses any other name before it is imported.
It builds on Python's pure-Python unpickler, so nothing is allocated beyond what the file holds. Arrays and dtypes are
built by numpy's constructors, which validate them, and not by `__setstate__`, which does not.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

__all__ = ["PickleRefused", "unpickle"]


class PickleRefused(ValueError):  # noqa: N818  # a reason, which the reader puts into a DamageError
    """A pickle that holds anything but data."""


def unpickle(payload: bytes) -> Any:
    """Return the data in a pickle; raise PickleRefused if it holds anything else."""
    try:
        return _resolve(_Unpickler(_StrictBytesIO(payload)).load(), {})
    except PickleRefused:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise PickleRefused(f"not a valid pickle of data: {type(error).__name__}: {error}") from error


class _StrictBytesIO(io.BytesIO):
    """A file whose `read` returns the requested number of bytes or raises EOFError."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > len(self.getbuffer()) - self.tell():
            raise EOFError("it ends too early")
        return super().read(size)


class _Unpickler(pickle._Unpickler):
    # Attributes of the base class that typeshed leaves out.
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    # Without opcodes that data do not need: registered extensions, instances of classes, out-of-band buffers.
    dispatch: ClassVar[dict[int, Any]] = {  # opcode to method
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code])
        not in (
            pickle.EXT1,
            pickle.EXT2,
            pickle.EXT4,
            pickle.INST,
            pickle.OBJ,
            pickle.NEWOBJ_EX,
            pickle.NEXT_BUFFER,
            pickle.READONLY_BUFFER,
        )
    }

    def _load_frame(self) -> None:
        """Check that the whole frame is present; its content is then read as if unframed."""
        size = int.from_bytes(self.read(8), "little")
        here = self._file.tell()
        self._file.read(size)
        self._file.seek(here)

    def _load_bytearray(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))

    dispatch[pickle.FRAME[0]] = _load_frame
    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def __init__(self, file: _StrictBytesIO) -> None:
        super().__init__(file)
        self._file = file

    def persistent_load(self, pid: Any) -> Any:
        raise PickleRefused(f"it refers to an object outside the pickle: {str(pid)[:80]!r}")

    def find_class(self, module: str, name: str) -> Any:
        home = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        found = _ALLOWED.get((home, name))
        if found is None:
            raise PickleRefused(
                f"it uses {module}.{name}, but a pickle must hold only arrays, tensors and plain containers; "
                "allow_pickle=True would load it, and run any code in the file"
            )
        return found


class _Allowed:
    """A callable that a pickle may use but not modify."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise PickleRefused(f"it modifies {name!r} of an object that is not data")

    def __setstate__(self, state: Any) -> None:
        raise PickleRefused("it modifies an object that is not data")


class _Dtype:
    """A dtype whose state the unpickler has yet to set."""

    __slots__ = ("_code", "_state")

    def __init__(self, code: str, *_: Any) -> None:
        self._code = code
        self._state: tuple[Any, ...] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def build(self) -> np.dtype[Any]:
        dtype: Any = np.dtype(self._code)
        if self._state is not None:
            _, order, subarray, names, fields, size, _, _, *more = self._state
            if subarray is not None:
                dtype = np.dtype((subarray[0].build(), tuple(map(int, subarray[1]))))
            elif names is not None:
                formats, offsets = zip(*(fields[name][:2] for name in names), strict=True) if names else ((), ())
                spec: Any = {
                    "names": list(names),
                    "formats": [one.build() for one in formats],
                    "offsets": list(offsets),
                    "itemsize": size,
                }
                titles = [(*fields[name], None)[2] for name in names]
                if any(title is not None for title in titles):
                    spec["titles"] = titles
                dtype = np.dtype(spec)
            elif more and dtype.kind in "mM":
                unit, count, *_ = more[0][1]
                dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit.decode() if isinstance(unit, bytes) else unit}]")
            if order in "<>" and names is None and subarray is None:
                dtype = dtype.newbyteorder(order)
        if dtype.hasobject:
            raise PickleRefused("an array of Python objects")
        built: np.dtype[Any] = dtype
        return built


class _Array:
    """An array whose state the unpickler has yet to set."""

    __slots__ = ("_state",)
    __hash__ = None  # type: ignore[assignment]  # arrays are never keys

    def __init__(self, kind: Any, shape: tuple[int, ...], _: Any) -> None:
        if kind is not _NDARRAY or shape != (0,):
            raise PickleRefused(f"an array of type {kind!r} and shape {shape!r} before its data")
        self._state: tuple[Any, ...] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def build(self) -> Any:
        if self._state is None:
            raise PickleRefused("an array without data")
        _, shape, dtype, fortran, data = self._state
        if not isinstance(data, bytes | bytearray | str):
            raise PickleRefused("an array of Python objects")
        array = _from_buffer(data, dtype, shape, "F" if fortran else "C")
        # As numpy does: numbers in native byte order, structured dtypes unchanged.
        return array.astype(array.dtype if array.dtype.names else array.dtype.newbyteorder("="), order="K")


def _refuse(*_: Any) -> Any:
    """Stand in for numpy.ndarray, which pickles name but never call."""
    raise PickleRefused("an array without data")


def _from_buffer(buffer: Any, dtype: _Dtype, shape: tuple[int, ...], order: str = "C") -> Any:
    content = buffer.encode("latin1") if isinstance(buffer, str) else bytes(buffer)
    real, lengths = dtype.build(), tuple(map(int, shape))
    if min(lengths, default=0) < 0 or math.prod(lengths) * real.itemsize != len(content):
        raise PickleRefused(f"an array of {real} and shape {lengths}, but {len(content)} bytes of data")
    if not content:
        return np.empty(lengths, real)
    return np.ndarray(lengths, real, content, order="F" if order == "F" else "C")


def _make_scalar(dtype: _Dtype, data: Any = b"") -> Any:
    return _from_buffer(data, dtype, (1,))[0]


def _encode_text(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise PickleRefused(f"bytes in the unsupported encoding {encoding!r}")
    return text.encode(encoding)


def _make_bytes(data: Any = b"", *_: Any) -> bytes:
    if not isinstance(data, bytes | bytearray | list):
        raise PickleRefused("bytes given by a size instead of their content")
    return bytes(data)


def _make_bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_encode_text(data, *encoding) if isinstance(data, str) else _make_bytes(data))


def _load_storage(data: bytes) -> Any:
    import torch  # noqa: PLC0415  # only if a tensor was pickled

    return torch.load(io.BytesIO(data), weights_only=True)


def _make_tensor(*arguments: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch._utils._rebuild_tensor_v2(*arguments)  # type: ignore[no-untyped-call]


_NDARRAY = _Allowed(_refuse)
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Allowed(_Dtype),
    ("numpy.core.multiarray", "_reconstruct"): _Allowed(_Array),
    ("numpy.core.multiarray", "scalar"): _Allowed(_make_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Allowed(_from_buffer),
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _Allowed(_encode_text),
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytes"): _Allowed(_make_bytes),
    ("builtins", "bytearray"): _Allowed(_make_bytearray),
    ("torch._utils", "_rebuild_tensor_v2"): _Allowed(_make_tensor),
    ("torch.storage", "_load_from_bytes"): _Allowed(_load_storage),
}


def _resolve(value: Any, seen: dict[int, Any]) -> Any:
    """Replace the array and dtype placeholders in `value` by real ones, visiting each object once."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, _Array | _Dtype):
        built = seen[id(value)] = value.build()
        return built
    if isinstance(value, _Allowed):
        raise PickleRefused("a name instead of data")
    if isinstance(value, tuple):
        built = seen[id(value)] = tuple(_resolve(part, seen) for part in value)
        return built
    seen[id(value)] = value
    if isinstance(value, list):
        value[:] = [_resolve(part, seen) for part in value]
    elif isinstance(value, dict):
        for key in list(value):
            value[key] = _resolve(value[key], seen)
    return value
