"""Decoders of members: what lies inside of shards, one target for each format."""

import gzip
import io
import json
import pickle
import wave
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from PIL import Image

from bench.campaign.fuzz.structures import (
    compress_again,
    mutate_chunk,
    mutate_json,
    mutate_npy,
    mutate_pickle,
    mutate_zip,
)
from bench.campaign.fuzz.target import Run, Target, WrongValueError
from penstock.shard.decoders.decode import decode

__all__ = ["DECODERS", "save_npy", "sounds"]

_ARRAYS = (np.arange(6, dtype="<f4").reshape(2, 3), np.arange(3, dtype=">i8"), np.array(7), np.array(["ab", "c"]))


def _decode_all(*extensions: str, check: Callable[[bytes, str, Any], None] = lambda *_: None) -> Callable[[Path], Run]:
    """Return what makes a run that gives an input to the decoders of all extensions; one may refuse it."""

    def prepare(_: Path) -> Run:
        def run(content: bytes) -> None:
            for extension in extensions:
                check(content, extension, decode(extension, memoryview(content)))

        return run

    return prepare


def save_npy(array: np.ndarray[Any, Any]) -> bytes:
    """Return an array as a .npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _save_npz() -> Sequence[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(out, a=_ARRAYS[0], b=_ARRAYS[1])
        found.append(out.getvalue())
    return found


def _save_tensors() -> Sequence[bytes]:
    values = (
        torch.arange(6).reshape(2, 3),
        {"a": torch.arange(3.0), "b": [1, "x", torch.tensor(True)]},
        OrderedDict(w=torch.zeros(2, dtype=torch.bfloat16), v=torch.arange(4).reshape(2, 2).T),
    )
    found = []
    for value in values:
        for is_zip in (True, False):
            out = io.BytesIO()
            torch.save(value, out, _use_new_zipfile_serialization=is_zip)
            found.append(out.getvalue())
    return found


def _pickles() -> Sequence[bytes]:
    values = [
        *_ARRAYS,
        np.float32(3),
        np.datetime64("2020-01-01"),
        np.zeros(2, [("a", "<f4"), ("b", "|S3")]),
        {"a": [1, (2.0, None)], "b": {3, 4}, "c": b"xyz", "d": frozenset([1])},
        OrderedDict(x=1j, y=bytearray(b"ab")),
        np.asfortranarray(_ARRAYS[0]),
        torch.arange(3),
    ]
    return [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4, 5)]


def _check_json(content: bytes, _: str, value: Any) -> None:
    # NaN is unequal to itself, so the texts are compared.
    if json.dumps(value) != json.dumps(json.loads(content)):
        raise WrongValueError("not the value that json.loads returns")


def _check_npy(content: bytes, _: str, value: Any) -> None:
    try:
        expected = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception:  # numpy may refuse what can be read
        return
    if expected.shape != value.shape or expected.tobytes() != value.astype(expected.dtype, copy=False).tobytes():
        raise WrongValueError(f"not the array that numpy reads: {expected.dtype} {expected.shape}")


def _check_msgpack(content: bytes, _: str, value: Any) -> None:
    if repr(value) != repr(msgpack.unpackb(content)):
        raise WrongValueError("not the value that msgpack returns")


def _check_text(content: bytes, extension: str, value: Any) -> None:
    if isinstance(value, str) and value.encode() != content:
        raise WrongValueError("not the text that was stored")


def _images() -> Sequence[bytes]:
    found = []
    modes = {"JPEG": "RGB", "PNG": "RGB", "WEBP": "RGB", "BMP": "RGB", "GIF": "P", "TIFF": "RGB", "TGA": "RGB"}
    modes |= {"ICO": "RGBA", "JPEG2000": "RGB", "PPM": "RGB", "PCX": "P"}
    for kind, mode in modes.items():
        out = io.BytesIO()
        pixels = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
        Image.fromarray(pixels).convert(mode).save(out, kind)
        found.append(out.getvalue())
    for mode, options in (("1", {}), ("I;16", {}), ("LA", {}), ("CMYK", {"compression": "tiff_lzw"}), ("F", {})):
        out = io.BytesIO()
        kind = "PNG" if mode in ("1", "I;16", "LA") else "TIFF"
        Image.new(mode, (5, 4)).save(out, kind, **options)
        found.append(out.getvalue())
    return [*found, b"P2\n2 2\n255\n1 2 3 4\n", b"P5 2 2 65535\n" + bytes(8), b"P1\n2 2\n1 0 0 1\n"]


def sounds() -> Sequence[bytes]:
    """Return short sounds of every format and coding that libsndfile writes here."""
    import soundfile  # an extra

    found = []
    tone = (np.arange(600).reshape(300, 2) / 1000).astype(np.float32)
    for kind, subtype in (
        *(("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("WAV", "MS_ADPCM"), ("WAVEX", "PCM_24")),
        *(("RF64", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")),
        *(("AIFF", "PCM_16"), ("AIFF", "FLOAT")),
    ):
        out = io.BytesIO()
        soundfile.write(out, tone, 16000, subtype, format=kind)
        found.append(out.getvalue())
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(200)))
    return [*found, out.getvalue()]


def _json_seeds() -> Sequence[bytes]:
    return [b'{"a": [1, 2.5, null, true], "b": {"c": "\xc3\xa4"}}', b"[]", b' "x" ', b"[NaN, -Infinity, 1e5]", b"7"]


def _gzips() -> Sequence[bytes]:
    plain = (b'{"a": 1}', b"12")
    return [gzip.compress(one, mtime=0) for one in plain] + [
        gzip.compress(b"[", mtime=0) + gzip.compress(b"1]", mtime=0)
    ]


_ERROR = (ValueError,)
# About tags of a TIFF file; if pixels are missing, Pillow raises.
_TAGS = ("Tag data larger than file", "Corrupt EXIF data", "Truncated File Read", "Metadata Warning")

DECODERS = (
    Target(
        "npy",
        _decode_all("npy", check=_check_npy),
        lambda: [save_npy(array) for array in (*_ARRAYS, np.asfortranarray(_ARRAYS[0]), np.zeros((0, 3)))],
        _ERROR,
        (mutate_npy,),
        (b"'descr'", b"'shape': (", b"True", b"|O", b"(1,)"),
        weight=2,
    ),
    Target("npz", _decode_all("npz"), _save_npz, _ERROR, (mutate_zip(mutate_npy),), (b"PK\1\2", b"PK\5\6", b"PK\3\4")),
    Target(
        "pt",
        _decode_all("pt"),
        _save_tensors,
        _ERROR,
        (mutate_zip(mutate_pickle), mutate_pickle),
        (b"PK\5\6",),
        weight=0.7,
        warnings=("Detected pickle protocol",),  # torch, of one that it reads all the same
    ),
    Target("pickle", _decode_all("pyd"), _pickles, _ERROR, (mutate_pickle, mutate_pickle), weight=3),
    Target("json", _decode_all("json", check=_check_json), _json_seeds, _ERROR, (mutate_json,), (b"[" * 3000, b"\xff")),
    Target(
        "msgpack",
        _decode_all("mp", check=_check_msgpack),
        lambda: [msgpack.packb({"a": [1, 2.5, None, b"xy"], "b": {"c": -1}}), b"\xc7\x01\x05x", b"\xd6\xff" + bytes(4)],
        _ERROR,
        (),
        (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 1100, b"\xd6\xff"),
    ),
    Target(
        "image",
        _decode_all("png"),
        _images,
        _ERROR,
        (),
        (b"IHDR", b"IDAT", b"\xff\xc0", b"\xff\xda"),
        weight=1,
        warnings=_TAGS,
    ),
    Target(
        "sound", _decode_all("wav"), sounds, _ERROR, (mutate_chunk,), (b"data", b"fmt ", b"fLaC", b"OggS"), weight=1
    ),
    Target(
        "text",
        _decode_all("cls", "txt", "index", check=_check_text),
        lambda: [b"12", b"cat", b" 7\n", "ä".encode(), b"-1", b"1_000"],
        _ERROR,
        (),
        (b"9" * 5000, b"\xff", b"\0"),
        weight=0.5,
    ),
    Target("gz", _decode_all("x.json.gz"), _gzips, _ERROR, (compress_again(mutate_json),), (b"\x1f\x8b",)),
)
