"""Patches of volumes: every voxel equals what a plain loop over world coordinates finds.

Scales and translations are binary fractions, and values small, so that both compute without rounding.
"""

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, SourceSuite

from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource

Numbers = Sequence[float]


def encoded(shape: Sequence[int], dtype: str = "u2", offset: int = 0) -> np.ndarray:
    """Return distinct voxels: none is 0, and all are small enough for exact sums of eighths."""
    return (np.arange(1, 1 + math.prod(shape)) + offset).reshape(shape).astype(dtype)


@dataclass(eq=False)
class Image:
    """A stored image, along z, y and x."""

    data: np.ndarray
    scale: Numbers = (1, 1, 1)
    translation: Numbers = (0, 0, 0)
    chunk: Sequence[int] = (3, 2, 4)
    axes: str = "zyx"
    version: str = "0.4"

    def write(self, path: Path) -> str:
        """Write the image with zarr-python, in the order of `axes`; non-spatial axes have length 1."""
        order = [self.axes.index(name) for name in self.axes if name in "zyx"]
        source = ["zyx".index(name) for name in self.axes if name in "zyx"]
        others = [self.axes.index(name) for name in self.axes if name not in "zyx"]
        data = np.expand_dims(self.data.transpose(source), others)
        chunks, scale, shift = [1] * data.ndim, [1.0] * data.ndim, [0.0] * data.ndim
        for stored, axis in zip(order, source, strict=True):
            chunks[stored], scale[stored] = min(self.chunk[axis], data.shape[stored]), float(self.scale[axis])
            shift[stored] = float(self.translation[axis])
        form = 2 if self.version == "0.4" else 3
        transformations = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}]
        image: dict[str, Any] = {
            "axes": [{"name": name, "type": "space" if name in "zyx" else "channel"} for name in self.axes],
            "datasets": [{"path": "s0", "coordinateTransformations": transformations}],
        }
        attributes = {"ome": {"version": "0.5", "multiscales": [image]}} if form == 3 else {"multiscales": [image]}
        zarr.create_group(path, zarr_format=form, attributes=attributes)
        zarr.create_array(path / "s0", data=data, chunks=tuple(chunks), zarr_format=form)
        return str(path)


@dataclass(eq=False)
class Asked:
    """An array requested of one image, along z, y and x."""

    image: Image
    shape: Sequence[int]
    scale: Numbers
    linear: bool = True
    pad_value: float = math.nan

    def array(self, path: str) -> VolumeArray:
        interpolation = "linear" if self.linear else "nearest"
        return VolumeArray(path, self.shape, self.scale, interpolation, self.pad_value)  # type: ignore[arg-type]


# -- the plain loop ----------------------------------------------------------------------------------------------------


def naive_axis(asked: Asked, axis: int, centre: float) -> list[tuple[int, int, float] | None]:
    """Return, for each voxel of a patch, the two stored voxels around it and the weight of the upper one."""
    scale, shift = float(asked.image.scale[axis]), float(asked.image.translation[axis])
    size, n = asked.image.data.shape[axis], asked.shape[axis]
    found: list[tuple[int, int, float] | None] = []
    for i in range(n):
        world = centre + (i - (n - 1) / 2) * float(asked.scale[axis])
        at = (world - shift) / scale
        nearest = math.floor(at + 0.5)
        if not 0 <= nearest < size:
            found.append(None)
        elif not asked.linear:
            found.append((nearest, nearest, 0.0))
        else:
            at = min(max(at, 0.0), float(size - 1))
            lower = math.floor(at)
            found.append((lower, min(lower + 1, size - 1), at - lower))
    return found


def naive_patch(asked: Asked, centre: Sequence[float]) -> np.ndarray:
    """Return a patch, voxel by voxel."""
    out = np.full(asked.shape, asked.pad_value, np.float32)
    axes = [naive_axis(asked, axis, centre[axis]) for axis in range(3)]
    for place in itertools.product(*map(range, asked.shape)):
        taps = [axes[axis][place[axis]] for axis in range(3)]
        if None in taps:
            continue
        total = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            share = math.prod(tap[2] if up else 1 - tap[2] for tap, up in zip(taps, corner, strict=True))
            if share:
                total += share * int(asked.image.data[tuple(t[u] for t, u in zip(taps, corner, strict=True))])
        out[place] = float(total)
    return out


def naive_centres(arrays: Sequence[Asked], pad: bool) -> list[tuple[float, ...]]:
    """Return all centres in the order of items: tile by tile."""
    ladders = []
    for axis in range(3):
        step = max(float(asked.scale[axis]) for asked in arrays)
        first = next(asked for asked in arrays if asked.scale[axis] == step)
        begins, ends = [], []
        for asked in arrays:
            scale = float(asked.image.scale[axis])
            begins.append(float(asked.image.translation[axis]) - scale / 2)
            ends.append(begins[-1] + asked.image.data.shape[axis] * scale)
        anchor = begins[arrays.index(first)] + first.shape[axis] / 2 * step
        halves = [asked.shape[axis] / 2 * float(asked.scale[axis]) for asked in arrays]
        ladder = []
        for k in range(-100, 100):
            centre = anchor + k * step
            fits = all(a <= centre - h and centre + h <= b for a, b, h in zip(begins, ends, halves, strict=True))
            if (max(begins) <= centre < min(ends)) if pad else fits:
                ladder.append(centre)
        ladders.append(ladder)
    finest = min((asked.image for asked in arrays), key=lambda image: math.prod(image.scale))

    def chunk(centre: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(
            math.floor((c - float(shift)) / float(scale) + 0.5) // min(size, extent)
            for c, shift, scale, size, extent in zip(
                centre, finest.translation, finest.scale, finest.chunk, finest.data.shape, strict=True
            )
        )

    centres = list(itertools.product(*ladders))
    layers = [sorted({chunk(centre)[axis] for centre in centres}) for axis in range(3)]

    def along_the_curve(centre: tuple[float, ...]) -> tuple[str, tuple[float, ...]]:
        places = [layer.index(number) for layer, number in zip(layers, chunk(centre), strict=True)]
        bits = [f"{place:020b}" for place in places]
        return "".join("".join(digits) for digits in zip(*bits, strict=True)), centre

    return sorted(centres, key=along_the_curve)


def check_all(source: VolumeSource, arrays: dict[str, Asked], pad: bool, items: Sequence[int]) -> None:
    centres = naive_centres(list(arrays.values()), pad)
    assert source.centre_of(np.arange(len(source.index))).tolist() == [list(at) for at in centres]
    block = source.take(np.array(items))
    for name, asked in arrays.items():
        for row, item in enumerate(items):
            wanted = naive_patch(asked, centres[item])
            assert block[name][row, 0].tobytes() == wanted.tobytes(), f"{name} of item {item}"


# -- any volumes, any patches ------------------------------------------------------------------------------------------


def triples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(strategy, strategy, strategy)


@st.composite
def asked_arrays(draw: st.DrawFn) -> dict[str, Asked]:
    arrays = {}
    for number, name in enumerate(draw(st.sampled_from([["raw"], ["raw", "labels"]]))):
        image = Image(
            encoded(draw(triples(st.integers(2, 7))), offset=400 * number),
            draw(triples(st.sampled_from([1, 2, 4]))),
            draw(triples(st.sampled_from([0, 0, 0.5, 1, -2, 0.25]))),
            draw(triples(st.integers(1, 4))),
            draw(st.sampled_from(["zyx", "xyz", "yxz", "czyx", "xczy"])),
            draw(st.sampled_from(["0.4", "0.5"])),
        )
        shape, scale = draw(triples(st.integers(1, 4))), draw(triples(st.sampled_from([0.5, 1, 2, 3, 4])))
        arrays[name] = Asked(image, shape, scale, draw(st.booleans()), draw(st.sampled_from([math.nan, -7.0])))
    return arrays


@given(arrays=asked_arrays(), pad=st.booleans(), data=st.data())
def test_every_patch_equals_that_of_a_naive_loop(arrays: dict[str, Asked], pad: bool, data: st.DataObject) -> None:
    wanted = naive_centres(list(arrays.values()), pad)
    with tempfile.TemporaryDirectory() as folder:
        specs = {name: asked.array(asked.image.write(Path(folder, name))) for name, asked in arrays.items()}
        if not wanted:
            with pytest.raises(SourceError, match=r"must fit into|none does|must overlap"):
                VolumeSource(specs, pad=pad)
            return
        source = VolumeSource(specs, pad=pad, memory_bytes=data.draw(st.sampled_from([0, 40, 1 << 20])))
        n = len(wanted)
        items = [0, n - 1, *data.draw(st.lists(st.integers(0, n - 1), max_size=4))]
        check_all(source, arrays, pad, items)


def test_all_patches_of_two_arrays_around_one_centre(tmp_path: Path) -> None:
    raw = Asked(Image(encoded((6, 8, 10)), (2, 1, 1), (1, 0.5, 0.5)), (2, 4, 4), (2, 1, 1))
    labels = Asked(Image(encoded((3, 4, 5)), (4, 2, 2), (2, 1, 1), axes="xyz", version="0.5"), (2, 2, 2), (4, 2, 2))
    arrays = {"raw": raw, "labels": labels}
    specs = {name: asked.array(asked.image.write(tmp_path / name)) for name, asked in arrays.items()}
    source = VolumeSource(specs, pad=False)
    assert source.grid_shape == (2, 3, 4)
    check_all(source, arrays, False, range(len(source.index)))
    # Both lie on their voxels, so that all of it is copied.
    z, y, x = source.place_of([0])[0]
    assert source.take(np.array([0]))["labels"][0, 0].tolist() == labels.image.data[:2, :2, :2].tolist()
    assert (z, y, x) == (0, 0, 0)


def test_decimal_scales_copy_voxels_exactly(tmp_path: Path) -> None:
    data = encoded((40, 30, 20), "f4")
    image = Image(data, (3.24, 5.2, 0.1), (1234.56, 0.7, 99.9), (16, 16, 16))
    source = VolumeSource({"raw": VolumeArray(image.write(tmp_path / "a"), (7, 8, 5), (3.24, 5.2, 0.1))}, pad=False)
    assert source.grid_shape == (34, 23, 16)
    items = np.random.default_rng(0).permutation(len(source.index))[:200]
    found = source.take(items)["raw"]
    for row, (z, y, x) in enumerate(source.place_of(items).tolist()):
        assert found[row, 0].tobytes() == data[z : z + 7, y : y + 8, x : x + 5].tobytes()
    assert source.read_report()["bytes_delivered"] == found.nbytes  # and no voxel besides


def test_a_margin_is_read_around_the_same_patch(tmp_path: Path) -> None:
    path = Image(encoded((6, 7, 8))).write(tmp_path / "a")
    array = VolumeArray(path, (2, 3, 2), (1, 1, 1))
    plain, wide = VolumeSource({"raw": array}), VolumeSource({"raw": array}, margin={"raw": (1, 0, 2)})
    assert wide.fields["raw"].shape == (1, 4, 3, 6)
    assert wide.index.digest != plain.index.digest
    assert wide.centre_of(range(len(wide.index))).tolist() == plain.centre_of(range(len(plain.index))).tolist()
    items = np.arange(len(plain.index))
    assert wide.take(items)["raw"][:, :, 1:3, :, 2:4].tobytes() == plain.take(items)["raw"].tobytes()
    inside = VolumeSource({"raw": array}, margin={"raw": (1, 0, 2)}, pad=False)
    assert inside.grid_shape == (3, 5, 3)
    assert not np.isnan(inside.take(np.arange(len(inside.index)))["raw"]).any()


@pytest.mark.parametrize(("axis_order", "cut"), [("zyx", 0), ("yzx", 1), ("xzy", 2)])
def test_two_axes_are_slices_across_the_first(tmp_path: Path, axis_order: str, cut: int) -> None:
    data = encoded((4, 5, 6))
    path = Image(data, (4, 2, 1)).write(tmp_path / "a")
    scale = [size for axis, size in enumerate((4, 2, 1)) if axis != cut]
    source = VolumeSource({"raw": VolumeArray([path, None], (2, 3), scale)}, axis_order=axis_order, pad=False)
    assert source.fields["raw"].shape == (2, 2, 3)
    turned = np.moveaxis(data, cut, 0)
    items = np.arange(len(source.index))
    assert len(items) == turned.shape[0] * (turned.shape[1] - 1) * (turned.shape[2] - 2)
    for (z, y, x), patch in zip(source.place_of(items).tolist(), source.take(items)["raw"], strict=True):
        assert patch[0].tolist() == turned[z, y : y + 2, x : x + 3].tolist()
        assert np.isnan(patch[1]).all()


def test_an_image_of_two_axes_is_one_slice(tmp_path: Path) -> None:
    data = encoded((5, 6))
    zarr.create_array(tmp_path / "a", data=data, chunks=(2, 3))
    image = Multiscale.plain(tmp_path / "a", (2, 1), axes="yx")
    source = VolumeSource({"raw": VolumeArray(image, (3, 2), (2, 1))}, pad=False)
    assert source.grid_shape == (1, 3, 5)
    for (_, y, x), patch in zip(source.place_of(range(15)).tolist(), source.take(np.arange(15))["raw"], strict=True):
        assert patch[0].tolist() == data[y : y + 3, x : x + 2].tolist()
    with pytest.raises(SourceError, match=r"a must have the spatial axes z, y, x .*'raw', z, y, x, but has y, x"):
        VolumeSource({"raw": VolumeArray(image, (1, 3, 2), (1, 2, 1))})


@pytest.mark.parametrize(("stored", "dtype"), [("u8", "u8"), ("u8", "i8"), ("i4", "f8"), ("u1", "f4"), ("?", "u1")])
def test_values_are_cast_and_not_scaled(tmp_path: Path, stored: str, dtype: str) -> None:
    data = encoded((3, 4, 5), stored, 2**53 if stored == "u8" else 100)
    path = Image(data).write(tmp_path / "a")
    source = VolumeSource({"x": VolumeArray(path, (2, 2, 2), (1, 1, 1), "nearest", 0, dtype)}, pad=False)
    items = np.arange(len(source.index))
    for (z, y, x), patch in zip(source.place_of(items).tolist(), source.take(items)["x"], strict=True):
        assert patch[0].dtype == dtype
        assert patch[0].tolist() == data[z : z + 2, y : y + 2, x : x + 2].astype(dtype).tolist()


def test_infinity_and_nan_do_not_spread_to_voxels_with_weight_0(tmp_path: Path) -> None:
    data = encoded((1, 1, 6), "f4")
    data[0, 0, 2], data[0, 0, 4] = np.inf, np.nan
    path = Image(data).write(tmp_path / "a")
    source = VolumeSource({"x": VolumeArray(path, (1, 1, 18), (1, 1, 1 / 3))}, pad=False)
    found = source.take(np.array([0]))["x"][0, 0, 0, 0]
    wanted = [1, 1, 4 / 3, 5 / 3, 2, *[np.inf] * 5, 4, *[np.nan] * 5, 6, 6]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


# -- which centre ------------------------------------------------------------------------------------------------------


def test_points_are_found_at_the_nearest_centre(tmp_path: Path) -> None:
    path = Image(encoded((5, 6, 7)), (2, 1, 4), (10, 0, -3)).write(tmp_path / "a")
    source = VolumeSource({"raw": VolumeArray(path, (3, 2, 3), (2, 1, 4))})
    assert source.bounding_box == source.sampling_box == {"z": (9, 19), "y": (-0.5, 5.5), "x": (-5, 23)}
    assert source.voxel_size == (2, 1, 4)
    items = np.arange(len(source.index))
    assert source.item_at(source.centre_of(items)).tolist() == items.tolist()
    assert source.item_of(source.place_of(items)).tolist() == items.tolist()
    assert source.item_at(source.centre_of(items) + np.array([0.9, -0.4, 1.9])).tolist() == items.tolist()
    places = source.place_of(items)
    up = source.place_of(source.item_at(source.centre_of(items) + np.array([1, 0.5, 2])))
    assert up.tolist() == np.minimum(places + 1, np.array(source.grid_shape) - 1).tolist()
    for point in ([7.5, 0, 0], [10, 6.1, 0], [10, 0, 26]):
        with pytest.raises(ReadError, match="in the sampling box"):
            source.item_at(point)
    with pytest.raises(OptionError, match="three finite coordinates"):
        source.item_at([1, 2])
    with pytest.raises(ReadError, match="three integers, below"):
        source.item_of([0, 0, 7])


class TestSuite(SourceSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> Case:
        tmp_path = tmp_path_factory.mktemp("volumes")
        raw = Asked(Image(encoded((4, 5, 6)), (1, 2, 1)), (2, 3, 2), (1, 2, 1))
        labels = Asked(Image(encoded((3, 5, 6), offset=200), (1, 2, 1), (0.5, 0, 0)), (1, 2, 2), (1, 2, 1), False, -1)
        arrays = {"raw": raw, "labels": labels}
        paths = {name: asked.image.write(tmp_path / name) for name, asked in arrays.items()}
        changed = Image(encoded((4, 5, 6), offset=1), (1, 2, 1)).write(tmp_path / "changed")
        centres = naive_centres(list(arrays.values()), True)
        patches = [{name: naive_patch(asked, at)[None] for name, asked in arrays.items()} for at in centres]

        def make(path: str) -> VolumeSource:
            # A cache that holds some of the chunks.
            return VolumeSource({"raw": raw.array(path), "labels": labels.array(paths["labels"])}, memory_bytes=300)

        return Case(lambda: make(paths["raw"]), patches.__getitem__, len(centres), lambda: make(changed))
