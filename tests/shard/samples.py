"""Small datasets whose values encode their positions, and helpers to inspect and damage them."""

import enum
import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from penstock_test_parts import open_files

from penstock import TarSource
from penstock.shard.manifest import Manifest, _checksum
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

__all__ = [
    "Side",
    "archive",
    "contents",
    "ids",
    "metadata",
    "numbers",
    "open_files_in",
    "reseal",
    "sample",
    "start_writer",
    "write",
]


class Side(enum.IntEnum):
    """A class of the user, which a pickle imports by name."""

    LEFT = 1


def sample(number: int) -> dict[str, Any]:
    """Return sample `number`; every value encodes the number."""
    return {"x": np.array([number, -number], np.int32), "note": f"n{number}"}


def write(
    folder: Path,
    n_samples: int = 7,
    *,
    make: Callable[[int], dict[str, Any]] = sample,
    resume: bool = False,
    overwrite: bool = True,
    **options: Any,
) -> Manifest:
    """Write a dataset."""
    writer = ShardWriter(
        folder, WriteOptions(**{"shard_size": 3, **options}), resume=resume, overwrite=overwrite and not resume
    )
    for number in range(writer.written, n_samples):
        writer.write(make(number), None, {"number": number})
    return writer.commit()


def start_writer(folder: Path, **options: Any) -> ShardWriter:
    """Return a writer without samples."""
    return ShardWriter(folder, WriteOptions(**{"shard_size": 3, **options}), overwrite=True)


def metadata(folder: Path) -> list[dict[str, Any]]:
    """Return the metadata of each sample."""
    return TarSource(folder, fields=["metadata"]).take(np.arange(len(TarSource(folder).index)))["metadata"].tolist()


def ids(folder: Path) -> list[str]:
    """Return the id of each sample."""
    return [about["sample_id"] for about in metadata(folder)]


def numbers(folder: Path) -> list[int]:
    """Return the number that each sample encodes."""
    source = TarSource(folder)
    return source.take(np.arange(len(source.index)))["x"][:, 0].tolist()


def open_files_in(folder: Path) -> list[str]:
    """Return the files below `folder` that this process has open."""
    return sorted({name for name in open_files().values() if name.startswith(str(folder))})


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
    """Change a stored manifest and its checksum, as a hostile writer would."""
    stored = json.loads(manifest.read_bytes())
    del stored["checksum"]
    change(stored)
    stored["checksum"] = _checksum(stored)
    manifest.write_text(json.dumps(stored))
