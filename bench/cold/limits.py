"""What the disk gives: sequential reading, and random reading with and without hints, in one process and one thread.

The same bytes as the loaders read, into one buffer, and nothing else. All items of a tar have the same length, so that
item n lies at n times that.
"""

import os
import time
from pathlib import Path

import numpy as np

from bench.cold.pages import drop, files_of

__all__ = ["HINTS_AHEAD", "random_reading", "sequential_reading"]

HINTS_AHEAD = 512
_PIECE = 1 << 20


def sequential_reading(folder: Path, payload_bytes: int, pattern: str = "*") -> float:
    """Read all files from their first byte to their last; return MB per second of the payload."""
    paths = [path for path in files_of(folder) if path.match(pattern)]
    buffer = bytearray(_PIECE)
    drop(files_of(folder))
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return payload_bytes / 1e6 / (time.perf_counter() - began)


def random_reading(folder: Path, payload_bytes: int, n_items: int, ahead: int) -> float:
    """Read the items of all tars in a random order, with hints this many items ahead; return MB per second."""
    tars = sorted(folder.glob("*.tar"))
    handles = [os.open(path, os.O_RDONLY) for path in tars]
    per_tar = n_items // len(tars)
    n_bytes = tars[0].stat().st_size // per_tar
    order = np.random.default_rng(0).permutation(n_items)
    files = [handles[number] for number in (order // per_tar).tolist()]
    places = (order % per_tar * n_bytes).tolist()
    buffer = [bytearray(n_bytes)]
    drop(files_of(folder))
    began = time.perf_counter()
    if ahead:
        for file, place in zip(files[:ahead], places, strict=False):
            os.posix_fadvise(file, place, n_bytes, os.POSIX_FADV_WILLNEED)
    for number in range(n_items):
        if ahead and number + ahead < n_items:
            os.posix_fadvise(files[number + ahead], places[number + ahead], n_bytes, os.POSIX_FADV_WILLNEED)
        os.preadv(files[number], buffer, places[number])
    rate = payload_bytes / 1e6 / (time.perf_counter() - began)
    for handle in handles:
        os.close(handle)
    return rate
