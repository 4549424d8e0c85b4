"""Foreign payloads decode, or raise ValueError before they allocate memory or run code."""

import ast
import io
import json
import pickle
import struct
import zipfile
import zlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import OptionError
from penstock.shard.codec import decode_npy, encode, parse_descr
from penstock.shard.decoders.decode import decode


def npy(descr: str, shape: str, data: bytes = b"", order: str = "False", version: bytes = b"\1\0") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version == b"\1\0" else 4, "little") + text + data


def test_the_crafted_header_is_valid() -> None:
    assert decode("npy", npy("'<i2'", "(2,)", b"\1\0\2\0")).tolist() == [1, 2]
    assert decode("npy", npy("'<i2'", "(2,)", b"\1\0\2\0", version=b"\2\0")).tolist() == [1, 2]
    fortran = npy("'<i2'", "(2, 2)", b"\1\0\2\0\3\0\4\0", order="True")
    assert decode("npy", fortran).tolist() == [[1, 3], [2, 4]]


HEADERS = [
    npy("'<i2'", "(2,)", b"\1\0\2\0"),
    npy('"<i2"', "(2,)", b"\1\0\2\0"),
    npy("'<i2'", "(2, )", b"\1\0\2\0"),
    npy("'<i2'", "(1,2)", b"\1\0\2\0"),
    npy("'<i2'", "(1, 2)", b"\1\0\2\0", order="True"),
    npy("'|i1'", "(2, 0)"),
    npy("'|S3'", "()", b"abc"),
    npy("'>u4'", "(1, 1)", b"\0\0\0\7", version=b"\3\0"),
    npy("'<M8[D]'", "(1,)", bytes(8)),
    npy("[('a', '<f4')]", "(1,)", bytes(4)),
]


@pytest.mark.parametrize("stored", HEADERS, ids=lambda stored: stored[10:].split(b"}")[0].decode())
def test_headers_are_read_as_numpy_reads_them(stored: bytes) -> None:
    expected = np.load(io.BytesIO(stored))
    found = decode("npy", stored)
    assert (found.dtype, found.shape) == (expected.dtype.newbyteorder("="), expected.shape)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("text", ["'<f4'", "'|S3'", "'<M8[ns]'", "[('a', '<f4'), ('b', '>i2', (3,))]"])
def test_a_descr_gives_the_dtype_that_numpy_gives(text: str) -> None:
    assert parse_descr(text) == np.lib.format.descr_to_dtype(ast.literal_eval(text))


def test_a_system_error_of_python_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    # python/cpython#106905 happens once in ten thousand times if threads evaluate at the same moment.
    real, faults = ast.literal_eval, iter([True, True, False])

    def faulty(text: str) -> object:
        if next(faults, False):
            raise SystemError("AST constructor recursion depth mismatch (before=60, after=58)")
        return real(text)

    monkeypatch.setattr(ast, "literal_eval", faulty)
    assert parse_descr("[('a', '<f4')]") == np.dtype([("a", "<f4")])
    faults = iter([True] * 99)
    assert parse_descr("[('a', '<f4')]") == np.dtype([("a", "<f4")])
    faults = iter([True] * 100)
    with pytest.raises(SystemError):
        parse_descr("[('a', '<f4')]")
    assert next(faults, "none") == "none"  # a hundred attempts, and no more


@pytest.mark.parametrize(
    "stored",
    [
        b'{"a": [1, 2.5, null, true, "\xc3\xa4"]}',
        b' \n{"a": 1}\n\t ',
        b'{"a": 1, "a": 2}',
        b'"text"',
        b"17",
        b"-0.0",
        b"1e999",
        b"NaN",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": "ä"}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        "[1]".encode("utf-32"),
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'{"a": 1} x',
        b'{"a": 1}{}',
        b"[1,]",
        b"",
        b" ",
        b"nul",
    ],
)
def test_json_is_read_as_python_reads_it(stored: bytes) -> None:
    try:
        expected = repr(json.loads(stored))
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            decode("json", stored)
    else:
        assert repr(decode("json", stored)) == expected


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (b"", "npy file"),
        (b"PK\3\4", "npy file"),
        (b"\x93NUMPY", ""),
        (npy("'<i2'", "(2,)", version=b"\x09\0"), "version"),
        (npy("'<i2'", "(3,)", b"\1\0\2\0"), "6 bytes, but 4 bytes of data follow"),
        (npy("'<i2'", "(1,)", b"\1\0\2\0"), "2 bytes, but 4 bytes of data follow"),
        (npy("'<f8'", f"({10**30},)", b"\1\0"), "bytes of data follow"),
        (npy("'<f8'", f"({2**61},)", b""), "bytes of data follow"),  # times eight overflows 64 bits to 0
        (npy("'<f8'", "(-1,)", bytes(8)), ""),
        (npy("'<f8'", "(-1, -1)", bytes(8)), ""),
        (npy("'|O'", "(1,)", bytes(8)), "Python objects"),
        (npy("[('a', '|O')]", "(1,)", bytes(8)), "Python objects"),
        (npy("'nonsense'", "(1,)", bytes(8)), ""),
        (npy("__import__('os')", "(1,)", bytes(8)), ""),
        (npy("'|S0'", f"({10**30},)"), ""),
        (npy("'|V0'", f"({2**40},)"), ""),
        (npy("'<f8'", f"({2**62}, 4, 0)"), ""),
        (npy("'<f8'", "(1.5,)", bytes(8)), ""),
        (npy("'<f8'", "(" + "1," * 100 + ")", bytes(8)), ""),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(stored: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match or "."):
        decode("npy", stored)


@pytest.mark.parametrize(
    ("extension", "stored"),
    [
        ("json", b"{"),
        ("json", b"\xff"),
        ("json", b"[" * 100_000),
        ("txt", b"\xff"),
        ("cls", b"\xff"),
        ("npz", b"PK"),
        ("png", b"no image"),
        ("jpg", b""),
        ("pt", b"nothing"),
        ("pyd", b""),
    ],
)
def test_a_payload_that_contradicts_its_extension_raises_value_error(extension: str, stored: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(extension, stored)


def test_images_become_arrays() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    out = io.BytesIO()
    image.fromarray(pixels).save(out, "PNG")
    assert decode("png", out.getvalue()).tolist() == pixels.tolist()


@pytest.mark.filterwarnings("ignore:Image size")  # of Pillow, about the same
def test_an_image_may_have_as_many_pixels_as_pillow_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("L", (3, 4)).save(out, "PNG")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 12)
    assert decode("png", out.getvalue()).shape == (4, 3)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", None)
    assert decode("png", out.getvalue()).shape == (4, 3)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 11)
    with pytest.raises(ValueError, match=r"its 3 × 4 pixels are more than Pillow allows.*MAX_IMAGE_PIXELS"):
        decode("png", out.getvalue())


def test_an_image_that_would_fill_the_memory_is_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("1", (1, 1)).save(out, "PNG")
    small = bytearray(out.getvalue())
    small[16:24] = struct.pack(">II", 200_000, 200_000)
    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    with pytest.raises(ValueError, match="bomb"):  # Pillow itself
        decode("png", bytes(small))


@pytest.mark.parametrize(("mode", "pixel_bytes"), [("l8", 1), ("rgb8", 3), ("torchrgba", 16), (True, 1)])
def test_an_image_may_take_as_much_memory_as_an_item(
    mode: Any, pixel_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("L", (500, 400)).save(out, "PNG")
    stored, size = out.getvalue(), 500 * 400 * pixel_bytes
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(size))
    assert 100 * len(stored) < 500 * 400
    assert len(decode("png", stored, decoding=mode)) in (400, 4)
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(size - 1))
    with pytest.raises(ValueError, match=f"its image of 500 × 400 pixels would take {size:,} bytes of memory"):
        decode("png", stored, decoding=mode)


def test_archives_of_arrays_become_dicts_and_bombs_are_refused() -> None:
    out = io.BytesIO()
    np.savez_compressed(out, a=np.arange(3), b=np.eye(2))
    found = decode("npz", out.getvalue())
    assert {name: array.tolist() for name, array in found.items()} == {"a": [0, 1, 2], "b": [[1, 0], [0, 1]]}
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(5):
            archive.writestr(f"{number}.npy", bytes(60 << 20))
    with pytest.raises(ValueError, match="it would take 314,572,800 bytes of memory, but may take at most 268,435,456"):
        decode("npz", bomb.getvalue())


def claim_size(payload: bytes, size: int) -> bytes:
    """Return an archive of one member, whose directory says that it decompresses to `size` bytes."""
    at = payload.index(b"PK\1\2") + 24
    return payload[:at] + struct.pack("<I", size) + payload[at + 4 :]


@pytest.mark.parametrize("stored_bytes", [100, 4 << 20])
def test_an_archive_of_arrays_may_claim_256_megabytes_or_a_hundred_times_its_size(stored_bytes: int) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", bytes(stored_bytes))
    limit = max(256 << 20, 100 * len(out.getvalue()))
    with pytest.raises(ValueError, match=r"should have \d+ bytes, but has others"):  # it lies, but not about too much
        decode("npz", claim_size(out.getvalue(), limit))
    with pytest.raises(ValueError, match=f"it would take {limit + 1:,} bytes of memory"):
        decode("npz", claim_size(out.getvalue(), limit + 1))


@pytest.mark.parametrize("version", [b"\1\0", b"\2\0"])
def test_a_header_may_have_64_kilobytes(version: bytes) -> None:
    def stored(n_bytes: int) -> bytes:
        width = 2 if version == b"\1\0" else 4
        text = b"{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }".ljust(n_bytes - 9 - width) + b"\n"
        return b"\x93NUMPY" + version + len(text).to_bytes(width, "little") + text + b"\1\0\2\0"

    assert decode("npy", stored(1 << 16)).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"its \.npy header needs 65537 bytes, but 65536 are there"):
        decode("npy", stored((1 << 16) + 1))


def test_an_archive_with_pickled_objects_in_it_is_refused() -> None:
    out = io.BytesIO()
    np.savez(out, a=np.array([None], object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        decode("npz", out.getvalue())


def test_a_pickle_runs_only_if_allowed() -> None:
    # A fraction, because Python 3.11.2 stores an enum as a call of getattr, and 3.11.7 as one of its class.
    stored = pickle.dumps(Fraction(1, 3))
    assert decode("pyd", stored, allow_pickle=True) == Fraction(1, 3)
    with pytest.raises(ValueError, match="Fraction"):
        decode("pyd", stored)


def test_an_array_has_at_most_63_axes_since_a_batch_has_one_more() -> None:
    for n_axes in (63, 64):
        out = io.BytesIO()
        np.save(out, np.zeros((1,) * n_axes, "u1"))
        if n_axes == 63:
            assert decode_npy(out.getvalue())[None].shape == (1,) * 64
            continue
        with pytest.raises(ValueError, match=r"its \.npy header has 64 axes; at most 63 are allowed"):
            decode_npy(out.getvalue())
        with pytest.raises(OptionError, match=r"Field 'x' must have at most 63 axes, got 64\. Reshape it"):
            encode("x", np.zeros((1,) * n_axes))
