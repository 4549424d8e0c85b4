"""Compressed archives: the same bytes each time, and bounds on memory and stream length."""

import bz2
import gzip
import io
import lzma
import resource
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import run_isolated

from penstock.core.errors import DamageError
from penstock.shard.compression import (
    COMPRESSIONS,
    DecompressedStream,
    compression_of,
    make_compressor,
    max_decompressed_bytes,
)

PACKED = ("gz", "bz2", "xz")
STANDARD: dict[str, Any] = {"gz": gzip, "bz2": bz2, "xz": lzma}
CONTENT = b"".join(b"item %d, " % number for number in range(2000))


def packed(content: bytes, compression: Any) -> bytes:
    engine = make_compressor(compression)
    assert engine is not None
    return engine.compress(content) + engine.flush()


def unpacked(stored: bytes, compression: Any, *, limit: int = 1 << 24, step: int = 1000) -> bytes:
    stream = DecompressedStream(io.BytesIO(stored), compression, "some.tar", limit)
    out = b""
    while piece := stream.read(step):
        out += piece
    return out


def refused(stored: bytes, compression: Any, match: str, **options: Any) -> None:
    with pytest.raises(DamageError, match=match or ".") as caught:
        unpacked(stored, compression, **options)
    assert caught.value.shard == "some.tar"


@pytest.mark.parametrize("compression", PACKED)
def test_compressed_content_is_read_back_here_and_by_the_standard_library(compression: str) -> None:
    stored = packed(CONTENT, compression)
    assert unpacked(stored, compression) == CONTENT == STANDARD[compression].decompress(stored)
    assert unpacked(STANDARD[compression].compress(CONTENT), compression) == CONTENT


@given(st.lists(st.binary(max_size=2000), max_size=5), st.sampled_from(PACKED), st.integers(1, 3000))
def test_any_content_comes_back_in_any_steps(contents: list[bytes], compression: Any, step: int) -> None:
    engine = make_compressor(compression)
    assert engine is not None
    stored = b"".join([*map(engine.compress, contents), engine.flush()])
    assert unpacked(stored, compression, step=step) == b"".join(contents)


@pytest.mark.parametrize("compression", PACKED)
def test_a_read_returns_what_was_asked_for_until_the_end(compression: Any) -> None:
    content = bytes(range(256)) * 5000  # more than one read
    stream = DecompressedStream(io.BytesIO(packed(content, compression)), compression, "some.tar", len(content))
    assert len(stream.read(700_000)) == 700_000
    assert len(stream.read(700_000)) == len(content) - 700_000
    assert stream.read(1) == stream.read(1) == b""


@pytest.mark.parametrize("compression", PACKED)
def test_the_same_content_gives_the_same_bytes(compression: Any) -> None:
    assert packed(CONTENT, compression) == packed(CONTENT, compression)
    if compression == "gz":
        assert packed(CONTENT, compression)[4:8] == bytes(4)  # no time


def test_each_compressor_has_its_level() -> None:
    # The level decides about the bytes that are stored. Words in any order, since a level shows only in long matches.
    words = np.random.default_rng(0).integers(0, 400, 60_000)
    content = b"".join(b"word %d, " % word for word in words)
    assert packed(content, "gz")[10:] == gzip.compress(content, 6)[10:]  # after the header, which has the time
    assert packed(content, "bz2") == bz2.compress(content, 9)
    assert packed(content, "xz") == lzma.compress(content, preset=1)


def test_plain_archives_have_no_compressor() -> None:
    assert make_compressor("none") is None
    assert tuple(COMPRESSIONS) == ("none", *PACKED)


@pytest.mark.parametrize("compression", PACKED)
def test_compression_is_detected_from_the_first_bytes(compression: Any) -> None:
    assert compression_of(packed(CONTENT, compression)) == compression
    assert compression_of(CONTENT) == "none"
    assert compression_of(b"") == "none"


@pytest.mark.parametrize("compression", PACKED)
def test_concatenated_streams_are_read_as_one(compression: Any) -> None:
    parts = [b"one", b"", b"two" * 100_000, b"three"]
    stored = b"".join(packed(part, compression) for part in parts)
    assert unpacked(stored, compression) == b"".join(parts) == STANDARD[compression].decompress(stored)


@pytest.mark.parametrize("compression", PACKED)
def test_zeros_after_the_end_are_padding(compression: Any) -> None:
    assert unpacked(packed(CONTENT, compression) + bytes(1000), compression) == CONTENT


@pytest.mark.parametrize("compression", PACKED)
def test_anything_else_after_the_end_is_damage(compression: Any) -> None:
    stored = packed(CONTENT, compression)
    refused(stored + b"garbage after the end", compression, "damaged|truncated")
    refused(stored + bytes(400_000) + b"garbage", compression, "damaged|truncated")


def test_another_stream_after_a_lot_of_padding_is_not_lost() -> None:
    stored = packed(b"one", "gz") + bytes(600_000) + packed(b"two", "gz")
    with suppress(DamageError):  # refusing is fine, too; losing it silently is not
        assert unpacked(stored, "gz") == b"onetwo"


@pytest.mark.parametrize("compression", PACKED)
def test_every_truncated_stream_is_refused(compression: Any) -> None:
    stored = packed(CONTENT[:600], compression)
    for length in range(len(stored)):
        refused(stored[:length], compression, "truncated" if length else "")


@pytest.mark.parametrize("compression", PACKED)
def test_every_flipped_bit_is_noticed_or_changes_nothing(compression: Any) -> None:
    content = CONTENT[:300]
    stored = packed(content, compression)
    harmless = set()
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert unpacked(bytes(damaged), compression) == content
            harmless.add(bit // 8)
        except DamageError:
            pass
    # Gzip has a time and hints in its header that nothing checks; bzip2 has a bit that only old files use. Both pad.
    assert len(harmless) <= {"gz": 8, "bz2": 4, "xz": 0}[compression]


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("stored", [b"", b"garbage", bytes(100), b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0"])
def test_garbage_is_refused(stored: bytes, compression: Any) -> None:
    refused(stored, compression, "damaged|truncated")


# -- bombs -------------------------------------------------------------------------------------------------------------


def bomb(compression: Any, megabytes: int) -> bytes:
    engine = make_compressor(compression)
    assert engine is not None
    piece = bytes(1 << 20)
    return b"".join([*(engine.compress(piece) for _ in range(megabytes)), engine.flush()])


@pytest.mark.parametrize("compression", PACKED)
def test_more_than_the_limit_is_refused(compression: Any) -> None:
    stored = packed(CONTENT, compression)
    assert unpacked(stored, compression, limit=len(CONTENT)) == CONTENT
    refused(stored, compression, f"more than {len(CONTENT) - 1} bytes", limit=len(CONTENT) - 1)


def memory_of_a_bomb(stored: bytes, compression: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamageError, match="looks like a decompression bomb"):
        unpacked(stored, compression, limit=1 << 20, step=1 << 16)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


@pytest.mark.parametrize("compression", PACKED)
def test_a_bomb_is_refused_before_it_takes_memory(compression: Any) -> None:
    stored = bomb(compression, 100)
    assert len(stored) < 1 << 20
    assert run_isolated(memory_of_a_bomb, stored, compression) < 40


@pytest.mark.parametrize("compression", PACKED)
def test_one_large_read_of_a_bomb_is_bounded_as_well(compression: Any) -> None:
    refused(bomb(compression, 8), compression, "bomb", limit=1 << 20, step=1 << 30)


def greedy_xz(dictionary: int = 40) -> bytes:
    """Return an xz of few bytes whose header asks for four gigabytes, or less, to decompress it."""
    stored = bytearray(lzma.compress(b"small", preset=0))
    block = 12  # after the header of the stream
    size = (stored[block] + 1) * 4
    at = stored.index(b"\x21\x01", block, block + size) + 2
    stored[at] = dictionary
    stored[block + size - 4 : block + size] = struct.pack("<I", zlib.crc32(stored[block : block + size - 4]))
    return bytes(stored)


def reading_greedy_xz() -> str:
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    try:
        unpacked(greedy_xz(), "xz")
    except DamageError:
        return "refused"
    except BaseException as error:
        return repr(error)
    return "read"


def test_an_xz_that_asks_for_gigabytes_is_refused() -> None:
    assert run_isolated(reading_greedy_xz) == "refused"


def test_an_xz_may_ask_for_almost_256_megabytes() -> None:
    # By the xz file format, 31 asks for a dictionary of 192 MiB, and 32 for 256 MiB, to which a little more is added.
    assert unpacked(greedy_xz(31), "xz") == b"small"
    refused(greedy_xz(32), "xz", "damaged")
    refused(greedy_xz(33), "xz", "damaged")


def test_small_files_may_grow_to_a_gigabyte_and_large_ones_a_hundredfold() -> None:
    assert max_decompressed_bytes(0) == max_decompressed_bytes(10 << 20) == 1 << 30
    assert max_decompressed_bytes(1 << 30) == 100 << 30
