"""Values that were read from a file, checked before anything is made of them."""

from typing import Any

import numpy as np

from penstock.shard.codec import parse_descr

__all__ = ["parse_dtype", "parse_int", "parse_shape", "parse_text"]

_MAX_DESCR = 1 << 14


def parse_int(value: Any, at_least: int = -(2**63)) -> int:
    """Return an integer read from a file; raise ValueError if it is anything else or out of range."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**63:
        raise ValueError(f"must be a 64-bit integer >= {at_least}, got {value!r}")
    return value


def parse_text(value: Any) -> str:
    """Return a string read from a file; raise ValueError if it is anything else."""
    if not isinstance(value, str):
        raise ValueError(f"must be a string, got {value!r}")
    return value


def parse_dtype(descr: str | None) -> np.dtype[Any] | None:
    """Return the dtype that a file describes; raise ValueError if it is invalid or contains Python objects."""
    if descr is None:
        return None
    if not isinstance(descr, str) or len(descr) > _MAX_DESCR:
        raise ValueError(f"invalid dtype {str(descr)[:80]!r}")
    dtype = parse_descr(descr)
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} contains Python objects")
    return dtype


def parse_shape(lengths: list[int] | None) -> tuple[int, ...] | None:
    """Return the shape that a file describes."""
    if lengths is None:
        return None
    if not isinstance(lengths, list):
        raise ValueError(f"invalid shape {str(lengths)[:80]!r}")
    return tuple(parse_int(length, 0) for length in lengths)
