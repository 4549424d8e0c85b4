"""Write an OME-NGFF 0.4 image (zarr v2): metadata, chunks, and the downsample levels of the pyramid.

Every file is written aside and renamed, so that it is complete or missing. As in
`source.volume.ngff`, voxel `i` of an axis has its center at `translation + i * scale`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.files.regular import read_regular
from penstock.source.stored.zarr.array import open_zarr
from penstock.source.stored.zarr.chunk_files import (
    MAX_CHUNK_BYTES,
    array_metadata,
    compressor,
    is_whole_chunk,
    write_chunk,
    write_file,
    write_json,
)
from penstock.source.stored.zarr.store_folder import LocalFolder
from penstock.source.volume.ngff import Axis

__all__ = ["Coordinates", "ImageLayout", "ImageStore", "downsample"]

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

    def coordinates(self) -> Iterator[Coordinates]:
        """Yield the coordinates of all chunks, in order."""
        return itertools.product(*map(range, self.grid))

    def box(self, chunk: Coordinates) -> tuple[tuple[int, int], ...]:
        """Return start and stop of a chunk along each axis, clipped to the array."""
        return tuple(
            (number * size, min((number + 1) * size, extent))
            for number, size, extent in zip(chunk, self.chunk, self.shape, strict=True)
        )

    def next_level(self) -> "ImageLayout":
        """Return the layout of the next level: half as many voxels along each axis that has more than one."""
        factors = tuple(2 if size > 1 else 1 for size in self.shape)
        shape = tuple(-(-size // factor) for size, factor in zip(self.shape, factors, strict=True))
        return replace(
            self,
            shape=shape,
            chunk=tuple(min(chunk, size) for chunk, size in zip(self.chunk, shape, strict=True)),
            scale=tuple(size * factor for size, factor in zip(self.scale, factors, strict=True)),
            # The center of a voxel lies between the centers of the two voxels it is made of.
            translation=tuple(
                shift + (factor - 1) * size / 2
                for shift, factor, size in zip(self.translation, factors, self.scale, strict=True)
            ),
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

    def write_metadata(self, name: str, levels: tuple[ImageLayout, ...], extra: Mapping[str, Any]) -> None:
        """Write the metadata of the image and its levels, `s0` first; `extra` attributes are stored with them."""
        datasets = []
        for number, level in enumerate(levels):
            self._write_json(self.folder / f"s{number}" / ".zarray", _zarr_metadata(level))
            transformations = [
                {"type": "scale", "scale": list(level.scale)},
                {"type": "translation", "translation": list(level.translation)},
            ]
            datasets.append({"path": f"s{number}", "coordinateTransformations": transformations})
        axes = [
            {"name": axis.name, "type": axis.kind} | ({} if axis.unit is None else {"unit": axis.unit})
            for axis in levels[0].axes
        ]
        image: dict[str, Any] = {"version": "0.4", "name": name, "axes": axes, "datasets": datasets}
        if len(levels) > 1:
            image["type"] = _METHODS[levels[0].dtype]
        self._write_json(self.folder / ".zattrs", {"multiscales": [image], **extra})
        self._write_json(self.folder / ".zgroup", {"zarr_format": 2})

    def write_chunk(self, array: str, chunk: Coordinates, values: NDArray[Any]) -> None:
        """Store one whole chunk of the array `array`."""
        write_chunk(self._path(array, chunk), values, self._aside)

    def has_chunk(self, array: str, chunk: Coordinates) -> bool:
        """Return whether a chunk exists and has the length stated in its header."""
        return is_whole_chunk(self._path(array, chunk))

    def read_chunk(self, array: str, chunk: Coordinates, like: NDArray[Any]) -> NDArray[Any]:
        """Return a stored chunk, with the shape and dtype of `like`."""
        stored = read_regular(self._path(array, chunk))
        return np.frombuffer(compressor().decode(stored), like.dtype).reshape(like.shape)

    def write_levels(self, levels: tuple[ImageLayout, ...]) -> None:
        """Write all levels but the first, each from the one before, chunk by chunk."""
        for number in range(1, len(levels)):
            # Chunks without predictions are the fill value, as `finalize(missing="fill")` wants it.
            finer = open_zarr(LocalFolder(self.folder / f"s{number - 1}")).record_chunks("fill")
            level = levels[number]
            factors = tuple(2 if size > 1 else 1 for size in levels[number - 1].shape)
            for chunk in level.coordinates():
                bounds = [
                    (low * factor, min(high * factor, size))
                    for (low, high), factor, size in zip(level.box(chunk), factors, finer.shape, strict=True)
                ]
                fine = np.empty([high - low for low, high in bounds], finer.dtype)
                for task in finer.tasks(*bounds[0], tuple(bounds[1:]), fine):
                    task()
                values = np.full(level.chunk, level.fill, level.dtype)
                coarse = downsample(fine, factors, _METHODS[level.dtype])
                values[tuple(slice(size) for size in coarse.shape)] = coarse
                self.write_chunk(f"s{number}", chunk, values)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file so that it is complete or missing."""
        write_file(path, content, self._aside)

    def _write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        write_json(path, content, self._aside)

    def _path(self, array: str, chunk: Coordinates) -> Path:
        return self.folder / array / "/".join(map(str, chunk))


_METHODS: dict[str, Literal["mean", "mode"]] = {"float32": "mean", "uint8": "mode"}


def downsample(values: NDArray[Any], factors: tuple[int, ...], method: Literal["mean", "mode"]) -> NDArray[Any]:
    """Return an array with one value per block of voxels; blocks at the end may be smaller.

    Parameters
    ----------
    factors
        Size of a block along each axis.
    method
        `mean`, computed in double precision, or `mode`, the most frequent value, the smallest if several are.

    Examples
    --------
    >>> downsample(np.array([1, 2, 2, 5, 4], "u1"), (2,), "mode").tolist()
    [1, 2, 4]
    """
    # One corner of all blocks at a time: each is a view, without the corners beyond the end.
    shape = [-(-size // factor) for size, factor in zip(values.shape, factors, strict=True)]
    corners = []
    for corner in itertools.product(*map(range, factors)):
        view = values[tuple(slice(begin, None, factor) for begin, factor in zip(corner, factors, strict=True))]
        corners.append((view, tuple(slice(size) for size in view.shape)))
    if method == "mean":
        total, count = np.zeros(shape), np.zeros(shape, np.int64)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities are valid data
            for view, region in corners:
                total[region] += view
                count[region] += 1
            return (total / count).astype(values.dtype)
    best, most = np.zeros(shape, values.dtype), np.zeros(shape, np.int64)
    for view, region in corners:
        votes = np.zeros(view.shape, np.int64)
        for other, other_region in corners:
            both = tuple(slice(min(a.stop, b.stop)) for a, b in zip(region, other_region, strict=True))
            votes[both] += view[both] == other[both]
        better = (votes > most[region]) | ((votes == most[region]) & (view < best[region]))
        best[region] = np.where(better, view, best[region])
        most[region] = np.maximum(votes, most[region])
    return best


def _zarr_metadata(level: ImageLayout) -> dict[str, Any]:
    fill = "NaN" if math.isnan(level.fill) else 0
    return array_metadata(level.shape, level.chunk, level.dtype, fill=fill, separator="/")
