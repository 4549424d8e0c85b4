"""What a spatial change refuses: names it does not know, arrays that do not fit."""

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
        ({"miror": {"axes": {"x": 1}}}, "'miror' is not a spatial transform; use .* Did you mean 'mirror'?"),
        ({"elastic": {}}, r"'elastic' is not a spatial transform; use 'mirror', 'transpose', 'rotate', 'deform'\.$"),
        ("mirror", "transforms='mirror'; use a dictionary such as"),
        ({"mirror": {"axes": {"X": 0.5}}}, "'X' is not an axis to mirror; use 'z', 'y', 'x'. Did you mean 'x'?"),
        ({"mirror": {"axis": {"x": 0.5}}}, "'axis' is not an option of mirror; use 'axes'. Did you mean 'axes'?"),
        ({"mirror": {}}, r"mirror has axes=None; use \{'axes': \{'x': 0.5\}\}"),
        ({"mirror": ["x"]}, r"mirror=\['x'\]; use a dictionary of 'axes'"),
        ({"mirror": {"axes": ["x"]}}, r"mirror has axes=\['x'\]; use"),
        ({"mirror": {"axes": {"x": 1.5}}}, "mirror of x=1.5 is no probability"),
        ({"transpose": {"axes": "xy"}}, r"transpose has axes='xy'; use \{'axes': \['x', 'y'\]\}"),
        ({"transpose": {"axes": ["x"]}}, r"transpose of the axes \['x'\]; name two or three different ones"),
        ({"transpose": {"axes": ["x", "x"]}}, r"transpose of the axes \['x', 'x'\]"),
        ({"transpose": {"axes": ["x", "c"]}}, "'c' is not an axis to transpose"),
        ({"rotate": {"axes": {"w": [0, 1]}}}, "'w' is not an axis to rotate about; use 'z', 'y', 'x'"),
        ({"rotate": {"axes": {"z": 45}}}, r"rotate about z by 45; use \[lowest, highest\] angle in degrees"),
        ({"rotate": {"axes": {"z": [45, -45]}}}, "give the smaller angle first"),
        ({"rotate": {"axes": {"z": [0, np.inf]}}}, "angle about z=inf cannot be"),
        ({"deform": {"spacing": 8}}, "has no 'std'; give it, in world units"),
        ({"deform": {"spacing": 0, "std": 1}}, "spacing=0; use world units above 0"),
        ({"deform": {"spacing": [8, 8], "std": 1}}, r"spacing=\[8, 8\]; use one number, or 3 for zyx"),
        ({"deform": {"spacing": 8, "std": -1}}, "std of deform=-1 cannot be"),
        ({"deform": {"spacng": 8, "std": 1}}, "'spacng' is not an option of deform; .* Did you mean 'spacing'?"),
        ({"deform": {"spacing": 6, "std": 1}}, "spacing=6 along z, and the finest array a voxel every 8"),
    ],
)
def test_changes_that_cannot_be_are_refused_with_what_can(transforms: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Spatial(transforms, ONE)


@pytest.mark.parametrize(
    ("arrays", "axis_order", "said"),
    [
        ({}, "zyx", "use {name: .shape, scale, interpolation, pad value.} of each array"),
        ({"raw": 3}, "zyx", r"arrays\['raw'\]=3; use \(shape, scale"),
        ({"raw": ((4, 4, 4),)}, "zyx", r"arrays\['raw'\]="),
        ({"raw": ((4, 4), (8, 8, 8))}, "zyx", r"shape=\(4, 4\) of array 'raw'; use 3 numbers, for zyx"),
        ({"raw": ((4, 4, 4), 8)}, "zyx", "scale=8 of array 'raw'"),
        ({"raw": ((4, 0, 4), (8, 8, 8))}, "zyx", "shape of array 'raw' must be an integer >= 1, got 0"),
        ({"raw": ((4, 4, 4), (8, 0, 8))}, "zyx", "use world units above 0"),
        ({"raw": ((4, 4, 4), (8, 8, 8), "cubic")}, "zyx", "interpolation='cubic' of array 'raw'; use 'linear'"),
        ({"raw": ((4, 4, 4), (8, 8, 8), "linear", "mean")}, "zyx", "pad value 'mean' of array 'raw' is no number"),
        (ONE, "zyxc", "axis_order='zyxc'; use x, y and z"),
        (ONE, "zzx", "axis_order='zzx'"),
        (ONE, 3, "axis_order=3"),
    ],
)
def test_arrays_that_cannot_be_are_refused(arrays: Any, axis_order: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Spatial({}, arrays, axis_order)


def test_a_plane_is_turned_about_no_axis_of_its_own() -> None:
    with pytest.raises(OptionError, match="'x' is not an axis to rotate about; use 'z'"):
        Spatial({"rotate": {"axes": {"x": [0, 1]}}}, {"raw": ((4, 4), (1, 1))}, "yx")


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (np.ones((4, 4, 4)), "items of named arrays, got ndarray; give {name: array} of 'raw'"),
        ({"labels": np.ones((4, 4, 4))}, "told of an array 'raw', and an item has 'labels'"),
        ({"raw": np.ones((4, 4))}, r"'raw' came in with shape \(4, 4\), and \(4, 4, 4\) of zyx come out"),
        ({"raw": np.ones((3, 4, 6))}, r"came in with shape \(3, 4, 6\)"),
        ({"raw": np.ones((4, 5, 4))}, r"more by the same number on both sides: \(0, 1, 1\) for every change"),
        ({"raw": np.ones((4, 4, 4), np.uint8)}, "nan is no value of an array of uint8"),
        ({"raw": np.ones((4, 4, 4), bool)}, "'raw' is bool, which is not interpolated linearly; use 'nearest'"),
        ({"raw": torch.ones((4, 4, 4), dtype=torch.int64)}, "'raw' is int64, which is not interpolated linearly"),
        ({"raw": "text"}, "numpy arrays and torch tensors, got str"),
    ],
)
def test_items_that_do_not_fit_are_refused_whatever_is_drawn(item: Any, said: str) -> None:
    for number in range(3):
        with pytest.raises(OptionError, match=said):
            Spatial(TURN, ONE)(item, generator_for(0, "augment", number))


def test_whole_numbers_with_their_margin_need_no_pad_value() -> None:
    spatial = Spatial(TURN, ONE)
    values = np.full((1, 4, 6, 6), 7, np.uint8)
    assert spatial.margins() == {"raw": (0, 1, 1)}
    for number in range(20):
        assert (spatial({"raw": values}, generator_for(0, "augment", number))["raw"] == 7).all()


def test_what_is_known_of_an_array_has_names() -> None:
    array = Spatial({}, {"raw": SpatialArray((1, 2, 3), (4.0, 5.0, 6.0), "nearest")}).arrays["raw"]
    assert (array.shape, array.scale, array.interpolation) == ((1, 2, 3), (4.0, 5.0, 6.0), "nearest")
    assert np.isnan(array.pad_value)
