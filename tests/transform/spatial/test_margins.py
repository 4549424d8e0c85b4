"""Margins that spatial changes need, and alignment of an image and its labels."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.core.seeds import generator_for
from penstock.transform.compose import Compose
from penstock.transform.noise import GaussianNoise
from penstock.transform.spatial.spatial import Spatial

SEVERAL = {
    "raw": ((4, 7, 10), (8, 4, 4), "linear", np.nan),
    "coarse": ((3, 4, 4), (16, 16, 16), "linear", np.nan),
    "labels": ((5, 6, 5), (8, 8, 8), "nearest", np.nan),
}
EVERYTHING = {
    "mirror": {"axes": {"x": 0.5, "y": 0.5, "z": 0.5}},
    "transpose": {"axes": ["x", "y", "z"]},
    "rotate": {"axes": {"x": [-20, 70], "y": [0, 10], "z": [-180, 180]}},
}

PINNED = [[-0.537412, 0.790744, 0.293108], [-0.143208, -0.428088, 0.892319], [0.831071, 0.437567, 0.3433]]


def rng(number: int = 0) -> np.random.Generator:
    return generator_for(4, "augment", 0, number)


def offsets(shape: Any, scale: Any) -> np.ndarray:
    """World coordinates of every voxel from the centre, as channels."""
    along = [(np.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, scale, strict=True)]
    return np.stack(np.meshgrid(*along, indexing="ij"))


def coordinates(spatial: Spatial, *, less: int = 0) -> dict[str, np.ndarray]:
    """An item whose voxels hold their own world coordinates, with its margin, less some voxels where there is one."""
    item = {}
    for name, margin in spatial.margins().items():
        shape, scale = spatial.arrays[name][:2]
        item[name] = offsets([n + 2 * max(0, m - less) for n, m in zip(shape, margin, strict=True)], scale)
    return item


def extremes(spatial: Spatial, options: dict[str, Any]) -> list[np.ndarray]:
    """Changes at the ends of every range and in between."""
    changes = []
    ranges = options.get("rotate", {"axes": {}})["axes"]
    steps = 7 if len(ranges) == 1 else 4
    for angles in itertools.product(*(np.linspace(low, high, steps) for low, high in ranges.values())):
        fixed = {axis: [angle, angle] for axis, angle in zip(ranges, angles, strict=True)}
        turned = Spatial({**options, "rotate": {"axes": fixed}}, spatial.arrays)
        changes += [turned.change(rng(number)) for number in range(3)]
    return changes


@pytest.mark.parametrize(
    "options",
    [
        {"transpose": {"axes": ["x", "z"]}},
        {"rotate": {"axes": {"z": [-45, 45]}}},
        {"rotate": {"axes": {"z": [0, 13]}}},
        {"rotate": {"axes": {"y": [80, 100]}}, "mirror": {"axes": {"z": 0.5}}},
        {"rotate": {"axes": {"x": [-10, 30], "z": [170, 200]}}, "transpose": {"axes": ["y", "z"]}},
        EVERYTHING,
    ],
    ids=["transpose", "turn", "little-turn", "quarter-turn", "two-turns", "everything"],
)
def test_with_the_margin_every_output_voxel_comes_from_the_input(options: dict[str, Any]) -> None:
    spatial = Spatial(options, SEVERAL)
    item = coordinates(spatial)
    for change in extremes(spatial, options)[:: 5 if options is EVERYTHING else 1]:
        made = spatial.apply(item, change)
        for name, values in made.items():
            array = spatial.arrays[name]
            assert values.shape == (3, *array.shape)
            at = offsets(array.shape, array.scale)
            expected = np.einsum("ij,jzyx->izyx", change, at)
            if array.interpolation == "linear":  # coordinates are linear: interpolated exactly
                assert np.abs(values - expected).max() < 1e-9
            else:
                assert (np.abs(values - expected) <= np.reshape(array.scale, (3, 1, 1, 1)) / 2 + 1e-9).all()


@pytest.mark.parametrize(
    "options",
    [
        {"transpose": {"axes": ["x", "z"]}},
        {"rotate": {"axes": {"z": [-45, 45]}}},
        {"rotate": {"axes": {"x": [0, 20]}}},
        {"rotate": {"axes": {"y": [85, 90]}}},
    ],
)
def test_the_margin_of_one_rotation_is_minimal(options: dict[str, Any]) -> None:
    spatial = Spatial(options, {"raw": SEVERAL["raw"]})
    (margin,) = spatial.margins().values()
    assert max(margin) > 0
    for axis in [axis for axis in range(3) if margin[axis]]:
        whole = coordinates(spatial)["raw"]
        less = whole[(slice(None), *(slice(1, -1) if each == axis else slice(None) for each in range(3)))]
        found = [spatial.apply({"raw": less}, change)["raw"] for change in extremes(spatial, options)]
        assert any(np.isnan(values).any() for values in found), axis


def test_margins_of_known_changes() -> None:
    one = {"raw": ((1, 65, 65), (1, 1, 1))}
    assert Spatial({"rotate": {"axes": {"z": [0, 45]}}}, one).margins() == {"raw": (0, 14, 14)}  # 32 (√2 - 1) = 13.3
    assert Spatial({"rotate": {"axes": {"z": [100, 130]}}}, one).margins() == {"raw": (0, 13 + 1, 13 + 1)}
    assert Spatial({"rotate": {"axes": {"z": [-60, -30]}}}, one).margins() == {"raw": (0, 14, 14)}
    assert Spatial({"rotate": {"axes": {"z": [-60, -50]}}}, one).margins() == {"raw": (0, 14, 14)}
    assert Spatial({"rotate": {"axes": {"z": [-70, -60]}}}, one).margins() == {"raw": (0, 12, 12)}
    assert Spatial({"rotate": {"axes": {"x": [90, 90]}}}, one).margins() == {"raw": (32, 0, 0)}
    assert Spatial({"mirror": {"axes": {"x": 1, "y": 1, "z": 1}}}, SEVERAL).margins() == dict.fromkeys(
        SEVERAL, (0,) * 3
    )
    twice = {"rotate": {"axes": {"x": [90, 90], "z": [90, 90]}}}  # +x of what comes out is +z of what came in
    assert Spatial(twice, {"raw": ((1, 3, 9), (1, 1, 1))}).margins() == {"raw": (4, 0, 0)}
    box = {"raw": ((9, 9, 9), (1, 1, 1))}
    every = {"rotate": {"axes": {axis: [-180, 180] for axis in "xyz"}}}
    assert Spatial(every, box).margins() == {"raw": (math.ceil(4 * math.sqrt(3) - 4),) * 3}


@given(
    low=st.floats(-360, 360),
    width=st.floats(0, 180),
    axis=st.sampled_from("xyz"),
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    scale=st.tuples(*[st.sampled_from([1.0, 2.5, 4.0, 8.0])] * 3),
    number=st.integers(0, 99),
)
def test_no_pad_value_comes_out_whatever_the_range(
    *, low: float, width: float, axis: str, shape: Any, scale: Any, number: int
) -> None:
    options = {
        "rotate": {"axes": {axis: [low, low + width]}},
        "transpose": {"axes": ["x", "y"]},
    }
    spatial = Spatial(options, {"raw": (shape, scale), "labels": (shape[::-1], scale, "nearest")})
    for made in spatial(coordinates(spatial), rng(number)).values():
        assert np.isfinite(made).all()


def test_without_a_margin_voxels_outside_of_the_input_are_the_pad_value() -> None:
    arrays = {"raw": ((1, 9, 9), (1, 1, 1), "linear", 5.0), "labels": ((1, 9, 9), (1, 1, 1), "nearest", np.nan)}
    item = {name: np.zeros((1, 9, 9), np.float32) for name in arrays}
    made = Spatial({"rotate": {"axes": {"z": [45, 45]}}}, arrays)(item, rng())
    for corner in itertools.product((0, -1), repeat=2):
        assert made["raw"][(0, *corner)] == 5.0
        assert np.isnan(made["labels"][(0, *corner)])
    assert (made["raw"][0, 2:7, 2:7] == 0).all()
    assert (made["labels"][0, 2:7, 2:7] == 0).all()


# -- randomness --------------------------------------------------------------------------------------------------------


def test_each_transform_has_its_own_random_numbers_whichever_others_are_on() -> None:
    whole = Spatial(EVERYTHING, SEVERAL)
    for number in range(5):
        one, other = rng(number), rng(number)
        changes = {name: Spatial({name: EVERYTHING[name]}, SEVERAL).change(rng(number)) for name in EVERYTHING}
        both, alone = whole.change(one), Spatial({}, SEVERAL).change(other)
        product = changes["mirror"] @ changes["transpose"] @ changes["rotate"]
        assert np.abs(both - product).max() < 1e-12
        assert np.array_equal(alone, np.eye(3))
        assert one.random() == other.random()  # what comes after is the same as well


def test_the_axis_order_changes_nothing_but_the_order_of_the_axes() -> None:
    for number, axis_order in enumerate(["xyz", "yzx", "xzy"]):
        by_name = ["zyx".index(axis) for axis in axis_order]
        zyx = Spatial(EVERYTHING, {"raw": ((2, 2, 2), (1, 1, 1))}).change(rng(number))
        found = Spatial(EVERYTHING, {"raw": ((2, 2, 2), (1, 1, 1))}, axis_order).change(rng(number))
        assert np.array_equal(found, zyx[np.ix_(by_name, by_name)])


def test_angles_and_mirrors_have_the_documented_distributions() -> None:
    options = {"mirror": {"axes": {"x": 0.3}}, "rotate": {"axes": {"z": [-30, 60]}}}
    spatial = Spatial(options, {"raw": ((2, 9, 9), (4, 4, 4))})
    changes = [spatial.change(rng(number)) for number in range(1500)]
    # The second row and the last of (mirror · turn back): x' = ±(cos x + sin y), y' = -sin x + cos y
    angles = np.degrees([math.atan2(-change[1, 2], change[1, 1]) for change in changes])
    assert stats.kstest(angles, stats.uniform(-30, 90).cdf).pvalue > 0.01
    mirrored = sum(np.linalg.det(change) < 0 for change in changes)
    assert abs(mirrored - 450) < 5 * np.sqrt(1500 * 0.21)


def test_one_random_change_is_pinned() -> None:
    change = Spatial(EVERYTHING, SEVERAL).change(generator_for(0, "augment", 0, 0))
    assert change.round(6).tolist() == PINNED


# -- arrays and tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.int16, np.bool_])
def test_arrays_and_tensors_come_out_equal_to_the_last_bit_and_go_in_unchanged(dtype: Any) -> None:
    arrays = {
        "raw": ((4, 7, 8), (8, 4, 4), "nearest" if dtype is np.bool_ else "linear", 0),
        "labels": ((5, 6, 5), (8, 8, 8), "nearest", 0),
    }
    spatial = Spatial(EVERYTHING, arrays)
    item = {name: (rng().random((2, *spec[0])) * 100).astype(dtype) for name, spec in arrays.items()}
    item["labels"] = item["labels"].transpose(0, 3, 2, 1).copy().transpose(0, 3, 2, 1)  # not contiguous
    before = {name: values.copy() for name, values in item.items()}
    for values in item.values():
        values.flags.writeable = False
    tensors = {name: torch.from_numpy(values.copy()) for name, values in item.items()}
    again = pickle.loads(pickle.dumps(spatial))
    assert repr(again) == repr(spatial)
    seen = set()
    for number in range(4):
        made, from_tensors = spatial(item, rng(number)), again(tensors, rng(number))
        for name, values in made.items():
            assert values.dtype == dtype
            assert isinstance(from_tensors[name], torch.Tensor)
            assert from_tensors[name].numpy().tobytes() == values.tobytes()
        seen.add(made["raw"].tobytes())
    assert len(seen) == 4
    for name, values in before.items():
        assert np.array_equal(item[name], values)
        assert np.array_equal(tensors[name].numpy(), values)


def test_planes_are_rotated_in_their_plane_and_bfloat16_stays_bfloat16() -> None:
    spatial = Spatial({"rotate": {"axes": {"z": [90, 90]}}}, {"raw": ((4, 4), (2, 2))}, "yx")
    values = torch.arange(16.0).reshape(1, 4, 4).to(torch.bfloat16)
    made = Compose([spatial, GaussianNoise(0.0, p=1.0, field="raw")])({"raw": values}, rng())["raw"]
    assert made.dtype == torch.bfloat16
    assert np.array_equal(made.float().numpy(), np.rot90(values.float().numpy(), axes=(-1, -2)))
