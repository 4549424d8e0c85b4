"""A keyed bijection on 0 … n-1: an exact shuffle that is never stored.

A Feistel network permutes the numbers of `bits` bits, where 2**bits is the smallest power of two >= n. A result >= n is
permuted again until it is below n (cycle walking, fewer than two rounds on average), which keeps the map a bijection.
Memory depends only on the number of positions asked for, at any n and any position.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import mix64, subkeys

__all__ = ["permute", "unpermute"]

_U64 = np.uint64
_U64s = NDArray[np.uint64]

# From 9 bits on, eight rounds leave no trace in pair statistics. With fewer bits, whole permutations can be counted,
# and only from about 20 rounds on are all of them equally frequent (tests/plan/test_permute.py).
_ROUNDS = 8
_SMALL_BITS = 8
_SMALL_ROUNDS = 24

# From this many positions per value of a half on, a table of its values is faster: 25 in place of 85 ns per position.
_TABLE_USES = 4
_BLOCK = 1 << 14  # positions whose halves stay in the cache of a core

_ROUND_KEYS = subkeys(0, np.arange(_SMALL_ROUNDS))
_FACTORS = (_U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB))
_SHIFTS = (_U64(32), _U64(29))


def permute(
    positions: NDArray[np.int64], n: int | NDArray[np.int64], key: int | NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the image of each of `positions` under the permutation `key` of 0 … n-1.

    Parameters
    ----------
    positions
        Each >= 0 and < its `n`.
    n, key
        One value for all positions, or one for each.

    Examples
    --------
    >>> sorted(permute(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return _map(positions, n, key, inverse=False)


def unpermute(items: NDArray[np.int64], n: int | NDArray[np.int64], key: int | NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the position of each of `items` under the permutation `key` of 0 … n-1: the inverse of `permute`.

    Examples
    --------
    >>> unpermute(permute(np.arange(5), 5, key=1), 5, key=1).tolist()
    [0, 1, 2, 3, 4]
    """
    return _map(items, n, key, inverse=True)


def _map(
    numbers: NDArray[np.int64], n: int | NDArray[np.int64], key: int | NDArray[np.uint64], *, inverse: bool
) -> NDArray[np.int64]:
    x = numbers.astype(_U64)
    # Single values become arrays of one: NumPy warns about the (wanted) overflow of scalars, but not of arrays.
    sizes, keys = np.atleast_1d(np.asarray(n, _U64)), np.atleast_1d(np.asarray(key, _U64))
    small = sizes <= _U64(1 << _SMALL_BITS)
    if small.all():
        return _walk(x, sizes, keys, _rounds(_SMALL_ROUNDS, inverse)).astype(np.int64)
    if not small.any():
        return _walk(x, sizes, keys, _rounds(_ROUNDS, inverse)).astype(np.int64)
    for chosen, rounds in ((small, _SMALL_ROUNDS), (~small, _ROUNDS)):
        some_keys = keys if len(keys) == 1 else keys[chosen]
        x[chosen] = _walk(x[chosen], sizes[chosen], some_keys, _rounds(rounds, inverse))
    return x.astype(np.int64)


def _rounds(count: int, inverse: bool) -> range:
    """Return the numbers of the rounds in the order they are made. A round is its own inverse."""
    return range(count - 1, -1, -1) if inverse else range(count)


def _walk(x: _U64s, sizes: _U64s, keys: _U64s, rounds: range) -> _U64s:
    bits = _bit_length(sizes)
    # One row per round, with one key for all positions or one for each.
    round_keys = mix64(keys[None, :] ^ _ROUND_KEYS[: len(rounds), None])
    tables = None
    if len(sizes) == len(keys) == 1 and _needs_tables(x, bits):
        tables = _make_tables(int(bits[0]), int(keys[0]), len(rounds))
        blocks = np.split(x, range(_BLOCK, len(x), _BLOCK))
        y = np.concatenate([_feistel(block, bits, round_keys, rounds, tables) for block in blocks])
    else:
        y = _feistel(x, bits, round_keys, rounds)
    outside = np.flatnonzero(y >= sizes)
    walked = y.take(outside)
    while outside.size:
        some_sizes, some_bits = (sizes, bits) if len(sizes) == 1 else (sizes[outside], bits[outside])
        some_keys = round_keys if len(keys) == 1 else round_keys[:, outside]
        walked = _feistel(walked, some_bits, some_keys, rounds, tables)
        y[outside] = walked
        again = np.flatnonzero(walked >= some_sizes)  # faster than a mask
        outside, walked = outside.take(again), walked.take(again)
    return y


def _needs_tables(x: _U64s, bits: _U64s) -> bool:
    return bool(x.size > _TABLE_USES << int(bits[0] - bits[0] // _U64(2)))


@lru_cache(maxsize=8)  # the sources of a mixture; up to 1 MB each
def _make_tables(bits: int, key: int, n_rounds: int) -> list[_U64s]:
    """Return, for each round, what it adds to one half for every value of the other."""
    low_bits = bits // 2
    masks = [np.array([(1 << n) - 1], _U64) for n in (bits - low_bits, low_bits)]
    round_keys = mix64(np.array([key], _U64) ^ _ROUND_KEYS[:n_rounds, None])
    every = np.arange(int(masks[0][0]) + 1, dtype=_U64)
    shifted = np.empty_like(every)
    return [
        _mix(every, round_key, masks[number % 2], np.empty_like(every), shifted)
        for number, round_key in enumerate(round_keys)
    ]


def _feistel(x: _U64s, bits: _U64s, round_keys: _U64s, rounds: range, tables: list[_U64s] | None = None) -> _U64s:
    low_bits = bits // _U64(2)
    low_mask = (_U64(1) << low_bits) - _U64(1)
    high_mask = (_U64(1) << (bits - low_bits)) - _U64(1)
    high, low = x >> low_bits, x & low_mask
    if tables is not None:
        for number in rounds:
            changed, half = (low, high) if number % 2 else (high, low)
            changed ^= tables[number].take(half.view(np.int64), mode="clip")  # faster, and nothing is outside
    else:
        scratch, shifted = np.empty_like(x), np.empty_like(x)
        for number in rounds:
            if number % 2:
                low ^= _mix(high, round_keys[number], low_mask, scratch, shifted)
            else:
                high ^= _mix(low, round_keys[number], high_mask, scratch, shifted)
    high <<= low_bits
    high |= low
    return high


def _mix(half: _U64s, round_key: _U64s, mask: _U64s, scratch: _U64s, shifted: _U64s) -> _U64s:
    np.add(half, round_key, out=scratch)
    np.multiply(scratch, _FACTORS[0], out=scratch)
    np.right_shift(scratch, _SHIFTS[0], out=shifted)
    np.bitwise_xor(scratch, shifted, out=scratch)
    np.multiply(scratch, _FACTORS[1], out=scratch)
    np.right_shift(scratch, _SHIFTS[1], out=shifted)
    np.bitwise_xor(scratch, shifted, out=scratch)
    return np.bitwise_and(scratch, mask, out=scratch)


def _bit_length(sizes: _U64s) -> _U64s:
    """Return the number of bits needed for 0 … size-1, at least 1."""
    # Exact: frexp gives the bit length of integers below 2**53, and no index is larger than that.
    return np.maximum(np.frexp((sizes - _U64(1)).astype(np.float64))[1], 1).astype(_U64)
