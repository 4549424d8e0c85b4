"""Pickles that cannot run anything: a closed list of what they may name.

A pickle is a program. Existing shards hold `.pyd` members, pickled arrays and tensors; they are read by an unpickler
that knows numpy's arrays, dtypes and scalars, torch's tensors, and plain containers, and refuses any other name before
it is imported. It is Python's own, written in Python: nothing is allocated that the file does not hold. Arrays and
dtypes are put together by numpy's constructors, which check them, and not by their `__setstate__`, which does not.
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
    """A pickle that names something other than data."""


def unpickle(payload: bytes) -> Any:
    """Return the data that a pickle holds; raise PickleRefused where it holds anything else."""
    try:
        return _resolved(_Unpickler(_Bytes(payload)).load(), {})
    except PickleRefused:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise PickleRefused(f"no valid pickle of data: {type(error).__name__}: {error}") from error


class _Bytes(io.BytesIO):
    """A file that gives as many bytes as it is asked for, or none."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > len(self.getbuffer()) - self.tell():
            raise EOFError("it ends too early")
        return super().read(size)


class _Unpickler(pickle._Unpickler):
    # What the base class has and typeshed leaves out.
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    # Without what data do not need: registered extensions, instances of classes, buffers from outside.
    dispatch: ClassVar[dict[int, Any]] = {  # of methods of this class
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
        """Check that a frame is there; what is in it is read as if there were none."""
        size = int.from_bytes(self.read(8), "little")
        here = self._file.tell()
        self._file.read(size)
        self._file.seek(here)

    def _load_bytearray(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))

    dispatch[pickle.FRAME[0]] = _load_frame
    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def __init__(self, file: _Bytes) -> None:
        super().__init__(file)
        self._file = file

    def persistent_load(self, pid: Any) -> Any:
        raise PickleRefused(f"it refers to something outside of itself: {str(pid)[:80]!r}")

    def find_class(self, module: str, name: str) -> Any:
        home = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        found = _ALLOWED.get((home, name))
        if found is None:
            raise PickleRefused(
                f"it names {module}.{name}, which is no array, tensor or plain container; "
                "only allow_pickle=True runs such a pickle, and with it any code in the file"
            )
        return found


class _Known:
    """A name that a pickle may use: it can be called, and not be changed."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise PickleRefused(f"it changes {name!r} of something that is no data")

    def __setstate__(self, state: Any) -> None:
        raise PickleRefused("it changes something that is no data")


class _Dtype:
    """A dtype while its state is still to come."""

    __slots__ = ("_code", "_state")

    def __init__(self, code: str, *_: Any) -> None:
        self._code = code
        self._state: tuple[Any, ...] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def value(self) -> np.dtype[Any]:
        dtype: Any = np.dtype(self._code)
        if self._state is not None:
            _, order, subarray, names, fields, size, _, _, *more = self._state
            if subarray is not None:
                dtype = np.dtype((subarray[0].value(), tuple(map(int, subarray[1]))))
            elif names is not None:
                formats, offsets = zip(*(fields[name][:2] for name in names), strict=True) if names else ((), ())
                form: Any = {
                    "names": list(names),
                    "formats": [one.value() for one in formats],
                    "offsets": list(offsets),
                    "itemsize": size,
                }
                dtype = np.dtype(form)
            elif more and dtype.kind in "mM":
                unit, count, *_ = more[0][1]
                dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit.decode() if isinstance(unit, bytes) else unit}]")
            if order in "<>" and names is None and subarray is None:
                dtype = dtype.newbyteorder(order)
        if dtype.hasobject:
            raise PickleRefused("an array of Python objects")
        real: np.dtype[Any] = dtype
        return real


class _Array:
    """An array while its state is still to come."""

    __slots__ = ("_state",)
    __hash__ = None  # type: ignore[assignment]  # no array is a key

    def __init__(self, kind: Any, shape: tuple[int, ...], _: Any) -> None:
        if kind is not _NDARRAY or shape != (0,):
            raise PickleRefused(f"an array of type {kind!r} and shape {shape!r} before its data")
        self._state: tuple[Any, ...] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def value(self) -> Any:
        if self._state is None:
            raise PickleRefused("an array without data")
        _, shape, dtype, fortran, data = self._state
        if not isinstance(data, bytes | bytearray | str):
            raise PickleRefused("an array of Python objects")
        array = _from_buffer(data, dtype, shape, "F" if fortran else "C")
        # As numpy does: numbers in the machine's byte order, structures as they are.
        return array.astype(array.dtype if array.dtype.names else array.dtype.newbyteorder("="), order="K")


def _refuse(*_: Any) -> Any:
    """Stand for numpy.ndarray, which pickles name and never call."""
    raise PickleRefused("an array without data")


def _from_buffer(buffer: Any, dtype: _Dtype, shape: tuple[int, ...], order: str = "C") -> Any:
    content = buffer.encode("latin1") if isinstance(buffer, str) else bytes(buffer)
    real, lengths = dtype.value(), tuple(map(int, shape))
    if min(lengths, default=0) < 0 or math.prod(lengths) * real.itemsize != len(content):
        raise PickleRefused(f"an array of {real} and shape {lengths}, but {len(content)} bytes of data")
    if not content:
        return np.empty(lengths, real)
    return np.ndarray(lengths, real, content, order="F" if order == "F" else "C")


def _scalar(dtype: _Dtype, data: Any = b"") -> Any:
    return _from_buffer(data, dtype, (1,))[0]


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise PickleRefused(f"bytes in the encoding {encoding!r}")
    return text.encode(encoding)


def _bytes(data: Any = b"", *_: Any) -> bytes:
    if not isinstance(data, bytes | bytearray | list):
        raise PickleRefused("bytes of a size instead of bytes")
    return bytes(data)


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_encoded(data, *encoding) if isinstance(data, str) else _bytes(data))


def _storage(data: bytes) -> Any:
    import torch  # noqa: PLC0415  # only where a tensor was pickled

    return torch.load(io.BytesIO(data), weights_only=True)


def _tensor(*arguments: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch._utils._rebuild_tensor_v2(*arguments)  # type: ignore[no-untyped-call]


_NDARRAY = _Known(_refuse)
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Known(_Dtype),
    ("numpy.core.multiarray", "_reconstruct"): _Known(_Array),
    ("numpy.core.multiarray", "scalar"): _Known(_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Known(_from_buffer),
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _Known(_encoded),
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytes"): _Known(_bytes),
    ("builtins", "bytearray"): _Known(_bytearray),
    ("torch._utils", "_rebuild_tensor_v2"): _Known(_tensor),
    ("torch.storage", "_load_from_bytes"): _Known(_storage),
}


def _resolved(value: Any, seen: dict[int, Any]) -> Any:
    """Return `value` with the arrays and dtypes that stand in it put together; each part is looked at once."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, _Array | _Dtype):
        found = seen[id(value)] = value.value()
        return found
    if isinstance(value, _Known):
        raise PickleRefused("a name, and no data")
    if isinstance(value, tuple):
        found = seen[id(value)] = tuple(_resolved(part, seen) for part in value)
        return found
    seen[id(value)] = value
    if isinstance(value, list):
        value[:] = [_resolved(part, seen) for part in value]
    elif isinstance(value, dict):
        for key in list(value):
            value[key] = _resolved(value[key], seen)
    return value
