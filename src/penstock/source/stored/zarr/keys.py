"""Names of the chunk files of an array, and which of them are stored."""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_LISTED", "ChunkKeys", "StoredFiles", "estimate_bytes", "find_files", "list_files", "measure_files"]

MAX_LISTED = 500_000
"""Files and folders that are listed when an array is opened: takes a few seconds at most."""

_SAMPLED = 256  # files whose sizes are looked at
_PLACE = "(?:0|[1-9][0-9]{0,17})"  # as zarr writes a coordinate: no sign, no zeros before it
_is_place = re.compile(_PLACE).fullmatch
_FIRST_KEY = re.compile(r"(c(?P<after_c>[./]))?0((?P<between>[./])0)*")

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """How the chunk files of an array are called: `c/0/1`, `0.1`, …."""

    prefix: str
    separator: str
    counts: tuple[int, ...]
    """Number of files along each axis."""

    @classmethod
    def parse_first(cls, key: str, counts: tuple[int, ...]) -> "ChunkKeys | None":
        """Return how files are called if the first one is called `key`; None if that is no common way."""
        found = _FIRST_KEY.fullmatch(key)
        if found is None:
            return None
        after_c = found["after_c"]
        return cls(f"c{after_c}" if after_c else "", found["between"] or after_c or ".", counts)

    def coordinates(self, number: int) -> Coordinates:
        """Return the coordinates of a file by its number."""
        found = []
        for count in reversed(self.counts):
            number, place = divmod(number, count)
            found.append(place)
        return tuple(reversed(found))

    @property
    def n_files(self) -> int:
        """Number of files of an array that lacks none."""
        return math.prod(self.counts)

    def key(self, coordinates: Coordinates) -> str:
        """Return the name of a file, relative to the array."""
        return self.prefix + self.separator.join(map(str, coordinates))

    def number(self, coordinates: Coordinates) -> int:
        """Return the number of a file, counted with the last axis fastest."""
        found = 0
        for place, count in zip(coordinates, self.counts, strict=True):
            found = found * count + place
        return found

    def find(self, key: str) -> Coordinates | None:
        """Return the coordinates of a file; None if `key` names no chunk of the array."""
        if not key.startswith(self.prefix):
            return None
        parts = key[len(self.prefix) :].split(self.separator)
        if len(parts) != len(self.counts) or not all(map(_is_place, parts)):
            return None
        places = tuple(map(int, parts))
        return places if all(map(int.__lt__, places, self.counts)) else None


@dataclass(frozen=True, slots=True, eq=False)
class StoredFiles:
    """The chunk files of an array that were there when it was opened."""

    n_files: int
    numbers: NDArray[np.int64] | None
    """Ascending; None: all."""

    def __contains__(self, number: int) -> bool:
        if self.numbers is None:
            return 0 <= number < self.n_files
        place = int(np.searchsorted(self.numbers, number))
        return place < len(self.numbers) and int(self.numbers[place]) == number

    def list_numbers(self) -> list[int]:
        """Return the numbers of these files."""
        return list(range(self.n_files)) if self.numbers is None else self.numbers.tolist()

    @property
    def digest(self) -> str:
        """Short hash of which files are there; empty if all are."""
        if self.numbers is None:
            return ""
        which = self.numbers.astype("<i8").tobytes()
        return hashlib.blake2b(which, digest_size=4, person=b"penstock-chunks").hexdigest()


def list_files(folder: Path, keys: ChunkKeys, limit: int | None = MAX_LISTED) -> StoredFiles | None:
    """Return which chunk files are in the folder of an array; None if there are more than `limit` files.

    Every folder is listed once; nothing is opened. Names that are no chunk of the array are ignored.
    """
    names = list(itertools.islice(_walk(folder, keys), None if limit is None else limit + 1))
    if limit is not None and len(names) > limit:
        return None
    return find_files(names, keys)


def find_files(names: Iterable[str], keys: ChunkKeys) -> StoredFiles:
    """Return which chunk files are among names, which are relative to the array. Others are ignored."""
    separator = re.escape(keys.separator)
    valid = re.compile(f"{re.escape(keys.prefix)}({_PLACE}(?:{separator}{_PLACE}){{{len(keys.counts) - 1}}})").fullmatch
    # Parsed by NumPy: one call for each of 100,000 names would take a second.
    places = ",".join(found[1] for name in names if (found := valid(name)) is not None).replace(keys.separator, ",")
    table = np.fromstring(places, np.int64, sep=",").reshape(-1, len(keys.counts))
    table = table[(table < keys.counts).all(axis=1)]
    numbers = np.zeros(len(table), np.int64)
    for axis, count in enumerate(keys.counts):
        numbers = numbers * count + table[:, axis]
    return StoredFiles(keys.n_files, None if len(numbers) == keys.n_files else np.sort(numbers))


def _walk(folder: Path, keys: ChunkKeys) -> Iterator[str]:
    """Yield the names of files below a folder, relative to it; folders that cannot lead to a chunk are left out."""
    depth = len(keys.counts) if keys.separator == "/" else 1
    waiting = [("c/" if keys.prefix == "c/" else "", depth)]
    root = str(folder)
    while waiting:
        inner, depth = waiting.pop()
        try:
            entries = os.scandir(f"{root}/{inner}")
        except (FileNotFoundError, NotADirectoryError):
            continue  # of an array without any chunk; or removed meanwhile
        # If all axes below have one chunk, its path is known: no folder has to be listed for it.
        only = "/0" * (depth - 1) if depth > 1 and set(keys.counts[-(depth - 1) :]) == {1} else ""
        with entries:
            for entry in entries:
                name = f"{inner}{entry.name}"
                if depth == 1:
                    yield name
                elif only:
                    if os.path.lexists(f"{root}/{name}{only}"):
                        yield f"{name}{only}"
                else:
                    yield name  # counts as listed
                    if _is_place(entry.name) and entry.is_dir():
                        waiting.append((f"{name}/", depth - 1))


def measure_files(folder: Path, keys: ChunkKeys) -> int:
    """Return the size of all chunk files of an array."""
    files, total = list_files(folder, keys, limit=None), 0
    for number in () if files is None else files.list_numbers():
        with suppress(OSError):
            total += os.stat(folder / keys.key(keys.coordinates(number))).st_size  # noqa: PTH116
    return total


def estimate_bytes(folder: Path, keys: ChunkKeys, stored: StoredFiles | None) -> int:
    """Return the size of the stored files of an array: exact for a few, else estimated from some of them."""
    n_files = keys.n_files if stored is None or stored.numbers is None else len(stored.numbers)
    places = np.unique(np.linspace(0, max(0, n_files - 1), min(n_files, _SAMPLED)).astype(np.int64))
    numbers = places if stored is None or stored.numbers is None else stored.numbers[places]
    total = 0
    for number in numbers.tolist():
        with suppress(OSError):  # a file that is missing has no bytes
            total += os.stat(folder / keys.key(keys.coordinates(number))).st_size  # noqa: PTH116
    return total * n_files // max(1, len(numbers))
