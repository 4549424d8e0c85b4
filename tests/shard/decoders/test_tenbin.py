"""`.ten` gives the arrays that the webdataset library gives; what lies about its size is refused."""

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from webdataset import tenbin

from penstock.shard.decoders.decode import decode

_kinds = st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u8"])
_arrays = _kinds.flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=1, max_side=4, min_side=0)))


@given(st.lists(_arrays, max_size=4))
def test_arrays_are_those_of_the_library_bit_for_bit(arrays: list[np.ndarray[Any, Any]]) -> None:
    stored = bytes(tenbin.encode_buffer(arrays))
    theirs, ours = tenbin.decode_buffer(stored), decode("ten", stored)
    assert [(a.dtype, a.shape, a.tobytes()) for a in ours] == [(a.dtype, a.shape, a.tobytes()) for a in theirs]
    assert all(array.flags.writeable for array in ours)


def chunk(content: bytes, size: int | None = None) -> bytes:
    padding = bytes(-len(content) % 64)
    return b"~TenBin~" + struct.pack("<q", len(content) if size is None else size) + content + padding


def header(code: bytes = b"f4", axes: int = 1, *shape: int) -> bytes:
    return code.ljust(8, b"\0") + bytes(8) + struct.pack(f"<{1 + len(shape)}q", axes, *shape)


def test_unsigned_integers_of_four_bytes_are_read() -> None:  # which the library writes under no name
    (found,) = decode("tb", chunk(header(b"u4", 1, 2)) + chunk(struct.pack("<2I", 7, 2**32 - 1)))
    assert (found.dtype, found.tolist()) == (np.uint32, [7, 2**32 - 1])


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (b"nonsense", "no chunk begins at byte 0"),
        (b"~TenBin~", "no chunk begins at byte 0"),
        (chunk(b"", 2**62), "should have 4611686018427387904 bytes"),
        (chunk(b"", -64), "should have -64 bytes"),
        (chunk(header(b"f4", 1, 2)), "no data"),
        (chunk(header(b"O8", 1, 2)) + chunk(bytes(16)), "unknown type"),
        (chunk(header(b"\xff", 1, 2)) + chunk(bytes(16)), "unknown type"),
        (chunk(b"f4") + chunk(bytes(16)), "unknown type"),
        (chunk(header(b"f4", 1, 2**61)) + chunk(bytes(16)), "needs 9223372036854775808 bytes"),
        (chunk(header(b"f4", 2, 2**40, 2**40)) + chunk(bytes(16)), "bytes of data follow"),
        (chunk(header(b"f4", 2, -1, -4)) + chunk(bytes(16)), "invalid shape"),
        (chunk(header(b"f4", 9, 1)) + chunk(bytes(16)), "invalid shape"),
        (chunk(header(b"f4", -1, 1)) + chunk(bytes(16)), "invalid shape"),
        (chunk(header(b"f4", 70, *[1] * 70)) + chunk(bytes(16)), "invalid shape"),
    ],
)
def test_what_lies_about_its_size_is_refused(stored: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        decode("ten", stored)


@given(st.data())
def test_any_damage_gives_arrays_or_a_value_error(data: st.DataObject) -> None:
    stored = bytearray(tenbin.encode_buffer([np.arange(6.0).reshape(2, 3), np.arange(3, dtype="i2")]))
    for _ in range(3):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        found = decode("ten", bytes(stored[: data.draw(st.integers(0, len(stored)))]))
        assert sum(array.nbytes for array in found) <= len(stored)
