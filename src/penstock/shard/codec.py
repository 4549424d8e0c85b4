"""Encoding values as member payloads; reading and writing of `.npy` and JSON. Nothing is pickled unless requested."""

import ast
import io
import json
import math
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.core.limits import MAX_AXES
from penstock.shard.names import stored_extension

__all__ = [
    "ArrayFormat",
    "NpyHeader",
    "Payload",
    "decode_json",
    "decode_npy",
    "encode",
    "is_plain_array",
    "json_bytes",
    "npy_header_bytes",
    "parse_descr",
    "parse_npy_header",
]

ArrayFormat = Literal["npy", "pyd"]

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
# As numpy writes it for arrays of one number type; evaluating Python instead takes ten times as long.
_USUAL_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<>|][a-zA-Z]\d{1,4})', 'fortran_order': (?P<fortran_order>True|False), "
    rb"'shape': \((?P<shape>(\d{1,18},|\d{1,18}(, \d{1,18}){1,31}|))\), \} *\n?"
)
_USUAL_DESCR = re.compile(r"'([<>|][a-zA-Z]\d{1,4})'")
_EVALUATION_ATTEMPTS = 100
_COPIED_BYTES = 1 << 14  # copying smaller arrays is faster than making a view
_SCAN_JSON: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
_PICKLE_PROTOCOL = 4  # readable by Python 3.8 and numpy 1.x


@dataclass(slots=True, eq=False)  # not frozen, which is faster: one is made for every field of every sample
class Payload:
    """The payload of one member."""

    extension: str
    buffers: tuple[bytes | memoryview, ...]
    size: int
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a `.npy` payload."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int


def encode(name: str, value: Any, array_format: ArrayFormat = "npy") -> Payload:
    """Encode `value`: arrays, tensors and numbers as `.npy`, text as `.txt`, bytes as `.bin`, lists and dicts as JSON.

    Bytes of a field whose name ends like that of a file, such as `png` or `left.wav`, keep that extension.

    Examples
    --------
    >>> encode("label", 3).extension, encode("note", "left").extension, encode("events", [1, {"a": None}]).extension
    ('npy', 'txt', 'json')
    >>> encode("raw", b"...").extension, encode("png", b"...").extension
    ('bin', 'png')
    """
    array = value if type(value) is np.ndarray else None
    if isinstance(value, np.generic) and not isinstance(value, str | bytes):  # an element of an array of text is text
        array = np.asarray(value)
    if array is None:
        if isinstance(value, str):
            return _make_payload("txt", _text_bytes(name, value))
        if isinstance(value, bytes | bytearray | memoryview):
            return _encode_bytes(name, bytes(value))
        if value is None or isinstance(value, list | tuple | Mapping):
            return _make_payload("json", json_bytes(value, f"field {name!r}"))
        array = _to_array(name, value)
    if array.dtype.hasobject:
        raise OptionError(
            f"Field {name!r} must hold numbers or fixed-width strings, got Python objects ({array.dtype}). Convert it, "
            "or pass a list of plain values."
        )
    if array.ndim > MAX_AXES:
        raise OptionError(f"Field {name!r} must have at most {MAX_AXES} axes, got {array.ndim}. Reshape it.")
    if array.dtype.isbuiltin != 1:  # structured, void, or of another package
        array = _to_plain_dtype(name, array)
    if array_format == "pyd":
        # Copy first: a view would be pickled with its whole base array.
        pickled = pickle.dumps(array.copy(), protocol=_PICKLE_PROTOCOL)
        return Payload("pyd", (pickled,), len(pickled), array.dtype, array.shape)
    head = npy_header_bytes(array.dtype, array.shape)
    if array.nbytes < _COPIED_BYTES:
        data: bytes | memoryview = array.tobytes()
    else:  # as bytes, since dates and some other dtypes do not support the buffer protocol
        data = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
    return Payload("npy", (head, data), len(head) + len(data), array.dtype, array.shape)


def is_plain_array(value: Any) -> bool:
    """Return whether the rows of `value` are stored as they are in memory: an array of numbers of NumPy itself."""
    if not isinstance(value, np.ndarray) or type(value) not in (np.ndarray, np.memmap):
        return False
    return value.dtype.isbuiltin == 1 and not value.dtype.hasobject


def _text_bytes(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"Field {name!r} must be valid Unicode: {error}.") from error


def _encode_bytes(name: str, content: bytes) -> Payload:
    """Encode the bytes of a field under its own extension if it has one; they must then be what that says."""
    extension = stored_extension(name)
    try:
        if extension == "txt":
            content.decode()
        elif extension == "json":
            decode_json(content)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"Field {name!r} must be valid {extension}, as its name says: {error}. Rename it to store any bytes."
        ) from error
    return _make_payload(extension, content)


def _make_payload(extension: str, payload: bytes) -> Payload:
    return Payload(extension, (payload,), len(payload))


def _to_array(name: str, value: Any) -> NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            is_narrow = value.is_floating_point() and value.dtype.itemsize < 4  # bfloat16, float8
            cure = "Convert it: value.float() keeps every number." if is_narrow else "Convert it."
            raise OptionError(
                f"Field {name!r} must have a dtype that numpy supports, got {value.dtype}: "
                f"{str(error).removesuffix('.')}. {cure}"
            ) from error
    if isinstance(value, np.ma.MaskedArray):
        raise OptionError(f"Field {name!r} must not be a masked array. Write its data and its mask as two fields.")
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        raise OptionError(f"Field {name!r} must fit into 64 bits, got {value}. Write it as text.")
    if not isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        raise OptionError(
            f"Field {name!r} must be an array, tensor, number, string, bytes, list or dict, got {type(value).__name__}."
        )
    return np.asarray(value)


@lru_cache(maxsize=256)
def npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of an array in C order, as it is written."""
    out = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        np.lib.format.write_array_header_1_0(out, fields)
    except UnicodeEncodeError:  # field names that need version 3, which numpy has no public function for
        text = repr(fields).encode()
        text += b" " * (-(len(text) + 13) % 64) + b"\n"
        return _MAGIC + b"\x03\x00" + len(text).to_bytes(4, "little") + text
    return out.getvalue()


def _to_plain_dtype(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the dtype that a file gives back; raise OptionError if that would be another one."""
    found = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype))
    if found != array.dtype:
        raise OptionError(
            f"Field {name!r} must have a dtype of numpy itself, got {array.dtype}, which would be read as {found}. "
            "Convert it, for example to float32."
        )
    return _zero_padding(array.view(found)) if array.dtype.names else array


def _zero_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Copy a structured array with zeros as padding, so that the same values give the same bytes."""
    clean = np.zeros(array.shape, array.dtype)
    for name in array.dtype.names or ():
        clean[name] = _zero_padding(array[name]) if array[name].dtype.names else array[name]
    return clean


def json_bytes(value: Any, where: str) -> bytes:
    """Encode `value` as strict JSON; raise OptionError if JSON would change it or cannot hold it."""
    try:
        plain = _to_plain(value, where)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{where} cannot be stored as JSON: {error}.") from error


def _to_plain(value: Any, where: str) -> Any:
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, np.generic):
        if value.dtype.kind in "mMV":  # `item` would return a number without its unit, or a tuple without names
            raise OptionError(
                f"{where} must be a string, number, list or dict, got {value.dtype}. Use str(), or an array."
            )
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OptionError(f"{where} must be finite in JSON, got {value}. Use None, or an array.")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise OptionError(f"Keys of {where} must be strings, got {key!r}, which JSON would turn into a string.")
        return {key: _to_plain(element, f"{where}[{key!r}]") for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(element, f"{where}[{number}]") for number, element in enumerate(value)]
    if isinstance(value, str | bool | int):
        return value
    raise OptionError(
        f"{where} must be a string, number, list or dict, got {type(value).__name__}. "
        "Pass arrays as fields of their own."
    )


def parse_npy_header(head: bytes, size: int, *, exact: bool = True) -> NpyHeader:
    """Parse the first bytes of a `.npy` of `size` bytes; raise ValueError if they are invalid or it holds objects.

    With `exact=False`, other bytes may follow the array, as in a file to which `np.save` has appended another one.
    """
    try:
        dtype, shape, fortran_order, offset = _parse_npy(head)
    except (KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"its .npy header is malformed: {type(error).__name__}: {error}") from error
    if dtype.hasobject:
        raise ValueError("it holds an array of Python objects, which would have to be unpickled")
    if dtype.subdtype is not None:  # no array has such a dtype, and NumPy and we would make another shape of it
        raise ValueError(f"its .npy header has the invalid dtype {dtype}")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"its .npy header has an invalid shape {shape}")
    if len(shape) > MAX_AXES:
        raise ValueError(f"its .npy header has {len(shape)} axes; at most {MAX_AXES} are allowed")
    data_bytes = math.prod(shape) * dtype.itemsize
    if data_bytes > size - offset or (exact and data_bytes < size - offset):
        raise ValueError(
            f"{dtype} {shape} in its .npy header needs {data_bytes} bytes, but {size - offset} bytes of data follow"
        )
    return NpyHeader(dtype, shape, fortran_order, offset)


def _parse_npy(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the array is in Fortran order, and the offset of the data."""
    width = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(head[6:8])
    if head[:6] != _MAGIC or width is None:
        raise ValueError("it is not a .npy file of a valid version")
    offset = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if offset > len(head):
        raise ValueError(f"its .npy header needs {offset} bytes, but {len(head)} are there")
    usual = _USUAL_HEADER.fullmatch(head, 8 + width, offset)
    if usual is not None:
        lengths = tuple(int(length) for length in usual["shape"].split(b",") if length.strip())
        return _make_dtype(usual["descr"].decode()), lengths, usual["fortran_order"] == b"True", offset
    text = head[8 + width : offset].decode("utf-8" if head[6] == 3 else "latin1")
    fields = _evaluate(text.strip())
    dtype = np.lib.format.descr_to_dtype(fields["descr"])
    return dtype, tuple(fields["shape"]), bool(fields["fortran_order"]), offset


def parse_descr(text: str) -> np.dtype[Any]:
    """Return the dtype of the `repr` of a numpy description, such as `"'<f4'"`; raise if it is invalid."""
    usual = _USUAL_DESCR.fullmatch(text)
    return _make_dtype(usual[1]) if usual is not None else np.lib.format.descr_to_dtype(_evaluate(text))


def _evaluate(text: str) -> Any:
    """Evaluate a Python literal."""
    for _ in range(_EVALUATION_ATTEMPTS - 1):
        try:
            return ast.literal_eval(text)
        except SystemError:
            # Python 3.11 keeps one count of the recursion depth for all threads. If two of them evaluate at once, it
            # may find a mismatch (python/cpython#106905).
            continue
    return ast.literal_eval(text)


@lru_cache(maxsize=256)
def _make_dtype(descr: str) -> np.dtype[Any]:
    return np.dtype(descr)


def decode_npy(payload: bytes | memoryview) -> NDArray[Any]:
    """Return the array of a `.npy` payload; raise ValueError if it is invalid.

    The array may use the memory of a writable payload, so the caller must not reuse it.
    """
    header = parse_npy_header(bytes(payload[:_MAX_HEADER_BYTES]), len(payload))
    flat = np.frombuffer(payload, header.dtype, offset=header.data_offset)
    array = flat.reshape(header.shape, order="F" if header.fortran_order else "C")
    # The result is writable and in native byte order.
    must_copy = not (flat.flags.writeable and flat.flags.aligned)
    return array.astype(header.dtype.newbyteorder("="), order="C", copy=must_copy)


def decode_json(payload: bytes) -> Any:
    """Return the value that JSON stands for; raise ValueError if it is invalid."""
    # Every sample has one, and `json.loads` takes longest to look for other encodings and spaces.
    try:
        text = payload.decode()
        value, end = _SCAN_JSON(text, 0)
        if end == len(text):
            return value
    except (ValueError, StopIteration):
        pass
    return json.loads(payload)
