"""Invalid options and items of spatial transforms."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.spatial.options import SpatialArray
from penstock.transform.spatial.spatial import Spatial

ONE = {"raw": ((4, 4, 4), (8, 4, 4))}
TURN = {"rotate": {"axes": {"z": [-45, 45]}}}


@pytest.mark.parametrize(
    ("transforms", "said"),
    [
        ({"miror": {"axes": {"x": 1}}}, "Spatial transforms must be among .*, got miror. Did you mean 'mirror'?"),
        ({"elastic": {}}, r"must be among mirror, transpose, rotate, got elastic\.$"),
        ("mirror", "transforms must be a dictionary such as .*, got 'mirror'"),
        (
            {"mirror": {"axes": {"X": 0.5}}},
            "An axis to mirror must be one of 'z', 'y', 'x', got 'X'",
        ),
        (
            {"mirror": {"axis": {"x": 0.5}}},
            r"mirror must be of the form \{'axes': \{'x': 0.5\}\}, got \{'axis': \{'x': 0.5\}\}",
        ),
        ({"mirror": {}}, r"mirror must be of the form \{'axes': \{'x': 0.5\}\}, got \{\}"),
        ({"mirror": ["x"]}, r"mirror must be of the form .*, got \['x'\]"),
        ({"mirror": {"axes": ["x"]}}, r"mirror must be of the form .*, got \{'axes': \['x'\]\}"),
        ({"mirror": {"axes": {"x": 1.5}}}, "mirror of x must be a finite number >= 0 and <= 1, got 1.5"),
        (
            {"transpose": {"axes": "xy"}},
            r"transpose must be of the form \{'axes': \['x', 'y'\]\}, got .*'xy'\}",
        ),
        ({"transpose": {"axes": ["x"]}}, r"axes of transpose must be two or three different axes, got \['x'\]"),
        ({"transpose": {"axes": ["x", "x"]}}, r"two or three different axes, got \['x', 'x'\]"),
        ({"transpose": {"axes": ["x", "c"]}}, "An axis to transpose must be one of .*, got 'c'"),
        ({"rotate": {"axes": {"w": [0, 1]}}}, "An axis to rotate about must be one of 'z', 'y', 'x', got 'w'"),
        ({"rotate": {"axes": {"z": 45}}}, r"rotate about z must be \[lowest, highest\] angle in degrees, got 45"),
        ({"rotate": {"axes": {"z": [45, -45]}}}, r"must have the smaller angle first, got \[45, -45\]"),
        ({"rotate": {"axes": {"z": [0, np.inf]}}}, "angle about z must be a finite number, got inf"),
    ],
)
def test_invalid_transforms_are_refused_with_what_is_allowed(transforms: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Spatial(transforms, ONE)


@pytest.mark.parametrize(
    ("arrays", "axis_order", "said"),
    [
        ({}, "zyx", "arrays must be {name: .shape, scale, interpolation, pad value.}, got {}"),
        ({"raw": 3}, "zyx", r"arrays\['raw'\] must be \(shape, scale, .*, got 3"),
        ({"raw": ((4, 4, 4),)}, "zyx", r"arrays\['raw'\] must be"),
        ({"raw": ((4, 4), (8, 8, 8))}, "zyx", r"shape of array 'raw' must be 3 numbers, for zyx, got \(4, 4\)"),
        ({"raw": ((4, 4, 4), 8)}, "zyx", "scale of array 'raw' must be 3 numbers, for zyx, got 8"),
        ({"raw": ((4, 0, 4), (8, 8, 8))}, "zyx", "shape of array 'raw' must be an integer >= 1, got 0"),
        ({"raw": ((4, 4, 4), (8, 0, 8))}, "zyx", "scale of array 'raw' must be > 0"),
        (
            {"raw": ((4, 4, 4), (8, 8, 8), "cubic")},
            "zyx",
            "interpolation of array 'raw' must be 'linear' .*, got 'cubic'",
        ),
        (
            {"raw": ((4, 4, 4), (8, 8, 8), "linear", "mean")},
            "zyx",
            "pad value of array 'raw' must be a number.*, got 'mean'",
        ),
        (ONE, "zyxc", "axis_order must be x, y and z .*, got 'zyxc'"),
        (ONE, "zzx", "axis_order must be .*, got 'zzx'"),
        (ONE, 3, "axis_order must be .*, got 3"),
    ],
)
def test_invalid_arrays_are_refused(arrays: Any, axis_order: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Spatial({}, arrays, axis_order)


def test_a_plane_is_not_rotated_about_its_own_axes() -> None:
    with pytest.raises(OptionError, match="An axis to rotate about must be one of 'z', got 'x'"):
        Spatial({"rotate": {"axes": {"x": [0, 1]}}}, {"raw": ((4, 4), (1, 1))}, "yx")


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (np.ones((4, 4, 4)), "An item must be a mapping {name: array} with 'raw', got ndarray"),
        ({"labels": np.ones((4, 4, 4))}, "An item must have the array 'raw', got 'labels'"),
        ({"raw": np.ones((4, 4))}, r"\(zyx\) of array 'raw' must have shape \(4, 4, 4\), .*, got shape \(4, 4\)"),
        ({"raw": np.ones((3, 4, 6))}, r"got shape \(3, 4, 6\)"),
        ({"raw": np.ones((4, 5, 4))}, r"larger by the same number on both sides \(\(0, 1, 1\) for every change\)"),
        ({"raw": np.ones((4, 4, 4), np.uint8)}, "The fill value must fit uint8, got nan"),
        ({"raw": np.ones((4, 4, 4), bool)}, "Linear interpolation of array 'raw' needs .*, got bool. Use 'nearest'"),
        ({"raw": torch.ones((4, 4, 4), dtype=torch.int64)}, "Linear interpolation of array 'raw' needs .*, got int64"),
        ({"raw": "text"}, "NumPy arrays and torch tensors, got str"),
    ],
)
def test_items_that_do_not_fit_are_refused_for_every_random_change(item: Any, said: str) -> None:
    for number in range(3):
        with pytest.raises(OptionError, match=said):
            Spatial(TURN, ONE)(item, generator_for(0, "augment", number))


def test_integers_with_their_margin_need_no_pad_value() -> None:
    spatial = Spatial(TURN, ONE)
    values = np.full((1, 4, 6, 6), 7, np.uint8)
    assert spatial.margins() == {"raw": (0, 1, 1)}
    for number in range(20):
        assert (spatial({"raw": values}, generator_for(0, "augment", number))["raw"] == 7).all()


def test_the_options_of_an_array_have_names() -> None:
    array = Spatial({}, {"raw": SpatialArray((1, 2, 3), (4.0, 5.0, 6.0), "nearest")}).arrays["raw"]
    assert (array.shape, array.scale, array.interpolation) == ((1, 2, 3), (4.0, 5.0, 6.0), "nearest")
    assert np.isnan(array.pad_value)
