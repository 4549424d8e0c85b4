"""Standardization against NumPy: large offsets, constants, NaNs and integers, along each axis."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.moments import Moments
from penstock.transform.standardize import Standardize

RNG = generator_for(0, "test")


def items(dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.normal(size=(12, 2, 5, 7)) * np.arange(1, 6)[:, None] + 10).astype(dtype)


@pytest.mark.parametrize(("axis", "over"), [(0, (0, 2, 3)), (-2, (0, 1, 3)), (-1, (0, 1, 2)), (None, (0, 1, 2, 3))])
def test_training_items_have_mean_0_and_deviation_1(axis: int | None, over: tuple[int, ...]) -> None:
    data = items(np.float64)
    moments = Moments.over(data, per="scalar") if axis is None else Moments.over(data, axis=axis)
    standardize = Standardize(moments)
    made = np.stack([standardize(item, RNG) for item in data])
    expected = (data - data.mean(axis=over, keepdims=True)) / data.std(axis=over, keepdims=True)
    np.testing.assert_allclose(made, expected, rtol=1e-12, atol=1e-12)
    given = Standardize(moments.mean, moments.std, axis=axis)
    assert all(np.array_equal(given(item, RNG), row) for item, row in zip(data, made, strict=True))


def test_an_offset_of_a_million_deviations_costs_no_digits() -> None:
    data = (1e6 + np.random.default_rng(0).normal(size=(50, 400))).astype(np.float32)
    standardize = Standardize(Moments.over(data, per="scalar"))
    exact = data.astype(np.float64)
    expected = (exact - exact.mean()) / exact.std()
    made = np.stack([standardize(item, RNG) for item in data])
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-6)


def test_constant_channels_come_out_as_zeros_and_other_values_of_them_as_their_distance() -> None:
    data = items()
    data[:, 1] = 0.1
    standardize = Standardize(Moments.over(data, axis=0))
    assert standardize.std[1] == 1.0
    assert not standardize(data[4], RNG)[1].any()
    other = standardize(data[4] + np.float32(0.5), RNG)[1]
    np.testing.assert_allclose(other, 0.5, rtol=1e-6)


def test_nans_stay_where_they_are_and_change_nothing_else() -> None:
    data = items(np.float64)
    holed = data.copy()
    holed[:, 0, 0, 0] = np.nan
    standardize = Standardize(Moments.over(holed, axis=-2))
    made = standardize(holed[0], RNG)
    assert np.argwhere(np.isnan(made)).tolist() == [[0, 0, 0]]
    row = holed[:, :, 0]
    np.testing.assert_allclose(made[1, 0], (data[0, 1, 0] - np.nanmean(row)) / np.nanstd(row), rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "made"),
    [("f2", "f2"), ("f4", "f4"), ("f8", "f8"), ("u1", "f4"), ("i8", "f4"), ("?", "f4"), (">f4", "f4")],
)
def test_floats_keep_their_type_and_integers_become_float32(dtype: str, made: str) -> None:
    item = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    kept = item.copy()
    item.flags.writeable = False
    found = Standardize(0.5, 0.25)(item, RNG)
    assert found.dtype == np.dtype(made)
    assert found.tolist() == [[-2.0, 2.0, 2.0], [2.0, -2.0, 2.0]]
    assert np.array_equal(item, kept)


def test_means_that_broadcast_and_items_that_are_single_values() -> None:
    item = np.arange(6.0).reshape(2, 3)
    mean = np.array([[1.0], [2.0]])
    assert np.array_equal(Standardize(mean, 2.0)(item, RNG), (item - mean) / 2)
    single = Standardize(1.0, 2.0)(np.float32(4.0), RNG)
    assert single == 1.5
    assert isinstance(single, np.float32)
    assert Standardize(torch.tensor(1.0), torch.tensor([2.0]))(item, RNG)[0, 0] == -0.5


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((1.0,), {}, "std must be given, unless mean is Moments"),
        ((Moments.over(np.ones(3)), 1.0), {}, "std and axis must be left out"),
        ((Moments(),), {}, "no finite value was seen in any channel"),
        ((Moments.over(np.array([[1.0, np.nan]]), axis=0),), {}, "seen in channel 1 of the training items"),
        ((0.0, -1.0), {}, "finite numbers >= 0, got -1.0"),
        ((np.nan, 1.0), {}, "mean must be one or more finite numbers, got nan"),
        (("a", 1.0), {}, "mean must be a number or an array of numbers, got 'a'"),
        (([1.0, 2.0], [1.0, 2.0]), {}, "axis must be given for 2 means"),
        (([1.0, 2.0], [1.0, 2.0, 3.0]), {"axis": 0}, "same length, got 2 and 3"),
        ((0.0, 1.0), {"axis": 0}, "axis must be left out unless mean or std is a list"),
        ((np.ones((2, 1)), 1.0), {"axis": 0}, "axis must be left out unless mean or std is a list"),
        (([1.0, 2.0], 1.0), {"axis": "time"}, "axis must be an integer, .*, got 'time'"),
        ((0.0, 1.0), {"field": -1}, "field must be a name, .*, got -1"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Standardize(*arguments, **options)


@pytest.mark.parametrize(
    ("standardize", "said"),
    [
        (Standardize([1.0, 2.0], 1.0, axis=0), r"Axis 0 of an item must have length 2, .*, got shape \(3, 4\)"),
        (Standardize([1.0, 2.0], 1.0, axis=2), r"Standardize needs axis 2, got an item of shape \(3, 4\)"),
        (Standardize(np.ones((2, 3, 4)), 1.0), r"shape \(2, 3, 4\) must broadcast to an item, got shape \(3, 4\)"),
        (Standardize(np.ones((5, 1)), 1.0), r"shape \(5, 1\) must broadcast"),
    ],
)
def test_items_that_do_not_fit_are_refused(standardize: Standardize, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        standardize(np.ones((3, 4)), RNG)
