"""Images of all versions of OME-NGFF, as ome-zarr-py wrote and writes them; plates, and N5."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_ome_parts import coordinates, plate_data, set_ome, write_ome_image, write_plate

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.core.types import Span
from penstock.source.stored.source import ZarrSource
from penstock.source.volume.ngff import Axis, Multiscale
from penstock.source.volume.plates import list_images
from penstock.source.volume.source import VolumeArray, VolumeSource


@pytest.mark.parametrize("version", ["0.1", "0.2", "0.3", "0.4", "0.5"])
def test_every_version_gives_the_same_patches(tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture) -> None:
    data = coordinates(2, 3, 4, 16, 20)
    path = write_ome_image(tmp_path / "a.zarr", data, "tczyx", version=version, levels=3)
    with caplog.at_level(logging.WARNING, "penstock"):
        image = Multiscale.read(path)
    assert ["no scale (OME-NGFF before 0.4)" in record.getMessage() for record in caplog.records] == [True] * (
        version < "0.4"
    )
    assert image.axes == tuple(Axis(name, {"t": "time", "c": "channel"}.get(name, "space")) for name in "tczyx")
    assert image.other_axes == {"t": 2, "c": 3}
    assert [level.scale for level in image.levels] == [(1, 1, 1, size, size) for size in (1, 2, 4)]
    assert [level.translation for level in image.levels] == [(0, 0, 0, shift, shift) for shift in (0, 0.5, 1.5)]
    channels = image.channels({"t": 1})
    arrays = {
        "fine": VolumeArray(channels, (2, 4, 4), (1, 1, 1)),
        "coarse": VolumeArray(channels, (2, 2, 2), (1, 2, 2)),
    }
    source = VolumeSource(arrays, pad=False)
    block = source.read(Span(0, len(source.index)))
    for item, centre in enumerate(source.centre_of(np.arange(len(source.index)))):
        z, y, x = (int(first) for first in centre - (0.5, 1.5, 1.5))
        assert np.array_equal(block["fine"][item], data[1, :, z : z + 2, y : y + 4, x : x + 4])
        if y % 2 == x % 2 == 0:  # on the grid of the coarse level
            assert np.array_equal(block["coarse"][item], data[1, :, z : z + 2, y : y + 4 : 2, x : x + 4 : 2])


def test_levels_of_odd_sizes_are_halves_of_each_other_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for number, size in enumerate((15, 7, 3, 0)):
        group.create_array(
            str(number), shape=(1, 1, 2, size, size), chunks=(1, 1, 2, max(1, size), max(1, size)), dtype="u1"
        )
    set_ome(path, {"multiscales": [{"version": "0.2", "datasets": [{"path": str(n)} for n in range(4)]}]}, "0.2")
    image = Multiscale.opened(path)
    assert [level.scale[-1] for level in image.levels] == [1, 2, 4]
    assert {level.scale[2] for level in image.levels} == {1}


def test_paths_of_levels_may_be_numbers(tmp_path: Path) -> None:
    data = coordinates(4, 16, 20)
    path = Path(write_ome_image(tmp_path / "a.zarr", data, "zyx", version="0.3"))
    metadata = json.loads((path / ".zattrs").read_text())
    for number, dataset in enumerate(metadata["multiscales"][0]["datasets"]):
        dataset["path"] = number
    (path / ".zattrs").write_text(json.dumps(metadata))
    assert [level.where for level in Multiscale.opened(path).levels] == [f"{path}/0", f"{path}/1"]
    for wrong in (True, -1.5, None, "../b"):
        metadata["multiscales"][0]["datasets"][0]["path"] = wrong
        (path / ".zattrs").write_text(json.dumps(metadata))
        with pytest.raises(SourceError, match="must lead to an array below the image, got"):
            Multiscale.opened(path)


def test_channels_are_chosen_one_or_several_or_all(tmp_path: Path) -> None:
    path = write_ome_image(tmp_path / "a.zarr", coordinates(2, 3, 4, 16, 20), "tczyx")
    image = Multiscale.read(path)
    cases: dict[Any, list[int]] = {None: [0, 1, 2], 1: [1], (2, 0): [2, 0]}
    for wanted, indices in cases.items():
        at = {"t": 1} if wanted is None else {"t": 1, "c": wanted}
        assert [channel.at for channel in image.channels(at)] == [(("t", 1), ("c", index)) for index in indices]
    for at, said in (
        ({"t": 1, "c": 3}, "must be an index 0–2 for axis 'c' of .*, got 3"),
        ({"t": 1, "c": []}, "at least one channel"),
        ({"t": [0, 1]}, r"must be an index 0–1 for axis 't' of .*, got \[0, 1\]"),
        ({"t": 0, "z": 0}, "must name non-spatial axes"),
    ):
        with pytest.raises(OptionError, match=said):
            image.channels(at)
    with pytest.raises(SourceError, match=r"Axis 't' of .* has length 2; choose an index with at={'t': 0}"):
        image.channels({})
    with pytest.raises(SourceError, match="choose an index"):
        VolumeSource({"a": VolumeArray(image, (2, 4, 4), (1, 1, 1))})  # nothing was chosen


@pytest.mark.parametrize("axes", ["tczyx", "czyx"])
def test_a_source_takes_channels_and_other_indices(tmp_path: Path, axes: str) -> None:
    data = coordinates(2, 3, 4, 16, 20)
    raw = write_ome_image(tmp_path / "raw.zarr", data if axes == "tczyx" else data[1], axes)
    mask = write_ome_image(tmp_path / "mask.zarr", data[0, 0], "zyx")
    time = {"t": 1} if axes == "tczyx" else {}
    cases: dict[Any, list[int]] = {None: [0, 1, 2], 1: [1], (2, 0): [2, 0]}
    for wanted, rows in cases.items():
        at = time if wanted is None else {**time, "c": wanted}
        opened = penstock.open(raw, shape=(2, 4, 4), pad=False, at=at).source
        both = VolumeSource(
            {name: VolumeArray(path, (2, 4, 4), (1, 1, 1)) for name, path in (("image", raw), ("mask", [mask]))},
            at=at,
            pad=False,
        )
        for item in (0, 77):
            z, y, x = (int(first) for first in both.centre_of([item])[0] - (0.5, 1.5, 1.5))
            box = (slice(z, z + 2), slice(y, y + 4), slice(x, x + 4))
            for source in (opened, both):
                assert np.array_equal(source.take(np.array([item]))["image"][0], data[(1, rows, *box)])
            assert np.array_equal(both.take(np.array([item]))["mask"][0, 0], data[(0, 0, *box)])
        # A state is that of one choice of channels.
        assert (
            opened.index.identity
            != penstock.open(raw, shape=(2, 4, 4), pad=False, at=time | {"c": 2}).source.index.identity
        )
    for at, said in (
        (time | {"c": 3}, "must be an index 0–2 for axis 'c' of .*, got 3"),
        (time | {"q": 0}, r"at must name axes of the volumes that are not spatial \((c|c, t)\), got .*'q': 0"),
    ):
        with pytest.raises(OptionError, match=said):
            penstock.open(raw, shape=(2, 4, 4), at=at)
    with pytest.raises(OptionError, match=r"not spatial \(there are none\), got {'c': 0}"):
        penstock.open(mask, shape=(2, 4, 4), at={"c": 0})
    with pytest.raises(SourceError, match=r"Axis 'c' of .* has length 3; choose an index with at={'c': 0}"):
        VolumeSource({"a": VolumeArray([raw, None], (2, 4, 4), (1, 1, 1))}, at=time)  # one volume for each channel


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_images_of_plates_and_wells_are_listed_in_the_order_of_the_metadata(tmp_path: Path, version: str) -> None:
    plate = write_plate(tmp_path / "plate.zarr", wells=("B/2", "A/11"), version=version)
    paths = [f"{plate}/{name}" for name in ("B/2/0", "B/2/1", "A/11/0", "A/11/1")]
    assert list_images(plate) == list_images(f"{plate}/") == paths
    assert list_images(plate, wells=["A/11"]) == list_images(f"{plate}/A/11") == paths[2:]
    assert list_images(paths[1]) == [paths[1]]
    for number, path in enumerate(paths):
        source = VolumeSource({"a": VolumeArray(Multiscale.opened(path, at={"c": 1}), (16, 20), (1, 1))}, pad=False)
        assert np.array_equal(source.read(Span(0, 1))["a"][0, 0], plate_data(number)[1])
    for wells in (["A/1"], "A/11"):
        with pytest.raises(OptionError, match=r"wells must be a list of wells of .*plate.zarr \(B/2, A/11\), got"):
            list_images(plate, wells=wells)
    with pytest.raises(OptionError, match="wells must be None unless"):
        list_images(paths[0], wells=["A/11"])
    with pytest.raises(
        SourceError, match=r"is a plate with 2 wells. Give one of its images, such as .*/B/2/0; .*list_im"
    ):
        Multiscale.opened(plate)
    with pytest.raises(SourceError, match="is a well with 2 images"):
        Multiscale.opened(f"{plate}/A/11")
    for wrong in ({"plate": {"wells": []}}, {"plate": 3}, {"plate": {"wells": [{"path": "../x"}]}}, {"well": {}}):
        set_ome(Path(plate), wrong, version)
        with pytest.raises(SourceError, match=r"plate\.zarr must"):
            list_images(plate)


@pytest.mark.parametrize("listed", [True, False])
def test_images_of_a_file_converted_by_bioformats2raw_are_listed(tmp_path: Path, listed: bool) -> None:
    path = tmp_path / "a.zarr"
    zarr.open_group(path, mode="w", zarr_format=2, attributes={"bioformats2raw.layout": 3})
    names = ["0", "1"]
    if listed:
        names = ["1", "0"]
        zarr.open_group(path / "OME", mode="w", zarr_format=2, attributes={"series": names})
    for number in range(2):
        write_ome_image(path / str(number), coordinates(4, 16, 20) + number, "zyx")
    assert list_images(path) == [f"{path}/{name}" for name in names]
    with pytest.raises(SourceError, match=f"is a file converted by bioformats2raw. Give one of .*{path}/{names[0]}"):
        Multiscale.opened(path)


def test_n5_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("cell.n5", "cell"):
        array = tmp_path / name / "s0"
        array.mkdir(parents=True)
        (tmp_path / name / "attributes.json").write_text(json.dumps({"n5": "2.5.1"}))
        layout = {"dimensions": [4, 4, 4], "blockSize": [4, 4, 4], "dataType": "uint8", "compression": {"type": "raw"}}
        (array / "attributes.json").write_text(json.dumps(layout))
        for open_it in (
            lambda: Multiscale.opened(tmp_path / name),  # noqa: B023
            lambda: Multiscale.plain(array, (1, 1, 1)),  # noqa: B023
            lambda: ZarrSource(array),  # noqa: B023
        ):
            with pytest.raises(
                SourceError, match=r"is stored as N5, which zarr 3 does not read. Copy it to zarr first"
            ):
                open_it()
    with pytest.raises(SourceError, match="is stored as N5"):
        Multiscale.opened("s3://bucket/cell.n5/em")
