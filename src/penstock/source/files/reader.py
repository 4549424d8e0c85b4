"""Reads files, decodes them (pixels, sound, an array, or what a function returns), and puts that into a block."""

import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError, ReadError
from penstock.core.text import cause
from penstock.core.types import Field
from penstock.files.regular import open_descriptor
from penstock.shard.codec import decode_npy
from penstock.shard.decoders.audio import AUDIO, decode_audio
from penstock.shard.decoders.images import IMAGES, decode_image

__all__ = ["EXTENSIONS", "Decode", "FileReader", "Stored"]

_CHUNK_BYTES = 1 << 20  # as in ArraySource

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

Stored = str | bytes
"""A path, or the bytes of a file."""

Check = Callable[[int, os.stat_result], None]
"""Raises ReadError if a file, by its number, has another status than expected."""


@dataclass(frozen=True)
class FileReader:
    """How files are read: the same for all items of a source.

    Parameters
    ----------
    shape
        Shape of what every file holds; None: it varies.
    """

    decode: Decode
    name: str
    shape: tuple[int, ...] | None

    @classmethod
    def make(cls, decode: Decode, name: str | None, shape: tuple[int, ...] | None) -> "FileReader":
        """Return a reader; raise OptionError for an argument that is not valid."""
        if not callable(decode) and decode not in _DECODERS:
            raise OptionError(
                f"decode must be one of {', '.join(map(repr, _DECODERS))}, or a function, got {decode!r}."
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise OptionError(f"name must be a non-empty string, or None, got {name!r}.")
        if shape is not None:
            if not isinstance(shape, tuple | list) or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise OptionError(f"shape must be a tuple of integers >= 0, or None, got {shape!r}.")
            shape = tuple(shape)
        return cls(decode, name or ("value" if callable(decode) else _DECODERS[decode][0]), shape)

    def describe(self) -> str:
        """Return what is done with files, for a fingerprint."""
        decode = self.decode
        how = decode if isinstance(decode, str) else getattr(decode, "__qualname__", type(decode).__name__)
        return f"{how} {self.name} {self.shape}"

    def find_fields(self, first: Mapping[str, Any]) -> dict[str, Field]:
        """Return the fields of all files, by those of the first one."""
        found = {name: Field(np.dtype(np.float64), ()) for name in first if name != self.name}
        value = first[self.name]
        if self.shape is not None:
            if not isinstance(value, np.ndarray):
                raise OptionError(f"shape={self.shape} needs files that hold arrays, got {type(value).__name__}.")
            return {self.name: Field(value.dtype, self.shape), **found}
        n_bytes = int(getattr(value, "nbytes", 0)) or (len(value) if isinstance(value, bytes) else 1)
        return {self.name: Field(np.dtype(object), None, typical_bytes=n_bytes), **found}

    def read(self, stored: Stored, number: int, where: str, check: Check | None = None) -> dict[str, Any]:
        """Return the fields of one file.

        Parameters
        ----------
        number
            Of the item.
        where
            What the item is in words, for messages.
        """
        path = stored if isinstance(stored, str) else "its bytes"
        try:
            payload = self._read_payload(stored, number, check)
        except ReadError:
            raise
        except OSError as error:
            raise ReadError(f"Could not read {path} ({where}): {cause(error)}.") from error
        if not isinstance(self.decode, str):
            try:
                return {self.name: self.decode(payload)}
            except Exception as error:
                error.add_note(f"[penstock] while decoding {path} ({where})")
                raise
        assert isinstance(payload, bytes), "a path is for functions only"
        try:
            return _decode_payload(self.decode, payload, self.name)
        except MissingDependency:
            raise
        except ValueError as error:
            raise ReadError(f"Could not decode {path} as {self.decode} ({where}): {error}.") from error

    def _read_payload(self, stored: Stored, number: int, check: Check | None) -> Stored:
        """Return the bytes of a file; for a function, its path."""
        if isinstance(stored, bytes):
            return stored
        handle, status = open_descriptor(stored)
        with io.FileIO(handle) as file:
            if check is not None:
                check(number, status)
            return file.readall() if isinstance(self.decode, str) else stored

    def fill(self, block: Mapping[str, NDArray[Any]], found: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Put the fields of files into the rows of a block; each comes with its item in words."""
        for row, (values, where) in enumerate(found):
            for name, value in values.items():
                if name == self.name and self.shape is not None:
                    self._check_array(value, block[name], where)
                block[name][row] = value

    def _check_array(self, value: Any, out: NDArray[Any], where: str) -> None:
        if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != (self.shape, out.dtype):
            kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ReadError(f"Every file must hold {out.dtype} {self.shape}, got {kind} ({where}).")

    def chunk_items(self, fields: Mapping[str, Field], n_items: int) -> int:
        """Return how many items make about a megabyte."""
        n_bytes = sum((field.item_bytes or field.typical_bytes or 1) for field in fields.values())
        return max(1, min(n_items, _CHUNK_BYTES // max(1, n_bytes)))


def _decode_payload(decode: str, payload: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a file; raise ValueError if it cannot be decoded."""
    try:
        value = _DECODERS[decode][1](payload)
    except (OSError, SyntaxError, OverflowError, EOFError) as error:  # of Pillow, for files that are none
        raise ValueError(str(error) or type(error).__name__) from error
    return {name: value[0], _RATE: value[1]} if decode == "audio" else {name: value}
