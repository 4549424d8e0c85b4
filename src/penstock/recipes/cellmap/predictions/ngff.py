"""Write an OME-NGFF 0.4 image (zarr v2) of one level: metadata and chunks.

Every file is written aside and renamed, so that it is complete or missing. As in
`source.volume.ngff`, voxel `i` of an axis has its center at `translation + i * scale`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.source.stored.zarr.chunk_files import (
    MAX_CHUNK_BYTES,
    array_metadata,
    is_whole_chunk,
    write_chunk,
    write_file,
    write_json,
)
from penstock.source.volume.ngff import Axis

__all__ = ["Coordinates", "ImageLayout", "ImageStore"]

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class ImageLayout:
    """Shape, chunks and position of one array; every tuple has one entry per axis."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    scale: tuple[float, ...]
    translation: tuple[float, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    def __post_init__(self) -> None:
        n_bytes = math.prod(self.chunk) * np.dtype(self.dtype).itemsize
        if n_bytes > MAX_CHUNK_BYTES:
            raise OptionError(f"Chunks must be smaller than 2 GB, got {self.chunk} {self.dtype} with {n_bytes} bytes.")

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk, strict=True))

    @property
    def fill(self) -> float:
        """Value of voxels that were never written: NaN, which means unknown, or 0 for integers."""
        return math.nan if self.dtype == "float32" else 0

    def box(self, chunk: Coordinates) -> tuple[tuple[int, int], ...]:
        """Return start and stop of a chunk along each axis, clipped to the array."""
        return tuple(
            (number * size, min((number + 1) * size, extent))
            for number, size, extent in zip(chunk, self.chunk, self.shape, strict=True)
        )


class ImageStore:
    """A folder that an image is written to.

    Parameters
    ----------
    folder
        Folder of the image.
    aside
        Existing folder for incomplete files, on the same file system.
    """

    def __init__(self, folder: Path, aside: Path) -> None:
        self.folder, self._aside = folder, aside

    def write_metadata(self, name: str, layout: ImageLayout, extra: Mapping[str, Any]) -> None:
        """Write the metadata of the image and its only level, `s0`; `extra` attributes are stored with them."""
        self._write_json(self.folder / "s0" / ".zarray", _zarr_metadata(layout))
        transformations = [
            {"type": "scale", "scale": list(layout.scale)},
            {"type": "translation", "translation": list(layout.translation)},
        ]
        axes = [
            {"name": axis.name, "type": axis.kind} | ({} if axis.unit is None else {"unit": axis.unit})
            for axis in layout.axes
        ]
        datasets = [{"path": "s0", "coordinateTransformations": transformations}]
        image = {"version": "0.4", "name": name, "axes": axes, "datasets": datasets}
        self._write_json(self.folder / ".zattrs", {"multiscales": [image], **extra})
        self._write_json(self.folder / ".zgroup", {"zarr_format": 2})

    def write_chunk(self, chunk: Coordinates, values: NDArray[Any]) -> None:
        """Store one whole chunk."""
        write_chunk(self._path(chunk), values, self._aside)

    def has_chunk(self, chunk: Coordinates) -> bool:
        """Return whether a chunk exists and has the length stated in its header."""
        return is_whole_chunk(self._path(chunk))

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file so that it is complete or missing."""
        write_file(path, content, self._aside)

    def _write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        write_json(path, content, self._aside)

    def _path(self, chunk: Coordinates) -> Path:
        return self.folder / "s0" / "/".join(map(str, chunk))


def _zarr_metadata(level: ImageLayout) -> dict[str, Any]:
    fill = "NaN" if math.isnan(level.fill) else 0
    return array_metadata(level.shape, level.chunk, level.dtype, fill=fill, separator="/")
