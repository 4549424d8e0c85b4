"""All randomness: generators and keys derived by hashing a seed and a path.

Nothing else in Penstock makes random numbers. Seeds are never added: with `seed + epoch`, run 0 epoch 1 would equal
run 1 epoch 0. The integer hashes use only integer arithmetic, so an order is the same with every version of NumPy, on
every machine.
"""

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError

__all__ = ["check_seed", "draw_seed", "generator_for", "key_for", "mix64", "subkeys"]

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = np.uint64
_MASK = (1 << 64) - 1


def check_seed(seed: int) -> int:
    """Return `seed` as an int, or raise PlanError if it is no integer >= 0."""
    return check_integer("seed", seed, at_least=0, error=PlanError)


def draw_seed() -> int:
    """Return a seed that differs each time, from the entropy of the system; keep it to repeat what was made with it."""
    return secrets.randbits(62)


def key_for(seed: int, *path: str | int) -> int:
    """Return the 64-bit key of a seed and a path.

    Examples
    --------
    >>> key_for(0, "order", 1) == key_for(1, "order", 0)
    False
    """
    return int.from_bytes(_digest(seed, path)[:8], "little")


def generator_for(seed: int, *path: str | int) -> np.random.Generator:
    """Return the random generator of a path: the same for the same path, on any worker, after any resume.

    Examples
    --------
    >>> a, b = generator_for(7, "augment", 0, 12), generator_for(7, "augment", 0, 12)
    >>> a.random() == b.random()
    True
    """
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(seed, path), "little")))


def subkeys(key: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one 64-bit key for each of `numbers` under `key`, vectorised."""
    steps = (numbers.astype(_U64) + _U64(1)) * _U64(_GOLDEN)
    return mix64(steps + _U64(key & _MASK))


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `x` with every bit depending on every bit (the finaliser of SplitMix64, a bijection)."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _digest(seed: int, path: tuple[str | int, ...]) -> bytes:
    # repr keeps "1" and 1 apart, and the tuple's punctuation keeps ("a", "b") and ("a b",) apart. NumPy integers and
    # strings are converted to plain ones first, because their repr includes the type.
    plain = (int(seed), *(str(part) if isinstance(part, str) else int(part) for part in path))
    return hashlib.blake2b(repr(plain).encode(), digest_size=16, person=b"penstock").digest()
