"""Writes the files of zarr v2 arrays, compressed with blosc. Each file is whole or missing, also after a kill."""

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, WriteError
from penstock.core.text import cause
from penstock.files.durable import write_aside
from penstock.files.regular import open_regular

__all__ = [
    "MAX_CHUNK_BYTES",
    "array_metadata",
    "compressor",
    "is_whole_chunk",
    "write_chunk",
    "write_file",
    "write_json",
]

MAX_CHUNK_BYTES = (1 << 31) - 17
"""The largest chunk that blosc accepts."""


def write_chunk(path: Path, values: NDArray[Any], aside: Path) -> None:
    """Compress and write one chunk; see `write_file`."""
    write_file(path, compressor().encode(np.ascontiguousarray(values)), aside)


def write_json(path: Path, content: Mapping[str, Any], aside: Path) -> None:
    """Write metadata; see `write_file`."""
    write_file(path, json.dumps(content, indent=1).encode(), aside)


def write_file(path: Path, content: bytes, aside: Path) -> None:
    """Write a file so that it is whole or missing; its folder is created.

    Parameters
    ----------
    aside
        Existing folder for incomplete files, on the same file system.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"Could not write {path}: {cause(error)}") from error
    write_aside(path, content, lasting=False, folder=aside)


def is_whole_chunk(path: Path) -> bool:
    """Return whether a chunk exists and has the length stated in its header."""
    # A power cut may leave a file name without content.
    try:
        with open_regular(path) as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    return len(head) == 16 and int.from_bytes(head[12:], "little") == size


def array_metadata(
    shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, *, fill: float | str, separator: str
) -> dict[str, Any]:
    """Return the zarr v2 metadata of an array, the content of `.zarray`."""
    return {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunks),
        "dtype": np.dtype(dtype).newbyteorder("<").str,
        "compressor": compressor().get_config(),
        "fill_value": fill,
        "order": "C",
        "filters": None,
        "dimension_separator": separator,
    }


@cache
def compressor() -> Any:
    """Return the compressor of all arrays that Penstock writes."""
    try:
        numcodecs: Any = import_module("numcodecs")
    except ImportError as error:
        raise MissingDependency("numcodecs", "zarr", "Writing zarr stores") from error
    # Threads of blosc do not survive a fork, and would add to ours; zarr-python disables them, too.
    numcodecs.blosc.use_threads = False
    return numcodecs.Blosc("zstd", 3, 2)
