"""Parsing of OME-NGFF metadata, and errors for wrong metadata."""

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from penstock.core.errors import OptionError, SourceError
from penstock.source.volume.ngff import Axis, Multiscale

ZYX = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]


def scaled(*scale: float) -> dict[str, Any]:
    return {"type": "scale", "scale": list(scale)}


def moved(*translation: float) -> dict[str, Any]:
    return {"type": "translation", "translation": list(translation)}


def pyramid(version: str = "0.4") -> dict[str, Any]:
    """Return a multiscale image of three levels, each half the size of the one before."""
    levels = [
        {"path": f"s{n}", "coordinateTransformations": [scaled(*[4 * 2**n] * 3), moved(*[2 * 2**n - 2] * 3)]}
        for n in range(3)
    ]
    image = {"axes": ZYX, "datasets": levels, "name": "em"}
    return image | {"version": version} if version == "0.4" else image


def write(
    path: Path, image: Any, *, version: str = "0.4", shape: tuple[int, ...] = (8, 8, 8), n_levels: int = 3
) -> Path:
    """Write a group with attributes, and arrays s0, s1 … below it."""
    form = 2 if version == "0.4" else 3
    attributes = {"multiscales": [image]} if form == 2 else {"ome": {"version": version, "multiscales": [image]}}
    zarr.create_group(path, zarr_format=form, attributes=attributes)
    for n in range(n_levels):
        size = tuple(max(1, axis >> n) for axis in shape)
        zarr.create_array(path / f"s{n}", shape=size, chunks=size, dtype="u1", zarr_format=form)
    return path


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_axes_and_levels_are_those_of_the_metadata(tmp_path: Path, version: str) -> None:
    path = write(tmp_path / "a.zarr", pyramid(version), version=version)
    image = Multiscale.opened(path)
    assert image.axes == tuple(Axis(name, "space", "nanometer") for name in "zyx")
    assert image.space == ("z", "y", "x")
    assert [level.where for level in image.levels] == [f"{path}/s{n}" for n in range(3)]
    assert [level.shape for level in image.levels] == [(8, 8, 8), (4, 4, 4), (2, 2, 2)]
    assert [level.scale for level in image.levels] == [(4, 4, 4), (8, 8, 8), (16, 16, 16)]
    assert [level.translation for level in image.levels] == [(0, 0, 0), (2, 2, 2), (6, 6, 6)]
    assert repr(image) == f"Multiscale({str(path)!r}, axes zyx, 3 levels)"
    assert pickle.loads(pickle.dumps(image)) == image


def test_transformations_of_a_level_come_before_those_of_the_image(tmp_path: Path) -> None:
    image = pyramid()
    image["datasets"] = [
        {"path": "s0", "coordinateTransformations": [scaled(1, 2, 4), moved(10, 0, -1)]},
        {"path": "s1", "coordinateTransformations": [{"type": "identity"}, moved(1, 1, 1), scaled(2, 2, 2)]},
        {"path": "s2", "coordinateTransformations": [{"type": "identity"}]},
    ]
    image["coordinateTransformations"] = [scaled(10, 10, 100), moved(1, 2, 3), {"type": "identity"}]
    levels = Multiscale.opened(write(tmp_path / "a", image)).levels
    assert [level.scale for level in levels] == [(10, 20, 400), (20, 20, 200), (10, 10, 100)]
    assert [level.translation for level in levels] == [(101, 2, -97), (21, 22, 203), (1, 2, 3)]


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({"z": 4, "y": 4, "x": 4}, 0),
        ({"z": 8, "y": 8, "x": 8}, 1),
        ({"z": 15.99, "y": 15.99, "x": 15.99}, 1),
        ({"z": 15.9999999, "y": 16, "x": 16}, 2),
        ({"z": 1000, "y": 1000, "x": 8}, 1),
        ({"z": 4, "y": 1000, "x": 1000}, 0),
        ({"y": 16, "x": 16}, 2),
    ],
)
def test_the_coarsest_level_that_is_fine_enough_is_used(
    tmp_path: Path, asked: dict[str, float], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    image = Multiscale.opened(write(tmp_path / "a", pyramid()))
    with caplog.at_level(logging.INFO, "penstock"):
        assert image.level_for(asked) is image.levels[level]
    assert not caplog.records


def test_the_finest_level_is_used_if_none_is_fine_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = pyramid()
    image["datasets"].reverse()
    found = Multiscale.opened(write(tmp_path / "a", image))
    with caplog.at_level(logging.INFO, "penstock"):
        assert found.level_for({"z": 8, "y": 3, "x": 8}).where.endswith("/s0")
    assert "has no level as fine as {'z': 8, 'y': 3, 'x': 8}" in caplog.text
    with pytest.raises(SourceError, match=r"spatial axes of .* \(z, y, x\), got \['w'\]"):
        found.level_for({"w": 1})


def test_one_index_is_chosen_on_non_spatial_axes(tmp_path: Path) -> None:
    image = pyramid()
    image["axes"] = [{"name": "t", "type": "time"}, {"name": "c"}, *ZYX]
    image["datasets"] = [{"path": "s0", "coordinateTransformations": [scaled(1, 1, 4, 4, 4)]}]
    path = write(tmp_path / "a", image, shape=(1, 3, 8, 8, 8), n_levels=1)
    assert Multiscale.opened(path, at={"c": 2}).at == (("t", 0), ("c", 2))
    assert Multiscale.opened(path, at={"c": 2}).space == ("z", "y", "x")
    with pytest.raises(SourceError, match=rf"Axis 'c' of {path} has length 3; choose an index with at={{'c': 0}}"):
        Multiscale.opened(path)
    for at in ({"c": 3}, {"c": -1}, {"c": True}, {"c": 0, "t": 1}):
        with pytest.raises(OptionError, match=f"index 0–.* of {path}"):
            Multiscale.opened(path, at=at)
    with pytest.raises(OptionError, match=r"must name non-spatial axes of .* \(\['c', 't'\]\), got \{'z': 0"):
        Multiscale.opened(path, at={"z": 0, "c": 0})


def test_an_array_without_metadata_is_opened_with_a_given_scale(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=(2, 3, 4, 5), chunks=(1, 3, 4, 5), dtype="f4")
    image = Multiscale.plain(tmp_path / "a", (1, 8, 4, 4.5), translation=[0, 1, 2, -3], axes="cxyz", at={"c": 1})
    assert (image.space, image.at) == (("x", "y", "z"), (("c", 1),))
    assert image.level_for({"x": 8, "y": 4, "z": 5}).translation == (0, 1, 2, -3)
    np.save(tmp_path / "b.npy", np.zeros((3, 4, 5)))
    assert Multiscale.plain(tmp_path / "b.npy", np.array([1, 2, 3])).levels[0].scale == (1, 2, 3)
    for wrong in ((1, 2), (1, 2, 3, 0), (1, 2, 3, float("nan")), "1234", None, (1, 2, 3, True)):
        with pytest.raises(SourceError, match=r"The scale of .*a must be 4 positive numbers, got"):
            Multiscale.plain(tmp_path / "a", wrong, axes="cxyz")  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"a must have the 3 axes \['z', 'y', 'x'\], got shape \(2, 3, 4, 5\)"):
        Multiscale.plain(tmp_path / "a", (1, 1, 1))
    with pytest.raises(SourceError, match=r"No array at .*nowhere"):
        Multiscale.plain(tmp_path / "nowhere", (1, 1, 1))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_url_gives_the_same_image_as_its_path(tmp_path: Path, version: str) -> None:
    path = write(tmp_path / "a.zarr", pyramid(version), version=version)
    image, wanted = Multiscale.opened(f"file://{path}"), Multiscale.opened(path)
    assert image.axes == wanted.axes
    for found, level in zip(image.levels, wanted.levels, strict=True):
        assert (found.shape, found.scale, found.translation) == (level.shape, level.scale, level.translation)
        assert found.array.chunk_shape == level.array.chunk_shape
    with pytest.raises(OptionError, match=r"file://.*/nowhere has no OME-NGFF metadata"):
        Multiscale.opened(f"file://{tmp_path}/nowhere")


# -- metadata that are wrong -------------------------------------------------------------------------------------------


def first_level(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda image: change(image["datasets"][0])


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no axes": (lambda image: image.pop("axes"), "must be a list of at least one axis, got None"),
    "axes of nothing": (lambda image: image.update(axes=[]), "must be a list of at least one axis"),
    "an axis without a name": (
        lambda image: image.update(axes=[{"type": "space"}, *ZYX]),
        "Each axis .* must have a name",
    ),
    "an axis that is a number": (lambda image: image.update(axes=[3, *ZYX]), "Each axis .* must have a name, got 3"),
    "an axis twice": (
        lambda image: image.update(axes=[*ZYX[:2], ZYX[0]]),
        r"must have different names, .*got \['z', 'y', 'z'\]",
    ),
    "too few axes": (
        lambda image: image.update(axes=ZYX[:2]),
        "The scale of .* must be 2 positive numbers",
    ),
    "no axis of space": (lambda image: image.update(axes=["t", "c"]), "at least one must be spatial"),
    "no levels": (lambda image: image.update(datasets=[]), "must have at least one level"),
    "levels that are none": (
        lambda image: image.update(datasets=3),
        "must have at least one level in 'datasets', got 3",
    ),
    "a level that is none": (
        lambda image: image.update(datasets=["s0"]),
        "must lead to an array below the image, got None",
    ),
    "a path elsewhere": (first_level(lambda level: level.update(path="../b/s0")), r"below the image, got '\.\./b/s0'"),
    "an absolute path": (first_level(lambda level: level.update(path="/etc")), "below the image, got '/etc'"),
    "a level that is not there": (
        first_level(lambda level: level.update(path="s9")),
        "Could not open level 's9' of ",
    ),
    "a level without transformations": (
        first_level(lambda level: level.pop("coordinateTransformations")),
        "level 's0' of .* must have a scale",
    ),
    "a level without scale": (
        first_level(lambda level: level.update(coordinateTransformations=[moved(1, 1, 1)])),
        "level 's0' of .* must have a scale",
    ),
    "an unknown transformation": (
        first_level(lambda level: level["coordinateTransformations"].append({"type": "affine", "affine": [[1]]})),
        "transformation of level 's0' .* must be one of 'scale', 'translation', 'identity', got .*affine",
    ),
    "a transformation that is none": (
        first_level(lambda level: level.update(coordinateTransformations=["scale"])),
        "must be one of .*, got 'scale'",
    ),
    "transformations that are none": (
        first_level(lambda level: level.update(coordinateTransformations={"type": "scale"})),
        "must be a list",
    ),
    "a scale in a file": (
        first_level(lambda level: level.update(coordinateTransformations=[{"type": "scale", "path": "numbers"}])),
        "The scale of .* must be 3 positive numbers, got None",
    ),
    "a scale of 0": (
        first_level(lambda level: level.update(coordinateTransformations=[scaled(0, 1, 1)])),
        r"must be 3 positive numbers, got \[0, 1, 1\]",
    ),
    "a huge translation": (
        first_level(lambda level: level["coordinateTransformations"].append(moved(10**400, 0, 0))),
        "The translation of .* must be 3 numbers",
    ),
    "a translation of words": (
        first_level(lambda level: level["coordinateTransformations"].append(moved("a", "b", "c"))),  # type: ignore[arg-type]
        "The translation of .* must be 3 numbers",
    ),
    "an image's wrong transformation": (
        lambda image: image.update(coordinateTransformations=[{"type": "rotation"}]),
        "transformation of the image .*rotation",
    ),
    "an unknown version": (lambda image: image.update(version="0.10"), r"version 0\.1 to 0\.5, got '0\.10'"),
    "a later version": (lambda image: image.update(version="0.6.dev1"), r"got '0\.6\.dev1'"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ngff") / "a.zarr", pyramid())


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_metadata_are_named(right: Path, tmp_path: Path, wrong: str) -> None:
    change, message = WRONG[wrong]
    path = shutil.copytree(right, tmp_path / "a.zarr")
    image = pyramid()
    change(image)
    (path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    with pytest.raises(SourceError, match=message) as caught:
        Multiscale.opened(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        "3",
        "null",
        "{}",
        '{"multiscales": []}',
        '{"multiscales": [3]}',
        '{"ome": 7}',
        "[" * 99_999,
        "\xff",
    ],
)
@pytest.mark.parametrize("name", [".zattrs", "zarr.json"])
def test_attributes_that_hold_no_image_are_named(tmp_path: Path, name: str, content: str) -> None:
    if name == "zarr.json" and content.startswith("{") and content.endswith("}"):
        content = f'{{"zarr_format": 3, "node_type": "group", "attributes": {content}}}'
    (tmp_path / name).write_text(content, "latin-1")
    with pytest.raises(
        SourceError, match=f"{tmp_path}.*(must be an OME-NGFF image|must hold the attributes of a zarr group)"
    ):
        Multiscale.opened(tmp_path)


def test_a_path_without_an_image_is_named(right: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"No volume at {tmp_path}/nowhere: the path does not exist"):
        Multiscale.opened(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=f"{tmp_path} has no OME-NGFF metadata: it has neither zarr.json nor .zattrs"):
        Multiscale.opened(tmp_path)
    with pytest.raises(SourceError, match=f"{right}/s0 must be an OME-NGFF image, .* as Multiscale.plain"):
        Multiscale.opened(right / "s0")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="file has no OME-NGFF metadata"):
        Multiscale.opened(tmp_path / "file")
