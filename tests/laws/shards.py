"""Shards for the laws: the same items in both layouts, and in a mixture of both."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from penstock_test_shards import mix_shards

from penstock import TarSource
from penstock.recipes.webdataset import WebDatasetWriter

__all__ = ["LAYOUTS", "Stored", "make_source", "sample_of"]

Stored = Literal["samples", "columns", "mixed"]
LAYOUTS: tuple[Stored, ...] = ("samples", "columns", "mixed")


def sample_of(number: int) -> dict[str, Any]:
    """Return an item; its values say which one it is."""
    return {"x": number, "tokens": np.arange(number % 5, dtype=np.int32) + number, "note": f"№ {number}"}


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="penstock-laws-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _write(name: str, n_items: int, shard_size: int, layout: Any) -> Path:
    folder = _folder() / f"{name}-{n_items}-{shard_size}"
    with WebDatasetWriter(folder, shard_size, layout=layout, overwrite=True) as writer:
        for number in range(n_items):
            writer.write_sample(sample_of(number), metadata={"trial": number, "file": f"rat {number % 3}"})
    return folder


@cache
def _stored(stored: Stored, n_items: int, shard_size: int) -> Path:
    folder = _write(stored, n_items, shard_size, "samples" if stored == "samples" else "columns")
    if stored == "mixed":
        mix_shards(folder, _write("mixed-others", n_items, shard_size, "samples"))
    return folder


def make_source(stored: Stored, n_items: int, shard_size: int, fields: list[str] | None = None) -> TarSource:
    """Return a source of its own over shards that are written once."""
    return TarSource(_stored(stored, n_items, shard_size), fields=fields, chunk_items=4)
