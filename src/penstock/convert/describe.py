"""Say what is in a recording, whatever its format, without reading its values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.convert.content import Content
from penstock.convert.formats import detect_kind
from penstock.convert.inputs.zarr import list_arrays
from penstock.convert.nwb.describe import describe_file
from penstock.core.errors import SourceError
from penstock.files.regular import open_input
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.source.audio.file import AudioFile
from penstock.source.numpy_files import HEAD_BYTES, list_headers
from penstock.source.stored.zarr.store_folder import LocalFolder
from penstock.source.volume.attributes import read_ome
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.plates import describe_collection, list_images

__all__ = ["describe_recording"]

_MAX_IMAGES = 100  # of a plate, whose metadata are read


def describe_recording(path: Path) -> tuple[str, list[Content]]:
    """Return the kind of a recording, and its contents.

    The kind is "nwb", "npy", "npz", "zarr", "audio", or "volume" for an OME-NGFF image, plate or well. Raises
    SourceError if it is none of these.
    """
    kind = detect_kind(path)
    if kind == "nwb":
        return kind, describe_file(path)
    if kind == "audio" and path.is_file():
        return kind, [_describe_sound(path)]
    if kind == "npy":
        return kind, [_describe_npy(path)]
    if kind == "npz":
        return kind, [_describe_header(name, header) for name, header in list_headers(path).items()]
    if kind != "zarr":
        raise SourceError(f"{path} must be one recording (nwb, wav, flac, ogg, mp3, npy, npz or zarr), got a folder.")
    if path.is_dir() and _has_images(path):
        return "volume", list(_describe_images(path))
    return kind, list(_describe_arrays(path))


def _describe_sound(path: Path) -> Content:
    file = AudioFile(path, whole=False)
    try:
        kind, span = f"{file.container} {file.subtype}", (0.0, len(file) / file.rate_hz)
        return Content("", kind, file.stored_shape, file.rate_hz, span=span)
    finally:
        file.close()


def _describe_npy(path: Path) -> Content:
    with open_input(path) as file:
        head = file.read(HEAD_BYTES)
    try:
        return _describe_header("", parse_npy_header(head, path.stat().st_size))
    except ValueError as error:
        raise SourceError(f"{path} is not a valid .npy file: {error}.") from error


def _describe_header(name: str, header: NpyHeader | str) -> Content:
    if isinstance(header, str):
        return Content(name, "array", (), problem=header)
    return Content(name, str(header.dtype), header.shape, problem=_find_problem(header.dtype, header.shape))


def _describe_arrays(path: Path) -> Iterator[Content]:
    for name, array in list_arrays(path):
        unit = array.attrs.get("units", array.attrs.get("unit"))
        shape = tuple(int(size) for size in array.shape)
        unit = unit if isinstance(unit, str) else None
        yield Content(name, str(array.dtype), shape, unit=unit, problem=_find_problem(np.dtype(array.dtype), shape))


def _find_problem(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
    if not shape:
        return "a single value has no rows"
    if not all(shape):
        return "it is empty"
    return "its values have no fixed size" if dtype.hasobject or dtype.kind == "T" else None


def _has_images(path: Path) -> bool:
    try:
        return "multiscales" in read_ome(LocalFolder(path)) or describe_collection(LocalFolder(path)) is not None
    except SourceError:  # an array, or a group without attributes
        return False


def _describe_images(path: Path) -> Iterator[Content]:
    images = list_images(path)
    for image in images[:_MAX_IMAGES]:
        yield from _describe_levels(image, path)
        for name in _list_labels(image):
            yield from _describe_levels(f"{image}/labels/{name}", path)
    if len(images) > _MAX_IMAGES:
        yield Content("…", f"{len(images) - _MAX_IMAGES:,} more images", ())


def _list_labels(image: str) -> list[str]:
    try:
        named = read_ome(LocalFolder(Path(image) / "labels")).get("labels")
    except SourceError:  # it has none
        return []
    return [str(name) for name in named] if isinstance(named, list) else []


def _describe_levels(image: str, path: Path) -> Iterator[Content]:
    try:
        found = Multiscale.read(image)
    except SourceError as error:
        yield Content(str(Path(image).relative_to(path)), "image", (), problem=str(error))
        return
    for level in found.levels:
        size = " × ".join(
            f"{scale:.6g}{f' {axis.unit}' if axis.unit else ''}"
            for axis, scale in zip(found.axes, level.scale, strict=True)
            if axis.kind == "space"
        )
        where = Path(level.where).relative_to(path).as_posix()
        axes = "".join(axis.name for axis in found.axes)
        yield Content(where, f"{axes} {level.array.dtype}", level.shape, unit=size or None)
