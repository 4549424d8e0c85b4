"""Pickles that cannot run anything: a closed list of what they may name.

A pickle is a program. Existing shards hold `.pyd` members, pickled arrays and tensors; they are read by an unpickler
that knows numpy's arrays, dtypes and scalars, torch's tensors, and plain containers, and refuses any other name before
it is imported. What it does know is wrapped so that a lying pickle cannot make it allocate what is not in the file.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["PickleRefused", "unpickled"]


class PickleRefused(ValueError):  # noqa: N818  # a reason, which the reader puts into a DamageError
    """A pickle that names something other than data."""


def unpickled(payload: bytes) -> Any:
    """Return the data that a pickle holds; raise PickleRefused where it holds anything else."""
    try:
        value = _Unpickler(io.BytesIO(payload)).load()
    except PickleRefused:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise PickleRefused(f"no valid pickle of data: {type(error).__name__}: {error}") from error
    _refuse_object_arrays(value)
    return value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        home = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        found = _ALLOWED.get((home, name))
        if found is None:
            raise PickleRefused(
                f"it names {module}.{name}, which is no array, tensor or plain container; "
                "only allow_pickle=True runs such a pickle, and with it any code in the file"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise PickleRefused(f"it refers to something outside of itself: {str(pid)[:80]!r}")


def _array(*_: Any) -> Any:
    """Stand for numpy.ndarray, which pickles name and never call."""
    raise PickleRefused("an array without data")


def _reconstruct(kind: Any, shape: tuple[int, ...], code: bytes) -> Any:
    # Numpy's own pickles make an empty array here and fill it by its state.
    if kind is not _array or shape != (0,):
        raise PickleRefused(f"an array of type {kind!r} and shape {shape!r} before its data")
    return np.ndarray.__new__(np.ndarray, (0,), code.decode() if isinstance(code, bytes) else code)


def _from_buffer(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)  # type: ignore[call-overload]


def _scalar(dtype: np.dtype[Any], data: bytes = b"") -> Any:
    if dtype.hasobject:
        raise PickleRefused("a scalar of Python objects")
    return np.frombuffer(data, dtype, count=1)[0]


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    return text.encode(encoding)


def _bytearray(data: bytes = b"") -> bytearray:
    if not isinstance(data, bytes | list):
        raise PickleRefused("a bytearray of a size instead of bytes")
    return bytearray(data)


def _storage(data: bytes) -> Any:
    import torch  # noqa: PLC0415  # only where a tensor was pickled

    return torch.load(io.BytesIO(data), weights_only=True)


def _tensor(*arguments: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch._utils._rebuild_tensor_v2(*arguments)  # type: ignore[no-untyped-call]


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _array,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _bytes,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _bytearray,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}


def _refuse_object_arrays(value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise PickleRefused("an array of Python objects")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for part in value:
            _refuse_object_arrays(part)
