"""Values become the payloads of members, and payloads become values; nothing is pickled unless asked for."""

import ast
import io
import json
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError
from penstock.shard.pickles import unpickle

__all__ = [
    "ArrayFormat",
    "Payload",
    "NpyHeader",
    "decode",
    "parse_descr",
    "encode",
    "json_bytes",
    "parse_npy_header",
    "is_uncompressed",
]

ArrayFormat = Literal["npy", "pyd"]

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16
# As numpy writes it, for arrays of one kind of number: evaluating Python takes ten times as long.
_USUAL_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<>|][a-zA-Z]\d{1,4})', 'fortran_order': (?P<fortran_order>True|False), "
    rb"'shape': \((?P<shape>(\d{1,18},|\d{1,18}(, \d{1,18}){1,31}|))\), \} *\n?"
)
_USUAL_DESCR = re.compile(r"'([<>|][a-zA-Z]\d{1,4})'")
_EVALUATED_TIMES = 100
_MOST_RATIO, _ALWAYS_BYTES = 100, 1 << 28  # what a compressed member may grow to
_COPIED_BYTES = 1 << 14  # smaller arrays are copied sooner than a view of them is made
_SCANNED: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
_PICKLE_PROTOCOL = 4  # what Python 3.8 and numpy 1.x read


@dataclass(slots=True, eq=False)  # not frozen: one is made for every field of every sample
class Payload:
    """The payload of one member."""

    extension: str
    pieces: tuple[bytes | memoryview, ...]
    size: int
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a `.npy` payload says of itself."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int


def encode(name: str, value: Any, array_format: ArrayFormat = "npy") -> Payload:
    """Return the payload of `value`: arrays, tensors and numbers as `.npy`; text, bytes, lists and dicts as they are.

    Examples
    --------
    >>> encode("label", 3).extension, encode("note", "left").extension, encode("events", [1, {"a": None}]).extension
    ('npy', 'txt', 'json')
    """
    array = value if type(value) is np.ndarray else np.asarray(value) if isinstance(value, np.generic) else None
    if array is None:
        if isinstance(value, str):
            return _whole("txt", _text_bytes(name, value))
        if isinstance(value, bytes | bytearray | memoryview):
            return _whole("bin", bytes(value))
        if value is None or isinstance(value, list | tuple | Mapping):
            return _whole("json", json_bytes(value, f"field {name!r}"))
        array = _array(name, value)
    if array.dtype.hasobject:
        raise OptionError(
            f"Field {name!r} is an array of Python objects ({array.dtype}); give numbers or fixed-width strings, or a "
            "list of plain values."
        )
    if array.dtype.names:
        array = _without_gaps(array)
    if array_format == "pyd":
        # A row is copied first: a view would be pickled with the whole array it looks into.
        pickled = pickle.dumps(array.copy(), protocol=_PICKLE_PROTOCOL)
        return Payload("pyd", (pickled,), len(pickled), array.dtype, array.shape)
    head = _npy_header_bytes(array.dtype, array.shape)
    if array.nbytes < _COPIED_BYTES:
        data: bytes | memoryview = array.tobytes()
    else:  # as bytes, since dates and the like have no buffer of their own kind
        data = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
    return Payload("npy", (head, data), len(head) + len(data), array.dtype, array.shape)


def _text_bytes(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"Field {name!r} is no valid text: {error}.") from error


def _whole(extension: str, payload: bytes) -> Payload:
    return Payload(extension, (payload,), len(payload))


def _array(name: str, value: Any) -> NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise OptionError(f"Field {name!r} is a tensor that numpy cannot hold, {value.dtype}: {error}") from error
    if isinstance(value, np.ma.MaskedArray):
        raise OptionError(f"Field {name!r} is a masked array; write its data and its mask as two fields.")
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        raise OptionError(f"Field {name!r} is {value}, which 64 bits do not hold; write it as text.")
    if not isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        raise OptionError(
            f"Field {name!r} is a {type(value).__name__}; a sample holds arrays, tensors, numbers, strings, bytes, "
            "lists and dicts."
        )
    return np.asarray(value)


@lru_cache(maxsize=256)
def _npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        np.lib.format.write_array_header_1_0(out, fields)
    except UnicodeEncodeError:  # names of fields that need version 3, which numpy has no function for
        text = repr(fields).encode()
        text += b" " * (-(len(text) + 13) % 64) + b"\n"
        return _MAGIC + b"\x03\x00" + len(text).to_bytes(4, "little") + text
    return out.getvalue()


def _without_gaps(array: NDArray[Any]) -> NDArray[Any]:
    """Return a structured array whose padding is zeros: the same values give the same bytes."""
    clean = np.zeros(array.shape, array.dtype)
    for name in array.dtype.names or ():
        clean[name] = _without_gaps(array[name]) if array[name].dtype.names else array[name]
    return clean


def json_bytes(value: Any, where: str) -> bytes:
    """Return strict JSON; raise OptionError at what JSON would change or cannot hold."""
    try:
        plain = _plain(value, where)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{where} cannot be stored as JSON: {error}.") from error


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OptionError(f"{where} is {value}, which JSON does not have; use None, or an array.")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise OptionError(f"{where} has the key {key!r}; JSON would make a string of it. Use strings as keys.")
        return {key: _plain(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, str | bool | int):
        return value
    raise OptionError(
        f"{where} is a {type(value).__name__}; JSON holds strings, numbers, lists and dicts. "
        "Give arrays as fields of their own."
    )


def parse_npy_header(head: bytes, size: int) -> NpyHeader:
    """Return what the beginning of a `.npy` of `size` bytes says; raise ValueError where it lies or holds objects."""
    try:
        dtype, shape, fortran_order, offset = _parse_npy(head)
    except (KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"its .npy header is malformed: {type(error).__name__}: {error}") from error
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickle")
    if any(not isinstance(length, int) or length < 0 for length in shape):
        raise ValueError(f"a negative or impossible shape {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != size - offset:
        raise ValueError(f"its header says {dtype} {shape}, {wanted} bytes, but {size - offset} bytes of data follow")
    return NpyHeader(dtype, shape, fortran_order, offset)


def _parse_npy(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the array lies in Fortran order, and where the data begin."""
    width = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(head[6:8])
    if head[:6] != _MAGIC or width is None:
        raise ValueError("this is no .npy file of a valid version")
    offset = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if offset > len(head):
        raise ValueError(f"a .npy header of {offset} bytes; {len(head)} are there")
    usual = _USUAL_HEADER.fullmatch(head, 8 + width, offset)
    if usual is not None:
        lengths = tuple(int(length) for length in usual["shape"].split(b",") if length.strip())
        return _dtype(usual["descr"].decode()), lengths, usual["fortran_order"] == b"True", offset
    text = head[8 + width : offset].decode("utf-8" if head[6] == 3 else "latin1")
    fields = _literal(text.strip())
    dtype = np.lib.format.descr_to_dtype(fields["descr"])
    return dtype, tuple(fields["shape"]), bool(fields["fortran_order"]), offset


def parse_descr(text: str) -> np.dtype[Any]:
    """Return the dtype that `repr` of numpy's description says, such as `"'<f4'"`; raise what is wrong with it."""
    usual = _USUAL_DESCR.fullmatch(text)
    return _dtype(usual[1]) if usual is not None else np.lib.format.descr_to_dtype(_literal(text))


def _literal(text: str) -> Any:
    """Evaluate a literal of Python."""
    for _ in range(_EVALUATED_TIMES - 1):
        try:
            return ast.literal_eval(text)
        except SystemError:
            # Python 3.11 counts the depth of all threads in one place, and where two of them evaluate at once, may find
            # that it does not come out even (python/cpython#106905).
            continue
    return ast.literal_eval(text)


@lru_cache(maxsize=256)
def _dtype(descr: str) -> np.dtype[Any]:
    return np.dtype(descr)


def decode(extension: str, payload: bytes | memoryview, *, allow_pickle: bool = False) -> Any:
    """Return the value of a member; raise ValueError where its payload is not what the extension says.

    What has no decoder (audio, video, anything unknown) stays bytes. A payload that can be written to is given away:
    an array may lie in it.
    """
    kind = extension.rpartition(".")[2].lower()
    try:
        if kind == "npy":
            return _npy(payload)
        whole = bytes(payload)
        if kind in ("pyd", "pkl", "pickle"):
            return pickle.loads(whole) if allow_pickle else unpickle(whole)
        decoder = _DECODERS.get(kind)
        return whole if decoder is None else decoder(whole)
    except (ValueError, MissingDependency):
        raise
    except Exception as error:  # a damaged payload can make a decoder raise anything
        raise ValueError(f"no valid .{kind}: {type(error).__name__}: {error}") from error


def is_uncompressed(extension: str) -> bool:
    """Return whether a value takes about as much memory as its payload: what is compressed takes any."""
    return extension.rpartition(".")[2].lower() not in ("npz", *_IMAGES)


def _npy(payload: bytes | memoryview) -> NDArray[Any]:
    header = parse_npy_header(bytes(payload[:_LONGEST_HEADER]), len(payload))
    flat = np.frombuffer(payload, header.dtype, offset=header.data_offset)
    array = flat.reshape(header.shape, order="F" if header.fortran_order else "C")
    # What comes out can be written to, and has the machine's byte order.
    shared = not (flat.flags.writeable and flat.flags.aligned)
    return array.astype(header.dtype.newbyteorder("="), order="C", copy=shared)


def _npz(payload: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        total = sum(part.file_size for part in archive.infolist())
        if total > max(_ALWAYS_BYTES, _MOST_RATIO * len(payload)):
            raise ValueError(f"it decompresses to {total} bytes, which looks like a decompression bomb")
        return {part.removesuffix(".npy"): _npy(archive.read(part)) for part in archive.namelist()}


def _image(payload: bytes) -> NDArray[np.uint8]:
    try:
        from PIL import Image  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("Pillow", "image", "Decoding images") from error
    with Image.open(io.BytesIO(payload)) as image:
        if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 0):
            raise ValueError(f"an image of {image.width} × {image.height} pixels looks like a decompression bomb")
        if image.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV"):
            return np.array(image.convert("RGB"))
        return np.array(image)


def _tensors(payload: bytes) -> Any:
    import torch  # noqa: PLC0415

    return torch.load(io.BytesIO(payload), weights_only=True)


def _json(payload: bytes) -> Any:
    # One is read for each sample, and looking for other encodings and spaces takes longer than all the rest.
    try:
        text = payload.decode()
        value, end = _SCANNED(text, 0)
        if end == len(text):
            return value
    except (ValueError, StopIteration):
        pass
    return json.loads(payload)


def _text(payload: bytes) -> str:
    return payload.decode()


def _whole_number(payload: bytes) -> int:
    return int(payload)


_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "pbm", "tif", "tiff")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npz": _npz,
    "json": _json,
    "jsn": _json,
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _whole_number),
    **dict.fromkeys(("pt", "pth"), _tensors),
    **dict.fromkeys(_IMAGES, _image),
}
