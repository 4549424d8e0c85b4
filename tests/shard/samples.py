"""Small data sets that encode their own positions, and what is in a folder, byte by byte."""

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.shard.manifest import Manifest, _checksum
from penstock.shard.writer import ShardWriter, WriteOptions

__all__ = ["archive", "contents", "reseal", "sample", "write"]


def sample(number: int) -> dict[str, Any]:
    """Return sample `number`: every value says which one it is."""
    return {"x": np.array([number, -number], np.int32), "note": f"n{number}"}


def write(
    folder: Path,
    n_samples: int = 7,
    *,
    make: Callable[[int], dict[str, Any]] = sample,
    resume: bool = False,
    **options: Any,
) -> Manifest:
    """Write a data set."""
    writer = ShardWriter(folder, WriteOptions(**{"shard_size": 3, **options}), resume=resume)
    for number in range(writer.written, n_samples):
        writer.write(make(number), None, {"number": number})
    return writer.commit()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below `folder`, by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def archive(members: Iterable[tuple[str, bytes]], *, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar of regular members, as the standard library writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def reseal(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a stored manifest and give it a checksum that matches, as a hostile writer would."""
    stored = json.loads(manifest.read_bytes())
    del stored["checksum"]
    change(stored)
    stored["checksum"] = _checksum(stored)
    manifest.write_text(json.dumps(stored))
