"""A zarr store: whether its arrays open, and what programs that were stopped left in it."""

import math
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.text import count
from penstock.files.regular import read_regular
from penstock.observe.check.dataset import list_some
from penstock.observe.check.listing import Listing
from penstock.observe.finding import Finding, Progress
from penstock.source.stored.open_array import StoredArray, open_array

__all__ = ["examine_store", "is_store"]

_METADATA = ("zarr.json", ".zgroup", ".zarray")
_PARTIAL = re.compile(r".*\.[0-9a-f]{32}\.partial$")  # of zarr-python, which writes aside as Penstock does
_MOST_FOLDERS = 20_000
_MOST_ARRAYS = 200
_MOST_SECONDS = 5.0
_MOST_METADATA_BYTES = 16 << 20


def is_store(listing: Listing) -> bool:
    """Return whether a folder is a zarr store."""
    return bool(listing.names.intersection(_METADATA))


def examine_store(listing: Listing, progress: Progress) -> Iterator[Finding]:
    """Yield findings on the arrays of a store, and on temporary files in it."""
    root = listing.folder
    until, arrays, partial = time.monotonic() + _MOST_SECONDS, list[Path](), list[str]()
    is_complete = True
    for number, (place, folders, names) in enumerate(os.walk(root)):
        progress(f"Looking at {root.name}", "folders", number, 0, "")
        partial += [os.path.relpath(Path(place) / name, root) for name in names if _PARTIAL.fullmatch(name)]
        if _is_array(Path(place), names):
            arrays.append(Path(place))
        folders.sort()
        if number >= _MOST_FOLDERS or len(arrays) >= _MOST_ARRAYS or time.monotonic() > until:
            is_complete = False
            break
    yield from _examine_arrays(root, arrays, is_complete=is_complete)
    if partial:
        shown = " ".join(shlex.quote(str(root / name)) for name in partial[:20])
        more = " The command names the first 20." if len(partial) > 20 else ""
        yield Finding(
            "data.temporary",
            "warning",
            f"{count(len(partial), 'temporary file')} of a writer of zarr that was stopped: {list_some(partial)}.",
            f"Remove them, unless a program is writing here now.{more}",
            f"rm -f -- {shown}",
            facts={"count": len(partial), "files": partial[:100]},
        )


def _is_array(folder: Path, names: list[str]) -> bool:
    if ".zarray" in names:
        return True
    if "zarr.json" not in names:
        return False
    try:
        return b'"array"' in read_regular(folder / "zarr.json", _MOST_METADATA_BYTES)
    except OSError:
        return True  # opening it says what is wrong


def _examine_arrays(root: Path, arrays: list[Path], *, is_complete: bool) -> Iterator[Finding]:
    described, wrong = [], list[str]()
    for folder in arrays:
        try:
            array = open_array(str(folder))
        except (PenstockError, OSError) as error:
            wrong.append(f"{folder}: {error}")
            continue
        described.append(_describe(os.path.relpath(folder, root), array))
        array.close()
    rest = "" if is_complete else " There are more, which were not looked at."
    facts = {"arrays": described, "problems": wrong[:100], "complete": is_complete}
    quoted = shlex.quote(str(root))
    if wrong:
        found = f"{count(len(wrong), 'array')} of {len(arrays):,} cannot be opened: {list_some(wrong)}.{rest}"
        advice = "Copy them again, or write them again with the program that wrote them."
        yield Finding("data.store", "problem", found, advice, f"ls -l -- {quoted}", facts=facts)
    elif not arrays:
        found = f"{root} is a zarr group without arrays.{rest}"
        advice = "Give the folder that has arrays, or wait for its writer."
        yield Finding("data.store", "warning", found, advice, f"ls -l -- {quoted}", facts=facts)
    else:
        shown = list_some([f"{entry['name']} {entry['dtype']} {tuple(entry['shape'])}" for entry in described])
        found = f"A zarr store of {count(len(described), 'array')}: {shown}.{rest}"
        yield Finding("data.store", "ok", found, facts=facts)


def _describe(name: str, array: StoredArray) -> dict[str, Any]:
    chunk_bytes = math.prod(array.chunk_shape) * array.dtype.itemsize
    return {
        "name": name,
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "chunk_shape": list(array.chunk_shape),
        "chunk_bytes": chunk_bytes,
    }
