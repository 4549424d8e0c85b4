"""Which decoder a payload is given to: decided by its extension, in upper or lower case."""

import io
import pickle
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency, OptionError
from penstock.core.limits import MAX_DEPTH, expansion_reason, max_item_bytes
from penstock.shard.codec import decode_json, decode_npy
from penstock.shard.compression import DecompressedStream
from penstock.shard.decoders.audio import AUDIO, decode_audio
from penstock.shard.decoders.images import IMAGE_MODES, IMAGES, decode_image
from penstock.shard.decoders.zips import BoundedZip
from penstock.shard.pickles.unpickle import load_tensors, unpickle

__all__ = ["Decoding", "check_decoding", "decode", "is_uncompressed"]

Decoding = bool | str
"""True: decode everything. A mode of images, such as `"rgb"`: the same, with all images in this mode. `"basic"`: leave
images and sounds as bytes. False: leave everything as bytes."""

_BASIC = "basic"
_NESTING = (list, dict)
_PICKLES, _TENSORS = ("pyd", "pkl", "pickle"), ("pt", "pth")


def check_decoding(decoding: Decoding) -> None:
    """Raise OptionError unless `decoding` is a bool, "basic" or a mode of images, and the limit of items is valid."""
    max_item_bytes(0)  # an invalid limit is not the fault of the item that is decoded first
    if not isinstance(decoding, bool) and decoding not in (_BASIC, *IMAGE_MODES):
        modes = ", ".join(map(repr, IMAGE_MODES))
        raise OptionError(f"decode must be True, False, {_BASIC!r} or a mode of images ({modes}), got {decoding!r}.")


def decode(
    extension: str, payload: bytes | memoryview, *, decoding: Decoding = True, allow_pickle: bool = False
) -> Any:
    """Decode a payload; raise ValueError if it does not match its extension.

    Payloads without a decoder (video, unknown extensions) are returned as bytes. The returned array may use the memory
    of a writable payload, so the caller must not reuse it.
    """
    if decoding is False:
        return bytes(payload)
    stem, _, kind = extension.lower().rpartition(".")
    try:
        if kind == "gz":
            kind, payload = stem.rpartition(".")[2], _decompress(bytes(payload))
        if kind == "npy":
            return decode_npy(payload)
        content = bytes(payload)
        if kind in _PICKLES:
            return pickle.loads(content) if allow_pickle else unpickle(content)
        if kind in _TENSORS:
            return _load_any(content) if allow_pickle else load_tensors(content)
        if kind in (*IMAGES, *AUDIO):
            return content if decoding == _BASIC else _decode_media(kind, content, decoding)
        decoder = _DECODERS.get(kind)
        return content if decoder is None else decoder(content)
    except (ValueError, MissingDependency):
        raise
    except Exception as error:  # a damaged payload can make a decoder raise anything
        raise ValueError(f"it is not a valid .{kind}: {type(error).__name__}: {error}") from error


def is_uncompressed(extension: str, decoding: Decoding = True) -> bool:
    """Return whether decoded values take about as much memory as their payloads."""
    kind = extension.rpartition(".")[2].lower()
    return decoding is False or (kind not in ("npz", "gz") and (kind not in (*IMAGES, *AUDIO) or decoding == _BASIC))


def _decompress(payload: bytes) -> bytes:
    limit = max_item_bytes(len(payload))
    stream = DecompressedStream(io.BytesIO(payload), "gz", "", limit + 1)
    try:
        content = stream.read(limit + 1)
    except DamageError as error:
        raise ValueError(error.reason) from error
    if len(content) > limit:
        raise ValueError(expansion_reason("it", None, len(payload)))
    return content


def _decode_media(kind: str, payload: bytes, decoding: Decoding) -> Any:
    if kind in AUDIO:
        return decode_audio(payload)
    return decode_image(payload, None if decoding is True else str(decoding))


def _decode_npz(payload: bytes) -> dict[str, NDArray[Any]]:
    archive = BoundedZip(payload)
    return {name.removesuffix(".npy"): decode_npy(archive.read(name)) for name in archive.names}


def _load_any(payload: bytes) -> Any:
    import torch  # noqa: PLC0415

    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)


def _decode_text(payload: bytes) -> str:
    return payload.decode()


def _decode_class(payload: bytes) -> int | str:
    """Return a whole number; the text if it is none, since people store names of classes, too."""
    try:
        return int(payload)
    except ValueError:
        return payload.decode()


def _decode_msgpack(payload: bytes) -> Any:
    try:
        import msgpack  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("msgpack", "", "Decoding .mp members") from error
    try:
        value = msgpack.unpackb(payload)  # it bounds every length by that of the payload
    except ValueError as error:
        raise ValueError(f"it is not valid msgpack: {str(error) or type(error).__name__}") from error
    return _check_depth(value) if len(payload) > MAX_DEPTH else value


def _decode_json(payload: bytes) -> Any:
    value = decode_json(payload)
    return _check_depth(value) if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH else value


def _check_depth(value: Any) -> Any:
    """Return the value, or raise ValueError if lists and mappings in it are nested too deeply."""
    level = [value] if type(value) in _NESTING else []
    for _ in range(MAX_DEPTH):
        parts = (part for parent in level for part in (parent.values() if type(parent) is dict else parent))
        level = [part for part in parts if type(part) in _NESTING]
        if not level:
            return value
    raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npz": _decode_npz,
    "json": _decode_json,
    "jsn": _decode_json,
    **dict.fromkeys(("txt", "text", "transcript"), _decode_text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _decode_class),
    **dict.fromkeys(("mp", "msg", "msgpack"), _decode_msgpack),
}
