"""What is made of the bytes of a file: pixels, sound, an array, or what a function returns."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.shard.codec import decode_npy
from penstock.shard.decoders.audio import AUDIO, decode_audio
from penstock.shard.decoders.images import IMAGES, decode_image

__all__ = ["EXTENSIONS", "Decode", "check_decode", "choose_name", "decode_payload"]

Decode = str | Callable[[Any], Any]
"""The name of a decoder, or a function of a path."""

_RATE = "rate_hz"


def _decode_rgb(payload: bytes) -> NDArray[Any]:
    """Return 8 bits of red, green and blue; raise ValueError for an image of more bits."""
    pixels: NDArray[Any] = decode_image(payload)
    if pixels.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
        raise ValueError(f"its pixels are {pixels.dtype}, which 8 bits do not hold; use decode='pixels'")
    if pixels.ndim == 3 and pixels.shape[2] == 3:
        return pixels
    found: NDArray[Any] = decode_image(payload, "rgb8")
    return found


def _decode_sound(payload: bytes) -> tuple[NDArray[np.float32], float]:
    frames, rate_hz = decode_audio(payload)
    return np.ascontiguousarray(frames.numpy().T), float(rate_hz)


_DECODERS: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "image": ("image", _decode_rgb),
    "pixels": ("image", decode_image),
    "audio": ("audio", _decode_sound),
    "npy": ("array", decode_npy),
    "bytes": ("bytes", bytes),
}
"""Name to the field it fills, and its function."""

EXTENSIONS: Mapping[str, tuple[str, ...]] = {"image": IMAGES, "pixels": IMAGES, "audio": AUDIO, "npy": ("npy",)}
"""Which files of a folder a decoder is for."""


def check_decode(decode: Decode) -> None:
    """Raise OptionError unless `decode` is the name of a decoder, or a function."""
    if not callable(decode) and decode not in _DECODERS:
        raise OptionError(f"decode must be one of {', '.join(map(repr, _DECODERS))}, or a function, got {decode!r}.")


def choose_name(decode: Decode) -> str:
    """Return the field that a decoder fills, unless another name is given."""
    return "value" if callable(decode) else _DECODERS[decode][0]


def decode_payload(decode: str, payload: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a file; raise ValueError if it cannot be decoded."""
    try:
        value = _DECODERS[decode][1](payload)
    except (OSError, SyntaxError, OverflowError, EOFError) as error:  # of Pillow, for files that are none
        raise ValueError(str(error) or type(error).__name__) from error
    return {name: value[0], _RATE: value[1]} if decode == "audio" else {name: value}
