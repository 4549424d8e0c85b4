"""Compressed members, msgpack, sounds and classes decode, or raise ValueError before they take memory."""

import builtins
import gzip
import io
import os
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from penstock.core.errors import MissingDependency, OptionError
from penstock.shard.decoders.decode import check_decoding, decode, is_uncompressed


def sound(kind: str, n_frames: int = 600) -> bytes:
    stored = io.BytesIO()
    frames = np.stack([np.arange(n_frames), -np.arange(n_frames)], axis=1).astype(np.int16)
    soundfile.write(stored, frames, 8000, format=kind)
    return stored.getvalue()


# -- compressed members ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", ["txt.gz", "note.txt.gz", "note.TXT.GZ"])
def test_a_compressed_member_is_decoded_by_the_extension_before(extension: str) -> None:
    assert decode(extension, gzip.compress("ä".encode())) == "ä"


def test_members_of_gzip_one_after_the_other_are_one() -> None:
    assert decode("json.gz", gzip.compress(b'{"a":') + gzip.compress(b" 1}")) == {"a": 1}
    assert decode("gz", gzip.compress(b"raw")) == decode("x.gz", gzip.compress(b"raw")) == b"raw"
    stored = gzip.compress(b"raw")
    assert decode("txt.gz", stored, decoding=False) == stored


@pytest.mark.parametrize(
    "stored",
    [b"", b"plain", gzip.compress(b"text")[:-4], gzip.compress(b"text")[:12]],
    ids=["nothing", "no gzip", "no length", "cut short"],  # the bytes have the time in them
)
def test_damaged_compression_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="compressed data"):
        decode("txt.gz", stored)


def test_a_bomb_is_refused() -> None:
    piece = gzip.compress(bytes(1 << 24), 1)
    with pytest.raises(ValueError, match=r"it would take more than 268,435,456 bytes .*PENSTOCK_MAX_ITEM_BYTES"):
        decode("txt.gz", piece * 17)


# -- msgpack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", ["mp", "msg", "state.MP"])
def test_msgpack_is_read_as_the_package_reads_it(extension: str) -> None:
    value = {"n": 7, "list": [1, None, 2.5, "ä"], "raw": b"\0"}
    assert decode(extension, msgpack.packb(value)) == value


@pytest.mark.parametrize(
    "stored", [b"", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc1", b"\x01\x01"]
)
def test_malformed_msgpack_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not valid msgpack: \S"):
        decode("mp", stored)


@pytest.mark.parametrize("extension", ["mp", "json"])
def test_values_may_be_nested_100_deep_and_no_deeper(extension: str) -> None:
    begin, end = {"mp": (b"\x91", b""), "json": (b"[", b"]")}[extension]
    one = {"mp": b"\x07", "json": b"7"}[extension]
    found = decode(extension, begin * 100 + one + end * 100)
    for _ in range(100):
        (found,) = found
    assert found == 7
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        decode(extension, begin * 101 + one + end * 101)


def test_brackets_in_texts_are_not_nesting() -> None:
    assert decode("json", b'["' + b"[" * 1000 + b'", {"a": {"b": [1]}}]') == ["[" * 1000, {"a": {"b": [1]}}]


# -- sounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF"])
def test_a_sound_is_a_tensor_of_channels_and_its_rate(kind: str) -> None:
    frames, rate_hz = decode(kind, sound(kind))
    assert (frames.dtype, tuple(frames.shape), rate_hz) == (torch.float32, (2, 600), 8000)
    assert (frames * 32768).tolist() == [list(range(600)), [-n for n in range(600)]]


@pytest.mark.parametrize("kind", ["OGG", "MP3"])
def test_a_lossy_sound_is_what_soundfile_reads(kind: str) -> None:
    stored = sound(kind)
    frames, rate_hz = decode(kind.lower(), stored)
    with soundfile.SoundFile(io.BytesIO(stored)) as file:
        expected = file.read(dtype="float32", always_2d=True)
    assert (frames.numpy().tobytes(), rate_hz) == (expected.T.tobytes(), 8000)


def test_a_sound_that_declares_too_many_frames_is_refused() -> None:
    stored = bytearray(sound("FLAC"))
    stored[21] |= 0x0F  # the upper bits of the number of frames
    stored[22:26] = b"\xff" * 4
    with pytest.raises(ValueError, match="its sound of 68,719,476,735 frames and 2 channels would take"):
        decode("flac", bytes(stored))


def test_damaged_sound_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not valid audio: Format not recognised"):
        decode("wav", b"RIFF")


# -- images ------------------------------------------------------------------------------------------------------------


def image(kind: str) -> bytes:
    stored = io.BytesIO()
    Image.new("F" if kind == "SPIDER" else "RGB", (4, 3), 7 if kind == "SPIDER" else (10, 20, 30)).save(stored, kind)
    return stored.getvalue()


@pytest.mark.parametrize("kind", ["EPS", "QOI", "SGI", "SPIDER"])
@pytest.mark.parametrize("extension", ["png", "left.JPG", "tif"])
def test_no_other_parser_and_no_program_is_started_for_an_image(
    kind: str, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, program = tmp_path / "trace", tmp_path / "gs"  # what Pillow starts for PostScript
    program.write_text(f'#!/bin/sh\necho "$@" >> {trace}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ValueError, match=r"not an image of JPEG, PNG, .*, but begins with b'.+'; convert it"):
        decode(extension, image(kind))
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "PCX"])
def test_an_image_under_the_name_of_another_format_is_what_its_bytes_say(kind: str) -> None:
    found = decode("jpg", image(kind), decoding="rgb8")
    assert found.reshape(-1, 3).tolist() == [[10, 20, 30]] * (found.size // 3)


# -- classes and options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "value"), [(b"7", 7), (b" -12\n", -12), (b"cat", "cat"), ("ä 1".encode(), "ä 1"), (b"", "")]
)
def test_a_class_is_a_number_or_text(stored: bytes, value: Any) -> None:
    found = decode("cls", stored)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(("extension", "package"), [("mp", "msgpack"), ("wav", "soundfile"), ("png", "PIL")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, extension: str, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"needs (msgpack|soundfile|Pillow); install it with: pip install"):
        decode(extension, b"")


@pytest.mark.parametrize("decoding", ["rgb16", "", None, 1, "RGB"])
def test_an_unknown_mode_is_refused(decoding: Any) -> None:
    with pytest.raises(OptionError, match=r"decode must be True, False, 'basic' or a mode of images \('l8', 'rgb8'"):
        check_decoding(decoding)


def test_what_is_compressed_has_no_typical_size() -> None:
    assert [is_uncompressed(name) for name in ("x.npy", "x.npy.gz", "png", "wav", "npz", "mp")] == [
        *(True, False, False, False, False, True)
    ]
    assert [is_uncompressed(name, "basic") for name in ("x.npy.gz", "png", "wav")] == [False, True, True]
    assert is_uncompressed("x.npy.gz", decoding=False)
