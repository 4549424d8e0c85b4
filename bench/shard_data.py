"""The samples that shards are measured with, and how reading and writing them is timed."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Shapes", "samples", "warm", "write_rate"]

Shapes = dict[str, tuple[int, ...]]


def samples(shapes: Shapes, n_items: int) -> Iterator[dict[str, Any]]:
    """Give one sample after the other."""
    # Noise: some peers compress, and there would be next to nothing left of anything smooth.
    rng = np.random.default_rng(0)
    block = {name: rng.standard_normal((256, *shape)).astype(np.float32) for name, shape in shapes.items()}
    for number in range(n_items):
        yield {name: array[number % 256] for name, array in block.items()}


def warm(folder: Path) -> None:
    """Bring the files into the page cache, which the system empties behind idle programs."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def write_rate(folder: Path, n_items: int, write: Callable[[], None], *, lasting: bool = False) -> float:
    """Time it; `lasting`: with what is missing until all of it would outlive a power cut."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    write()
    if lasting:
        for path in folder.rglob("*"):
            with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
                if file is not None:
                    os.fsync(file.fileno())
    rate = n_items / (time.perf_counter() - began)
    shutil.rmtree(folder, ignore_errors=True)
    return rate
