"""torch in pickles, and files of `torch.save`: read by the same unpickler, with every size checked.

`torch.load(weights_only=True)` runs no code, but trusts sizes: it inflates what is deflated, reads past the end of a
record if a tensor says so, and enlarges a storage with whatever memory holds. Here a storage is a flat tensor of the
bytes that are stored, and a tensor is a view that torch checks against it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.shard.decoders.zips import BoundedZip
from penstock.shard.pickles.arrays import ARRAY_NAMES, check_shape
from penstock.shard.pickles.containers import PLAIN_NAMES
from penstock.shard.pickles.unpickler import Allowed, Budget, PickleRefused, Unpickler

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_NAMES", "load_saved"]

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of files that are no zip archives
_LOAD_BYTES = 10_000  # what the smallest saved tensor is charged
_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_OTHER_DTYPES = ("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2")


class _Dtype:
    """A dtype of torch, or the type of a storage."""

    __slots__ = ("name",)
    __hash__ = None  # type: ignore[assignment]  # no key

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self) -> "torch.dtype":
        import torch  # noqa: PLC0415

        found: torch.dtype = getattr(torch, self.name)
        return found


class _Storage:
    """A storage: a flat tensor."""

    __slots__ = ("flat",)
    __hash__ = None  # type: ignore[assignment]  # no key

    def __init__(self, flat: "torch.Tensor") -> None:
        self.flat = flat


def load_saved(payload: bytes, budget: Budget, names: dict[tuple[str, str], Any]) -> Any:
    """Return what `torch.save` saved; the caller resolves it."""
    return (_load_zip if payload[:2] == b"PK" else _load_stream)(payload, budget, names)


def _load_zip(payload: bytes, budget: Budget, names: dict[tuple[str, str], Any]) -> Any:
    archive = BoundedZip(payload, PickleRefused)
    homes = [name.removesuffix("data.pkl") for name in archive.names if name.endswith("/data.pkl")]
    if len(homes) != 1:
        raise PickleRefused("it is not a file of torch.save")
    home = homes[0]
    swap = bytes(archive.read(f"{home}byteorder")) != b"little" if f"{home}byteorder" in archive.names else False
    storages: dict[str, _Storage] = {}

    def load_persistent(pid: Any) -> _Storage:
        dtype, key, n_items = _check_persistent(pid, 5)
        if key not in storages:
            content = archive.read(f"{home}data/{key}")
            size = n_items * dtype.itemsize
            if len(content) < size:
                raise PickleRefused(f"a tensor of {size} bytes, of which {len(content)} are stored")
            storages[key] = _Storage(_make_flat(content[:size], dtype, swap=swap))
        return storages[key]

    return Unpickler(bytes(archive.read(f"{home}data.pkl")), budget, names, load_persistent).load()


def _load_stream(payload: bytes, budget: Budget, names: dict[tuple[str, str], Any]) -> Any:
    """Read a file that is no zip archive: pickles one after the other, then the storages."""
    import torch  # noqa: PLC0415

    storages: dict[str, _Storage] = {}
    n_bytes = 0

    def load_persistent(pid: Any) -> _Storage:
        nonlocal n_bytes
        dtype, key, n_items = _check_persistent(pid, 6)
        if key not in storages:
            n_bytes += n_items * dtype.itemsize
            if n_bytes > len(payload):
                raise PickleRefused(f"tensors of {n_bytes} bytes, of which at most {len(payload)} are stored")
            storages[key] = _Storage(torch.empty(n_items, dtype=dtype))
        return storages[key]

    unpickler = Unpickler(payload, budget, names, load_persistent)
    magic, version, system = unpickler.load(), unpickler.load(), unpickler.load()
    if type(magic) is not int or magic != _MAGIC or type(version) is not int or version != _VERSION:
        raise PickleRefused("it is not a file of torch.save")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise PickleRefused("its tensors were written by a big-endian machine")
    found, keys = unpickler.load(), unpickler.load()
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise PickleRefused("the data of a tensor are missing")
    for key in keys:
        flat = storages[key].flat
        if int.from_bytes(unpickler.read(8), "little") != len(flat):
            raise PickleRefused("the data of a tensor have another length than the tensor")
        begin, size = unpickler.position, flat.nbytes
        unpickler.position += size
        if unpickler.position > len(payload):
            raise PickleRefused("the data of a tensor are missing")
        if size:
            flat.view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8, size, begin)
    return found


def _check_persistent(pid: Any, length: int) -> "tuple[torch.dtype, str, int]":
    """Return dtype, key and number of items of a storage; the device that it was on does not matter."""
    if type(pid) is not tuple or len(pid) != length or pid[0] != "storage":
        raise PickleRefused("it refers to an object outside the pickle")
    _, kind, key, _, n_items, *view = pid
    if type(kind) is not _Dtype or type(key) is not str or type(n_items) is not int or view not in ([], [None]):
        raise PickleRefused("a tensor without valid storage")
    if not 0 <= n_items < 1 << 48:
        raise PickleRefused(f"a tensor of {n_items} items")
    return kind.build(), key, n_items


def _make_flat(content: memoryview, dtype: "torch.dtype", *, swap: bool) -> "torch.Tensor":
    import torch  # noqa: PLC0415

    if not content:
        return torch.empty(0, dtype=dtype)
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    numbers = np.frombuffer(content, f"u{width}")
    return torch.frombuffer(numbers.byteswap() if swap else numbers.copy(), dtype=dtype)


# -- what pickles call -------------------------------------------------------------------------------------------------


def _load_storage(unpickler: Unpickler, data: Any) -> _Storage:
    if type(data) is not bytes:
        raise PickleRefused("a tensor without valid storage")
    unpickler.budget.charge(_LOAD_BYTES + 2 * len(data))
    # Without this function itself: storages in storages could multiply.
    found = load_saved(data, unpickler.budget, _NAMES_OF_STORAGES)
    if type(found) is not _Storage:
        raise PickleRefused("a tensor without valid storage")
    return found


def _view_storage(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> "torch.Tensor":
    if type(storage) is not _Storage or type(offset) is not int or not 0 <= offset < 1 << 48:
        raise PickleRefused("a tensor without valid storage")
    flat = storage.flat if dtype is None else storage.flat.view(dtype.build())
    lengths, steps = check_shape(size), check_shape(stride)
    if len(lengths) != len(steps):
        raise PickleRefused(f"a tensor of {len(lengths)} axes with steps for {len(steps)}")
    last = offset + sum((length - 1) * step for length, step in zip(lengths, steps, strict=True))
    if math.prod(lengths) and last >= len(flat):
        raise PickleRefused(f"a tensor that needs {last + 1} items, of which {len(flat)} are stored")
    return flat.as_strided(lengths, steps, offset if math.prod(lengths) else 0)


def _make_tensor(_: Unpickler, *arguments: Any) -> "torch.Tensor":
    """`torch._utils._rebuild_tensor_v2`: storage, offset, size, stride, requires_grad, hooks, metadata."""
    return _set_flags(_view_storage(*arguments[:4]), *arguments[4:])


def _make_tensor_of_dtype(_: Unpickler, *arguments: Any) -> "torch.Tensor":
    """`torch._utils._rebuild_tensor_v3`: storage, offset, size, stride, requires_grad, hooks, dtype, metadata."""
    storage, offset, size, stride, requires_grad, hooks, dtype = arguments[:7]
    if type(dtype) is not _Dtype:
        raise PickleRefused("a tensor of an unknown type")
    return _set_flags(_view_storage(storage, offset, size, stride, dtype), requires_grad, hooks, *arguments[7:])


def _set_flags(
    tensor: "torch.Tensor", requires_grad: Any = False, _: Any = None, metadata: Any = None
) -> "torch.Tensor":
    import torch  # noqa: PLC0415

    if type(requires_grad) is not bool or (metadata is not None and type(metadata) is not dict):
        raise PickleRefused("a tensor with invalid flags")
    flags = {name: flag for name, flag in (metadata or {}).items() if flag}
    if not flags.keys() <= {"conj", "neg"}:
        raise PickleRefused("a tensor with unknown flags")
    tensor = torch.conj(tensor) if "conj" in flags else tensor
    tensor = torch._neg_view(tensor) if "neg" in flags else tensor
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _make_parameter(_: Unpickler, data: Any, requires_grad: Any = True, *__: Any) -> Any:
    import torch  # noqa: PLC0415

    if not isinstance(data, torch.Tensor):
        raise PickleRefused("a parameter without data")
    return torch.nn.Parameter(data, requires_grad is True)


def _make_size(_: Unpickler, lengths: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch.Size(check_shape(lengths))


def _make_device(_: Unpickler, *arguments: Any) -> Any:
    import torch  # noqa: PLC0415

    if not all((type(part) is str and len(part) < 32) or (type(part) is int and part < 1 << 15) for part in arguments):
        raise PickleRefused("an unknown device")
    return torch.device(*arguments)


_NAMES_OF_STORAGES: dict[tuple[str, str], Any] = {
    **{("torch", f"{kind}Storage"): _Dtype(name) for kind, name in _DTYPES.items()},
    ("torch.storage", "UntypedStorage"): _Dtype("uint8"),
}
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _make_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _make_tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _make_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("torch", "Size"): _make_size,
    ("torch", "device"): _make_device,
}
ALL_NAMES: dict[tuple[str, str], Any] = {
    **PLAIN_NAMES,
    **ARRAY_NAMES,
    **_NAMES_OF_STORAGES,
    **{("torch", name): _Dtype(name) for name in (*_DTYPES.values(), *_OTHER_DTYPES)},
    **{name: Allowed(call) for name, call in _CALLS.items()},
}
"""All names that a pickle of data may use."""
