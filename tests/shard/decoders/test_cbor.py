"""CBOR is read as RFC 8949 says; what is malformed, deep or endless is refused before it takes memory."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.decoders.cbor import Tag, decode_cbor
from penstock.shard.decoders.decode import decode

# Appendix A of RFC 8949.
EXAMPLES: dict[str, Any] = {
    "00": 0,
    "17": 23,
    "1818": 24,
    "1903e8": 1000,
    "1bffffffffffffffff": 18446744073709551615,
    "c249010000000000000000": 18446744073709551616,
    "3bffffffffffffffff": -18446744073709551616,
    "c349010000000000000000": -18446744073709551617,
    "3863": -100,
    "f90000": 0.0,
    "f93c00": 1.0,
    "f97bff": 65504.0,
    "fa47c35000": 100000.0,
    "fb3ff199999999999a": 1.1,
    "fbc010666666666666": -4.1,
    "f97c00": math.inf,
    "f4": False,
    "f5": True,
    "f6": None,
    "f7": None,
    "c074323031332d30332d32315432303a30343a30305a": Tag(0, "2013-03-21T20:04:00Z"),
    "c11a514b67b0": Tag(1, 1363896240),
    "d74401020304": Tag(23, b"\1\2\3\4"),
    "40": b"",
    "4401020304": b"\1\2\3\4",
    "6161": "a",
    "62c3bc": "ü",
    "64f0908591": "\U00010151",
    "80": [],
    "8301820203820405": [1, [2, 3], [4, 5]],
    "98190102030405060708090a0b0c0d0e0f101112131415161718181819": list(range(1, 26)),
    "a0": {},
    "a201020304": {1: 2, 3: 4},
    "a26161016162820203": {"a": 1, "b": [2, 3]},
    "5f42010243030405ff": b"\1\2\3\4\5",
    "7f657374726561646d696e67ff": "streaming",
    "9f018202039f0405ffff": [1, [2, 3], [4, 5]],
    "83018202039f0405ff": [1, [2, 3], [4, 5]],
    "bf61610161629f0203ffff": {"a": 1, "b": [2, 3]},
    "826161bf61626163ff": ["a", {"b": "c"}],
}


@pytest.mark.parametrize("stored", EXAMPLES)
def test_the_examples_of_the_standard(stored: str) -> None:
    found = decode_cbor(bytes.fromhex(stored))
    assert (type(found), found) == (type(EXAMPLES[stored]), EXAMPLES[stored])
    assert decode("state.CBOR", bytes.fromhex(stored)) == found


def encode(value: Any) -> bytes:
    """Return plain data as CBOR, with definite lengths."""

    def head(kind: int, count: int) -> bytes:
        return bytes([kind << 5 | 27]) + count.to_bytes(8, "big")

    if isinstance(value, int):
        return head(0, value) if value >= 0 else head(1, -1 - value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return head(4, len(value)) + b"".join(map(encode, value))
    return head(5, len(value)) + b"".join(encode(key) + encode(part) for key, part in value.items())


_plain = st.recursive(
    st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(_plain)
def test_plain_data_come_back_and_truncated_ones_are_refused(value: Any) -> None:
    stored = encode(value)
    assert decode_cbor(stored) == value
    for length in range(0, len(stored), max(1, len(stored) // 20)):
        with pytest.raises(ValueError, match=r"."):
            decode_cbor(stored[:length])


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (b"", "ends"),
        (b"\x9b" + b"\xff" * 8, "ends"),  # 2⁶⁴ elements
        (b"\xbb" + b"\xff" * 8, "ends"),
        (b"\x5b" + b"\x7f" * 8, "needs 9187201950435737471 bytes"),
        (b"\x81" * 100_000, "nested more than 100 deep"),
        (b"\x9f" * 100_000, "nested more than 100 deep"),
        (b"\xc1" * 100_000, "nested more than 100 deep"),
        (b"\xff", "follow"),
        (b"\x81\xff", "end without a beginning"),
        (b"\xa1\x01\xff", "end without a beginning"),
        (b"\xc1\xff", "end without a beginning"),
        (b"\xa1\x80\x01", "a key of a map must be text, bytes or a number of 64 bits, got a list"),
        (b"\xa1\xc2\x49" + b"\1" * 9 + b"\x01", "a key of a map must be .*, got a int"),
        (b"\xa1\xc0\x60\x01", "a key of a map must be .*, got a Tag"),
        (b"\x5f\x61a\xff", "another kind"),
        (b"\x5f\x5f\xff\xff", "another kind"),
        (b"\x1c", "invalid length"),
        (b"\xf8\x20", "simple value"),
        (b"\x61\xff", ""),
        (b"\x01\x01", "follow"),
    ],
)
def test_what_is_malformed_is_refused(stored: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match or "."):
        decode("cbor", stored)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(stored: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode("cbor", stored)
