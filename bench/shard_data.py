"""The samples that shards are measured with, and how reading and writing them is timed."""

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Shapes", "samples", "touch_memory", "warm", "write_rate"]

Shapes = dict[str, tuple[int, ...]]

_FEW_ITEMS = 8  # written before the clock starts
_TOUCHED_BYTES = 2 << 30  # more than any of them writes


def samples(shapes: Shapes, n_items: int) -> Iterator[dict[str, Any]]:
    """Give one sample after the other."""
    block = _make_block(tuple(shapes.items()))
    for number in range(n_items):
        yield {name: array[number % 256] for name, array in block.items()}


@lru_cache(maxsize=1)
def _make_block(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, NDArray[np.float32]]:
    """Return the samples that come again and again; made once, so that no clock runs meanwhile."""
    # Noise: some peers compress, and there would be next to nothing left of anything smooth.
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((256, *shape)).astype(np.float32) for name, shape in shapes}


def warm(folder: Path) -> None:
    """Bring the files into the page cache, which the system empties behind idle programs."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def touch_memory(n_bytes: int) -> None:
    """Use free memory for a moment."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)
        pages[:: mmap.PAGESIZE] = 1
        del pages


def write_rate(folder: Path, n_items: int, write: Callable[[int], None], *, lasting: bool = False) -> float:
    """Return the items per second of `write`, which is given how many to write.

    It writes a few first, before the clock starts, so that nobody is measured with what happens once in a process:
    imports, and random data. Then memory is touched, as by `cold.pages.drop`, because files need it: whoever comes
    after one that has removed a gigabyte of files would write at a third of the rate. `lasting`: with what is missing
    until all of it would outlive a power cut.
    """
    shutil.rmtree(folder, ignore_errors=True)
    write(_FEW_ITEMS)
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    touch_memory(_TOUCHED_BYTES)
    began = time.perf_counter()
    write(n_items)
    if lasting:
        for path in folder.rglob("*"):
            with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
                if file is not None:
                    os.fsync(file.fileno())
    rate = n_items / (time.perf_counter() - began)
    shutil.rmtree(folder, ignore_errors=True)
    return rate
