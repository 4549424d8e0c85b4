"""Random changes of bytes: what accidents do (flips, cuts, copies) and what attackers write (numbers at the edges).

A mutation is a function `(content, rng) -> content`. Those here know nothing of a format; `structures.py` has those
that keep an input well-formed up to the place that they change.
"""

import random
import re
from collections.abc import Callable, Sequence

__all__ = ["BYTES", "EDGES", "Mutation", "insert_token", "mutate"]

Mutation = Callable[[bytes, random.Random], bytes]

MAX_BYTES = 1 << 18
"""A longer input is cut: a parser that fails only on long ones fails on a small header that declares the length."""

EDGES = (
    *(0, 1, 2, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 511, 512, 513, 1023, 4096, 32767, 32768, 65535, 65536),
    *(2**n + d for n in (20, 24, 30, 31, 32, 40, 47, 48, 53, 59, 62, 63, 64) for d in (-1, 0, 1)),
    *(10**18, 10**19, 10**30, -1, -2, -128, -(2**31), -(2**31) - 1, -(2**63), -(2**63) - 1),
)
"""Integers at which something overflows, wraps or is off by one."""

_DIGITS = re.compile(rb"-?\d+(\.\d+)?")


def mutate(
    content: bytes, rng: random.Random, own: Sequence[Mutation], tokens: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """Return a changed input: one to eight changes, by the target's own mutations about half of the time."""
    for _ in range(1 << rng.choice((0, 0, 0, 1, 1, 2, 3))):
        kind = rng.random()
        if own and kind < 0.5:
            content = rng.choice(own)(content, rng)
        elif tokens and kind < 0.6:
            content = insert_token(content, rng, tokens)
        elif others and kind < 0.68:
            content = _splice(content, rng.choice(others), rng)
        else:
            content = rng.choice(BYTES)(content, rng)
    return content[:MAX_BYTES]


def insert_token(content: bytes, rng: random.Random, tokens: Sequence[bytes]) -> bytes:
    """Insert a word of the format, or write it over what is there."""
    token, at = rng.choice(tokens), rng.randint(0, len(content))
    return content[:at] + token + content[at + (len(token) if rng.random() < 0.5 else 0) :]


def _splice(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return the beginning of one input and the end of another."""
    return content[: rng.randint(0, len(content))] + other[rng.randint(0, len(other)) :]


def _flip_bit(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_byte(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    changed[rng.randrange(len(content))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord("0"), ord("\n"), rng.randrange(256)))
    return bytes(changed)


def _set_integer(content: bytes, rng: random.Random) -> bytes:
    """Write a number at the edge over 1, 2, 4 or 8 bytes, in either byte order."""
    width = rng.choice((1, 2, 4, 4, 8, 8))
    if len(content) < width:
        return content
    at, order = rng.randint(0, len(content) - width), rng.choice(("little", "big"))
    number = rng.choice(EDGES) + rng.choice((0, 0, 0, len(content) - at, len(content)))
    return content[:at] + (number % (1 << 8 * width)).to_bytes(width, order) + content[at + width :]


def _set_digits(content: bytes, rng: random.Random) -> bytes:
    """Replace a number that is written in digits."""
    found = list(_DIGITS.finditer(content[: 1 << 14]))
    if not found:
        return content
    place = rng.choice(found)
    number = rng.choice((*map(str, EDGES), "-0", "1e400", "0.5", "1" * 5000, "007", "NaN")).encode()
    return content[: place.start()] + number + content[place.end() :]


def _truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randint(0, len(content))]


def _cut_head(content: bytes, rng: random.Random) -> bytes:
    return content[rng.randint(0, min(len(content), 64)) :]


def _delete(content: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + content[at + rng.choice((1, 2, 4, 8, 16, 64, 512)) :]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randint(0, len(content)), rng.choice((1, 2, 4, 8, 16, 64, 512))
    return content[:at] + content[at : at + size] * rng.choice((2, 3, 16, 300)) + content[at + size :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randint(0, len(content)), rng.choice((1, 2, 4, 8, 16, 512))
    return content[:at] + rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size))) + content[at:]


def _copy(content: bytes, rng: random.Random) -> bytes:
    """Write a block over another place."""
    size = rng.choice((1, 4, 8, 16, 64, 512))
    source, at = rng.randint(0, len(content)), rng.randint(0, len(content))
    block = content[source : source + size]
    return content[:at] + block + content[at + len(block) :]


BYTES: tuple[Mutation, ...] = (
    *(_flip_bit, _flip_bit, _set_byte, _set_integer, _set_integer, _set_digits),
    *(_truncate, _cut_head, _delete, _repeat, _insert, _copy),
)
