"""Spatial changes against marked voxels, NumPy's permutations, SciPy, and loops over single voxels."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.transform import Rotation

from penstock.core.seeds import generator_for
from penstock.transform.spatial.spatial import Spatial


def rng(number: int = 0) -> np.random.Generator:
    return generator_for(3, "augment", 0, number)


def rotate_by(**degrees: float) -> dict[str, Any]:
    return {"rotate": {"axes": {axis: [angle, angle] for axis, angle in degrees.items()}}}


def source_index(matrix: np.ndarray, spec: Any, shape_in: Any, voxel: Any) -> list[float]:
    shape, scale = np.array(spec[0]), np.array(spec[1], float)
    offset = (np.array(voxel) - (shape - 1) / 2) * scale
    place = matrix @ offset / scale + (np.array(shape_in) - 1) / 2
    return [round(x) if abs(x - round(x)) < 1e-9 else float(x) for x in place]


def at(values: np.ndarray, index: Any, pad: float) -> float:
    inside = all(0 <= i < n for i, n in zip(index, values.shape, strict=True))
    return float(values[tuple(index)]) if inside else pad


def linear_at(values: np.ndarray, place: list[float], pad: float) -> float:
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(place)):
        weight = math.prod(
            (x - math.floor(x)) if c else 1 - (x - math.floor(x)) for x, c in zip(place, corner, strict=True)
        )
        if weight:
            total += weight * at(values, [math.floor(x) + c for x, c in zip(place, corner, strict=True)], pad)
    return total


def nearest_at(values: np.ndarray, place: list[float], pad: float) -> list[float]:
    """What may come out: the nearest voxel; either one, in the middle between two."""
    near = [{math.floor(x + 0.5 - 1e-6), math.floor(x + 0.5 + 1e-6)} for x in place]
    return [at(values, index, pad) for index in itertools.product(*near)]


# -- single voxels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "degrees", "before", "after"),
    [
        # (z, y, x) of the marked voxel, from the centre
        ("z", 90, (1, 0, 2), (1, 2, 0)),
        ("z", 90, (1, 2, 0), (1, 0, -2)),
        ("z", -90, (0, 0, 2), (0, -2, 0)),
        ("x", 90, (0, 2, 1), (2, 0, 1)),
        ("y", 90, (2, 1, 0), (0, 1, 2)),
        ("z", 180, (2, 1, -2), (2, -1, 2)),
        ("y", 270, (0, 0, 2), (2, 0, 0)),
        ("x", -450, (2, 0, -1), (0, 2, -1)),
    ],
)
@pytest.mark.parametrize("axis_order", ["zyx", "xyz", "yzx"])
def test_a_marked_voxel_goes_where_a_right_handed_turn_sends_it(
    about: str, degrees: float, before: Any, after: Any, axis_order: str
) -> None:
    def index(offset: Any) -> tuple[int, ...]:
        named = dict(zip("zyx", offset, strict=True))
        return tuple(2 + named[axis] for axis in axis_order)

    item = {"raw": np.zeros((1, 5, 5, 5))}
    item["raw"][(0, *index(before))] = 1.0
    made = Spatial(rotate_by(**{about: degrees}), {"raw": ((5, 5, 5), (4, 4, 4))}, axis_order)(item, rng())["raw"]
    assert np.argwhere(made).tolist() == [[0, *index(after)]]
    assert made[(0, *index(after))] == 1.0


def test_turns_about_several_axes_follow_each_other_from_x_to_z() -> None:
    item = {"raw": np.zeros((1, 5, 5, 5))}
    item["raw"][0, 2, 3, 2] = 1.0  # +y goes to +z about x, to +x about y, to +y about z
    spatial = Spatial(rotate_by(z=90, x=90, y=90), {"raw": ((5, 5, 5), (1, 1, 1))})
    assert np.argwhere(spatial(item, rng())["raw"]).tolist() == [[0, 2, 3, 2]]
    spatial = Spatial(rotate_by(z=90, x=90), {"raw": ((5, 5, 5), (1, 1, 1))})
    assert np.argwhere(spatial(item, rng())["raw"]).tolist() == [[0, 3, 2, 2]]


def test_mirroring_comes_first_then_transposing_then_turning() -> None:
    values = np.arange(27.0).reshape(1, 3, 3, 3)
    options = {"mirror": {"axes": {"x": 1.0}}, "transpose": {"axes": ["x", "y"]}, **rotate_by(z=90)}
    seen = set()
    for number in range(20):
        made = Spatial(options, {"raw": ((3, 3, 3), (1, 1, 1))})({"raw": values}, rng(number))["raw"]
        seen.add(made.tobytes())
    mirrored = values[..., ::-1]
    expected = [np.rot90(each, axes=(-1, -2)).tobytes() for each in (mirrored, mirrored.swapaxes(-1, -2))]
    assert seen == set(expected)


# -- exact permutations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "how"), [("f4", "linear"), ("f4", "nearest"), ("u1", "linear"), ("i8", "nearest")])
def test_mirrors_and_transposes_are_the_whole_group_of_the_cube_to_the_last_bit(dtype: str, how: str) -> None:
    values = np.arange(2 * 27).reshape(2, 3, 3, 3).astype(dtype)
    if dtype == "f4":
        values.view("u4")[0, 0, 1, 2] = 0x7FC01234  # a NaN with a payload: no arithmetic may touch it
        values[1, 2, 2, 0] = -0.0
    options = {"mirror": {"axes": dict.fromkeys("xyz", 0.5)}, "transpose": {"axes": ["z", "x", "y"]}}
    spatial = Spatial(options, {"raw": ((3, 3, 3), (4, 4, 4), how, 0)})
    seen = [spatial({"raw": values}, rng(number))["raw"].tobytes() for number in range(700)]
    group = {
        np.flip(values.transpose(0, *(1 + np.array(order))), flipped).tobytes()
        for order in itertools.permutations(range(3))
        for flipped in itertools.chain.from_iterable(itertools.combinations((1, 2, 3), n) for n in range(4))
    }
    assert len(group) == 48
    assert set(seen) == group
    counts = np.array([seen.count(each) for each in group])
    assert np.abs(counts - 700 / 48).max() < 5 * np.sqrt(700 / 48)


@pytest.mark.parametrize("quarters", [-3, -2, -1, 1, 2, 3, 4, 7])
@pytest.mark.parametrize(("about", "plane"), [("z", (-1, -2)), ("y", (-3, -1)), ("x", (-2, -3))])
@pytest.mark.parametrize("size", [4, 5])
def test_quarter_turns_are_what_numpy_rotates(quarters: int, about: str, plane: Any, size: int) -> None:
    values = np.arange(2.0 * size**3).reshape(2, size, size, size)
    values[0, 1, 2, 3] = np.nan
    scale = tuple(3.3 if axis - 3 in plane else 7.7 for axis in range(3))
    spatial = Spatial(rotate_by(**{about: 90.0 * quarters}), {"raw": ((size,) * 3, scale)})
    assert spatial.margins() == {"raw": (0, 0, 0)}
    made = spatial({"raw": values}, rng())["raw"]
    assert made.tobytes() == np.rot90(values, quarters, plane).tobytes()
    assert made.flags.c_contiguous


def test_axes_of_unequal_extent_are_transposed_out_of_the_margin() -> None:
    spatial = Spatial({"transpose": {"axes": ["x", "y"]}}, {"raw": ((2, 3, 7), (8, 4, 4))})
    assert spatial.margins() == {"raw": (0, 2, 0)}
    whole = np.arange(2 * 7 * 7, dtype=np.int32).reshape(1, 2, 7, 7)  # of whole numbers, pad value NaN: never needed
    expected = {whole[:, :, 2:5].tobytes(), whole.swapaxes(-1, -2)[:, :, 2:5].tobytes()}
    assert {spatial({"raw": whole}, rng(number))["raw"].tobytes() for number in range(20)} == expected
    without = {"raw": np.array(whole[:, :, 2:5], float)}
    padded = np.full((1, 2, 7, 7), np.nan)
    padded[:, :, 2:5] = without["raw"]
    expected = {padded[:, :, 2:5].tobytes(), padded.swapaxes(-1, -2)[:, :, 2:5].tobytes()}
    assert {spatial(without, rng(number))["raw"].tobytes() for number in range(20)} == expected


def test_an_unchanged_array_is_the_same_object_and_a_margin_is_cut_off() -> None:
    spatial = Spatial({"mirror": {"axes": {"x": 0.0}}}, {"raw": ((2, 2, 2), (1, 1, 1))})
    item = {"raw": np.arange(8.0).reshape(2, 2, 2), "name": object()}
    made = spatial(item, rng())
    assert made["raw"] is item["raw"]
    assert made["name"] is item["name"]
    wide = np.arange(3.0 * 6 * 4 * 2).reshape(3, 6, 4, 2)
    made = spatial({"raw": wide}, rng())
    assert np.array_equal(made["raw"], wide[:, 2:4, 1:3])
    assert not np.shares_memory(made["raw"], wide)
    assert Spatial(None, {"raw": ((2, 2, 2), (1, 1, 1))})({"raw": wide}, rng())["raw"].shape == (3, 2, 2, 2)
    turn = Spatial(rotate_by(z=30), {"raw": ((2, 2, 2), (1, 1, 1))})
    assert turn({"raw": np.empty((3, 0, 2, 2, 2))}, rng())["raw"].shape == (3, 0, 2, 2, 2)


# -- interpolation -----------------------------------------------------------------------------------------------------


@given(
    angles=st.fixed_dictionaries({axis: st.sampled_from([0, 17.5, 45, 90, -123.4, 180]) for axis in "xyz"}),
    mirrored=st.sets(st.sampled_from("xyz")),
    transposed=st.sampled_from([(), ("x", "y"), ("x", "y", "z")]),
    shape=st.tuples(*[st.integers(1, 4)] * 3),
    margin=st.tuples(*[st.integers(0, 2)] * 3),
    scale=st.sampled_from([(4, 4, 4), (8, 4, 4), (5, 2.5, 3)]),
    number=st.integers(0, 99),
)
def test_every_voxel_is_what_a_loop_over_voxels_finds(
    *,
    angles: dict[str, float],
    mirrored: set[str],
    transposed: tuple[str, ...],
    shape: tuple[int, ...],
    margin: tuple[int, ...],
    scale: Any,
    number: int,
) -> None:
    arrays = {"raw": (shape, scale, "linear", 1e4), "labels": ((2, 1, 3), (16, 8, 5), "nearest", -1)}
    options: dict[str, Any] = {"mirror": {"axes": dict.fromkeys(mirrored, 1.0)}, **rotate_by(**angles)}
    if transposed:
        options["transpose"] = {"axes": list(transposed)}
    spatial = Spatial(options, arrays)
    change = spatial.change(rng(number))
    # The matrix, by scipy and in (x, y, z): one of those that the transposition may be.
    rotation = Rotation.from_euler("xyz", [angles[axis] for axis in "xyz"], degrees=True).as_matrix()
    flips = np.diag([-1.0 if axis in mirrored else 1.0 for axis in "xyz"])
    possible = []
    for to in itertools.permutations(transposed):
        moves = dict(zip(transposed, to, strict=True))
        swap = np.array([[float(moves.get(column, column) == row) for column in "xyz"] for row in "xyz"])
        possible.append((rotation @ swap @ flips).T[::-1, ::-1])
    matrix = min(possible, key=lambda each: np.abs(each - change).max())
    assert np.abs(matrix - change).max() < 1e-12

    item = {}
    for name, (size, *_) in arrays.items():
        shape_in = [n + 2 * m for n, m in zip(size, margin, strict=True)]
        item[name] = np.arange(2.0 * math.prod(shape_in)).reshape(2, *shape_in)
    made = spatial.apply(item, change)
    for name, spec in arrays.items():
        values = item[name]
        assert made[name].shape == (2, *spec[0])
        for voxel in np.ndindex(*spec[0]):
            place = source_index(matrix, spec, values.shape[1:], voxel)
            for channel in range(2):
                found = made[name][(channel, *voxel)]
                if spec[2] == "linear":
                    assert found == pytest.approx(linear_at(values[channel], place, spec[3]), abs=1e-6, rel=1e-9)
                else:
                    assert found in nearest_at(values[channel], place, spec[3])


@pytest.mark.parametrize(("how", "order"), [("linear", 1), ("nearest", 0)])
@pytest.mark.parametrize("pad", [0.0, -7.5])
def test_turns_are_what_scipy_makes_of_them(how: str, order: int, pad: float) -> None:
    shape, scale = (7, 70, 80), np.array([80.0, 8.0, 11.0])  # more voxels than are worked on at a time
    spatial = Spatial(rotate_by(x=20, y=-35, z=71), {"raw": (shape, tuple(scale), how, pad)})
    change = spatial.change(rng(5))
    values = rng().random((9, 74, 80))
    offsets = [(np.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, scale, strict=True)]
    grid = np.stack(np.meshgrid(*offsets, indexing="ij"))
    places = np.einsum("ij,jzyx->izyx", change, grid)
    places = places / scale[:, None, None, None] + (np.array(values.shape)[:, None, None, None] - 1) / 2
    expected = ndimage.map_coordinates(values, places, order=order, mode="grid-constant", cval=pad)
    assert np.abs(spatial.apply({"raw": values}, change)["raw"] - expected).max() < 1e-12


def test_unknown_labels_stay_unknown_and_do_not_spread() -> None:
    labels = np.zeros((9, 9, 9))
    labels[4, 4, 4] = np.nan
    arrays = {"labels": ((9, 9, 9), (4, 4, 4), "nearest", 0), "raw": ((9, 9, 9), (4, 4, 4), "linear", 0)}
    made = Spatial(rotate_by(z=30, x=10), arrays)({"labels": labels, "raw": labels}, rng())
    assert np.argwhere(np.isnan(made["labels"])).tolist() == [[4, 4, 4]]
    # Linearly: the voxels with a neighbour of some weight, and no others; the centre has none but itself.
    unknown = np.isnan(made["raw"])
    change = Spatial(rotate_by(z=30, x=10), arrays).change(rng())
    for voxel in np.ndindex(9, 9, 9):
        place = source_index(change, arrays["raw"], (9, 9, 9), voxel)
        assert unknown[voxel] == (np.abs(np.array(place) - 4).max() < 1)


def test_a_turn_about_z_spreads_nothing_along_z_and_infinities_stay() -> None:
    values = np.arange(5.0**3).reshape(5, 5, 5)
    values[2], values[0, 2, 2], values[4, 2, 2] = np.nan, np.inf, -np.inf
    made = Spatial(rotate_by(z=37), {"raw": ((5, 5, 5), (8, 4, 4), "linear", 0)})({"raw": values}, rng())["raw"]
    assert np.isnan(made[2, 1:4, 1:4]).all()
    assert np.isfinite(made[[1, 3]]).all()
    assert made[0, 2, 2] == np.inf
    assert made[4, 2, 2] == -np.inf


@pytest.mark.parametrize("beside", [np.nan, np.inf])
def test_voxels_of_weight_zero_do_not_spread(beside: float) -> None:
    values = np.arange(25.0).reshape(1, 5, 5)
    values[0, 2, 3] = beside
    made = Spatial(rotate_by(z=45), {"raw": ((1, 5, 5), (4, 4, 4), "linear", 0)})({"raw": values}, rng())["raw"]
    assert made[0, 2, 2] == 12  # falls on a voxel, while voxels around it do not
    assert np.argwhere(~np.isfinite(made[0])).tolist() == [[2, 3], [3, 2], [3, 3]]  # it went to (0.7, 0.7) of these


def test_places_within_rounding_of_a_voxel_have_its_value() -> None:
    values = np.arange(5.0 * 5 * 7).reshape(5, 5, 7)
    values[2, 3, 3] = np.nan
    arrays = {"raw": ((5, 5, 7), (4, 4, 4))}
    for sign, angle in itertools.product((1, -1), (3, 8, 12, 35)):  # sin² + cos² is not 1, to the last bit
        exact = Spatial(rotate_by(y=90 * sign), arrays)({"raw": values}, rng())["raw"]
        # The same turn, by way of others; along x, two voxels are missing at either end.
        rounded = Spatial(rotate_by(x=angle, y=90 * sign, z=angle * sign), arrays)({"raw": values}, rng())["raw"]
        assert np.argwhere(np.isnan(exact).all((0, 1))).ravel().tolist() == [0, 6]
        assert np.allclose(rounded, exact, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i2"])
def test_linear_values_stay_between_their_neighbours_and_integers_are_rounded(dtype: str) -> None:
    values = (rng().random((1, 12, 12, 12)) * 200).astype(dtype)
    arrays = {"raw": ((6, 6, 6), (4, 4, 4), "linear", 0)}
    spatial = Spatial(rotate_by(z=33, x=12), arrays)
    change = spatial.change(rng())
    made = spatial.apply({"raw": values}, change)["raw"]
    doubles = spatial.apply({"raw": values.astype("f8")}, change)["raw"]
    assert made.dtype == values.dtype
    assert np.array_equal(made, (np.rint(doubles) if dtype in ("u1", "i2") else doubles).astype(dtype))
    flat = np.full((12, 12, 12), 0.1, dtype) if dtype[0] == "f" else np.full((12, 12, 12), 77, dtype)
    assert np.ptp(spatial.apply({"raw": flat}, change)["raw"].astype("f8")) < 1e-15
