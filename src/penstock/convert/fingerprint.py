"""What tells an input from another one, and from itself after somebody has written to it."""

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.core.errors import SourceError

__all__ = ["Stamp", "fingerprint", "stamped"]

_PIECE_BYTES, _PIECES = 1 << 20, 64


@dataclass(frozen=True, slots=True)
class Stamp:
    """How a file was when it was looked at: if it differs later, somebody has written to it."""

    n_bytes: int
    changed_ns: int


def stamped(path: Path) -> Stamp:
    """Return the stamp of a file; of a folder, that of the files that describe it and lie nearest to its top."""
    try:
        files = _described(path)
        stats = [file.stat() for file in files]
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}.") from error
    return Stamp(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def fingerprint(path: Path) -> str:
    """Return a digest of the content of a file; of a large one, of 64 pieces of 1 MB, the first and the last included.

    Of a folder (a zarr store): of the files that describe it, which say shapes and types, not values.
    """
    digest = xxhash.xxh3_128()
    try:
        for file in _described(path):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path)}:{size};".encode())
            with file.open("rb") as opened:
                for start in _starts(size):
                    opened.seek(start)
                    digest.update(opened.read(_PIECE_BYTES))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}.") from error
    return digest.hexdigest()


def _described(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    names = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "dataset_metadata.json"}
    found = [
        Path(folder, name)
        for folder, folders, files in os.walk(path)
        if folders.sort() is None
        for name in sorted(files)
        if name in names
    ]
    return found or [path]


def _starts(size: int) -> list[int]:
    if size <= _PIECES * _PIECE_BYTES:
        return list(range(0, size, _PIECE_BYTES))
    return [(size - _PIECE_BYTES) * piece // (_PIECES - 1) for piece in range(_PIECES)]
