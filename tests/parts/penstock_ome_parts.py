"""OME-NGFF images and plates with the metadata, names and chunks that ome-zarr-py writes, written by zarr alone.

Versions 0.1 to 0.3 as ome-zarr-py 0.9 wrote them, 0.4 and 0.5 as 0.18 does.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

KINDS = {"t": "time", "c": "channel"}


def coordinates(*sizes: int) -> NDArray[np.float32]:
    """Return values that say where they lie: two digits for each axis."""
    found = np.zeros(sizes)
    for index in np.indices(sizes):
        found = found * 100 + index
    return found.astype(np.float32)


def write_ome_image(path: Path, data: NDArray[Any], axes: str, *, version: str = "0.4", levels: int = 2) -> str:
    """Write an image of voxels of size 1; each level has every second voxel of the one before along y and x."""
    form = 3 if version == "0.5" else 2
    group = zarr.open_group(path, mode="w", zarr_format=form)
    datasets: list[dict[str, Any]] = []
    for level in range(levels):
        name = f"s{level}" if version >= "0.4" else str(level)
        step = [2**level if axis in "yx" else 1 for axis in axes]
        part = data[
            tuple(slice(None, size // every * every, every) for size, every in zip(data.shape, step, strict=True))
        ]
        separator = (
            {} if form == 3 else {"chunk_key_encoding": {"name": "v2", "separator": "." if version == "0.1" else "/"}}
        )
        stored = group.create_array(name, shape=part.shape, chunks=part.shape, dtype=part.dtype, **separator)
        stored[...] = part
        shift = [(every - 1) / 2 for every in step]
        transformations = [{"type": "scale", "scale": step}, {"type": "translation", "translation": shift}]
        datasets.append({"path": name} | ({"coordinateTransformations": transformations} if version >= "0.4" else {}))
    image: dict[str, Any] = {"datasets": datasets, "name": "/"}
    if version == "0.3":
        image["axes"] = list(axes)
    if version >= "0.4":
        image["axes"] = [{"name": axis, "type": KINDS.get(axis, "space")} for axis in axes]
    set_ome(path, {"multiscales": [image if version == "0.5" else image | {"version": version}]}, version)
    return str(path)


def set_ome(path: Path, metadata: dict[str, Any], version: str) -> None:
    """Set the OME-NGFF metadata of a group."""
    if version == "0.5":
        file = path / "zarr.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"attributes": {"ome": {"version": "0.5"} | metadata}})
        )
    else:
        (path / ".zattrs").write_text(json.dumps(metadata))


def write_plate(path: Path, *, wells: Sequence[str] = ("A/1", "B/2"), fields: int = 2, version: str = "0.4") -> str:
    """Write a plate of images (c, y, x), with labels of nuclei in each; values begin at 1,000,000 times the image."""
    form = 3 if version == "0.5" else 2
    zarr.open_group(path, mode="w", zarr_format=form)
    names = [well.split("/") for well in wells]
    rows, columns = (sorted({name[place] for name in names}) for place in range(2))
    plate = {
        "columns": [{"name": name} for name in columns],
        "rows": [{"name": name} for name in rows],
        "wells": [
            {"path": well, "rowIndex": rows.index(name[0]), "columnIndex": columns.index(name[1])}
            for well, name in zip(wells, names, strict=True)
        ],
        "version": version,
    }
    set_ome(path, {"plate": plate}, version)
    for place, well in enumerate(wells):
        zarr.open_group(path / well, mode="w", zarr_format=form)
        images = {"images": [{"path": str(field)} for field in range(fields)]}
        set_ome(path / well, {"well": images if version == "0.5" else images | {"version": version}}, version)
        for field in range(fields):
            image = path / well / str(field)
            write_ome_image(image, plate_data(place * fields + field), "cyx", version=version)
            nuclei = (np.indices((1, 16, 20)).sum(axis=0) % 3 == 0).astype("u1")
            write_ome_image(image / "labels" / "nuclei", nuclei, "cyx", version=version, levels=1)
    return str(path)


def plate_data(number: int) -> NDArray[np.float32]:
    """Return the values of an image of a plate."""
    data: NDArray[np.float32] = coordinates(3, 16, 20) + np.float32(1_000_000 * number)
    return data
