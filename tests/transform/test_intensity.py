"""Intensity transforms against independent computations, with NaN for unknown values."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage, stats

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.compose import Compose
from penstock.transform.intensity import Binarize, Blur, NanToNum, Normalize, RandomContrast, RandomGamma
from penstock.transform.noise import Clip
from penstock.transform.standardize import Standardize


def rng(number: int = 0) -> np.random.Generator:
    return generator_for(6, "augment", 0, number)


def image(dtype: Any = np.float32) -> np.ndarray:
    values = rng(99).random((2, 3, 4, 5)).astype(dtype)
    values[0, 1, 2, 3] = values[1, 0, 0, 0] = np.nan
    return values


def every(field: str | None = None) -> list[Any]:
    return [
        RandomContrast(p=0.7, field=field),
        RandomContrast(value_range=(0.3, 0.6), field=field),
        RandomGamma(field=field),
        RandomGamma(value_range=(-1, 2), p=0.5, field=field),
        Blur(1.0, field=field),
        Blur((0.0, 8.0), scale=(1.0, 4.0), p=0.5, field=field),
        Binarize(0.5, field=field),
        NanToNum(field=field),
        Normalize(field=field),
        Normalize(-3.0, 0.5, field=field),
    ]


NAMES = [f"{number}-{type(transform).__name__}" for number, transform in enumerate(every())]
ALL = pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)


@ALL
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_arrays_and_tensors_come_out_alike_with_their_nans_and_go_in_unchanged(number: int, dtype: Any) -> None:
    transform, values = every()[number], image(dtype)
    values.flags.writeable = False
    tensor = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    seen = set()
    for draw in range(6):
        made, from_tensor = transform(values, rng(draw)), transform(tensor, rng(draw))
        assert isinstance(from_tensor, torch.Tensor)
        assert from_tensor.dtype == tensor.dtype
        assert np.array_equal(from_tensor.numpy(), made, equal_nan=True)
        unknown = np.isnan(values) if not isinstance(transform, NanToNum) else np.zeros(values.shape, bool)
        assert np.array_equal(np.isnan(made), unknown)
        seen.add(from_tensor.numpy().tobytes())
    assert np.array_equal(values, image(dtype), equal_nan=True)
    random = isinstance(transform, RandomContrast | RandomGamma) or getattr(transform, "p", 1.0) < 1
    assert (len(seen) > 1) == random


@ALL
def test_one_field_is_changed_and_pickles_give_the_same(number: int) -> None:
    made = every()[number](image(), rng(3))
    again = pickle.loads(pickle.dumps(every("raw")[number]))
    assert again == every("raw")[number]
    label = object()
    found = again({"raw": image(), "labels": label}, rng(3))
    assert found["labels"] is label
    assert found["raw"].tobytes() == made.tobytes()
    assert np.array_equal(found["raw"], every()[number](np.asfortranarray(image()), rng(3)), equal_nan=True)


# -- contrast and gamma ------------------------------------------------------------------------------------------------


def test_contrast_is_a_random_factor_around_the_mean_of_the_known_values() -> None:
    values = image(np.float64)
    mean = np.nanmean(values)
    factors = []
    for number in range(800):
        made = RandomContrast(0.5, 1.5)(values, rng(number))
        ratio = (made - mean) / (values - mean)
        factors.append(np.nanmedian(ratio))
        assert np.nanmax(np.abs(made - (mean + factors[-1] * (values - mean)))) < 1e-9
    assert stats.kstest(factors, stats.uniform(0.5, 1).cdf).pvalue > 0.01
    clipped = RandomContrast(3, 3, value_range=(0.2, 0.7))(values, rng())
    assert np.allclose(clipped, np.clip(mean + 3 * (values - mean), 0.2, 0.7), equal_nan=True)
    flat = RandomContrast(0, 0)(np.array([1.0, 3.0, np.inf, -np.inf, np.nan]), rng())
    assert np.array_equal(flat, [2.0, 2.0, np.inf, -np.inf, np.nan], equal_nan=True)
    assert np.isnan(RandomContrast()(np.full(3, np.nan), rng())).all()
    assert RandomContrast()(np.empty((0, 2)), rng()).shape == (0, 2)


def test_gamma_is_a_random_power_of_the_place_within_the_range() -> None:
    values = np.linspace(-2, 5, 50)
    powers = []
    for number in range(800):
        made = RandomGamma(0.5, 2.0, value_range=(-1, 3))(values, rng(number))
        place = (np.clip(values, -1, 3) + 1) / 4
        inner = (place > 0) & (place < 1)
        power = np.median(np.log((made[inner] + 1) / 4) / np.log(place[inner]))
        powers.append(power)
        assert np.abs(made - (place**power * 4 - 1)).max() < 1e-9
        assert made.min() == -1
        assert made.max() == 3
    assert stats.kstest(powers, stats.uniform(0.5, 1.5).cdf).pvalue > 0.01


def test_p_is_the_fraction_of_changed_items_and_ranges_always_hold() -> None:
    values = np.linspace(-1, 2, 9).reshape(1, 3, 3)
    for transform in (RandomContrast(p=0.3), Blur(1.0, p=0.3)):
        changed = sum(transform(values, rng(number)) is not values for number in range(1000))
        assert abs(changed - 300) < 5 * np.sqrt(1000 * 0.21)
    clipped = values.clip(0, 1)
    bent = sum(not np.array_equal(RandomGamma(p=0.3)(values, rng(number)), clipped) for number in range(1000))
    assert abs(bent - 300) < 5 * np.sqrt(1000 * 0.21)
    assert np.array_equal(RandomGamma(p=0.0)(values, rng()), values.clip(0, 1))
    assert np.array_equal(RandomContrast(p=0.0, value_range=(0, 1))(values, rng()), values.clip(0, 1))


# -- blur --------------------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 5)),
    sigma=st.tuples(*[st.sampled_from([0.0, 0.4, 0.7, 3.0])] * 2),
    unknown=st.floats(0, 0.8),
    number=st.integers(0, 99),
)
def test_a_blur_is_the_weighted_mean_of_known_neighbours(shape: Any, sigma: Any, unknown: float, number: int) -> None:
    values = rng(number).random(shape)
    values[rng(number + 1).random(shape) < unknown] = np.nan
    made = Blur(sigma)(values, rng())
    for channel, row, column in np.ndindex(*shape):
        total = weight = 0.0
        for other_row, other_column in itertools.product(range(shape[1]), range(shape[2])):
            apart = (abs(row - other_row), abs(column - other_column))
            share = 1.0
            for distance, width in zip(apart, sigma, strict=True):
                near = distance <= int(4 * width + 0.5)
                share *= (math.exp(-0.5 * (distance / width) ** 2) if width else float(distance == 0)) if near else 0.0
            value = values[channel, other_row, other_column]
            if share and not math.isnan(value):
                total, weight = total + share * value, weight + share
        if math.isnan(values[channel, row, column]):
            assert math.isnan(made[channel, row, column])
        else:
            assert made[channel, row, column] == pytest.approx(total / weight, rel=1e-9)


def test_a_blur_is_what_scipy_makes_and_world_units_are_voxels_times_scale() -> None:
    values = rng().random((2, 12, 20, 16))
    expected = [
        ndimage.gaussian_filter(each, (0.5, 2, 1), mode="constant")
        / ndimage.gaussian_filter(np.ones_like(each), (0.5, 2, 1), mode="constant")
        for each in values
    ]
    made = Blur((0.5, 2, 1))(values, rng())
    assert np.abs(made - expected).max() < 1e-12
    assert np.array_equal(Blur(8, scale=(16, 4, 8))(values, rng()), made)
    assert np.array_equal(Blur((8, 8, 8), scale=(16, 4, 8))(values, rng()), made)
    assert np.array_equal(Blur(2)(values, rng()), Blur((2, 2, 2))(values, rng()))
    assert Blur((0.0, 0.0))(values, rng()) is values
    constant = np.full((3, 9, 9), 0.3, np.float32)
    assert np.array_equal(Blur((2, 3, 1))(constant, rng()), constant)


# -- from one range to another -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "threshold", "expected"),
    [
        (np.array([0, 1, 2, 255], np.uint8), 1, [0, 0, 1, 1]),
        (np.array([-1, 0, 1], np.int64), 0, [0, 0, 1]),
        (np.array([0, 1, 2], np.int32), 0.5, [0, 1, 1]),
        (np.array([True, False]), 0.5, [True, False]),
        (np.array([-np.inf, 0.0, 0.1, np.inf]), 0, [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_values_above_the_threshold_become_one(values: np.ndarray, threshold: float, expected: Any) -> None:
    made = Binarize(threshold)(values, rng())
    assert made.dtype == values.dtype
    assert made.tolist() == expected


def test_nans_and_infinities_are_replaced_if_numbers_are_given() -> None:
    values = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert NanToNum()(values, rng()).tolist() == [1.0, 0.0, np.inf, -np.inf]
    assert NanToNum(5, 6, 7)(values, rng()).tolist() == [1.0, 5.0, 6.0, 7.0]
    assert NanToNum(5, neginf=-1)(values, rng()).tolist() == [1.0, 5.0, np.inf, -1.0]
    for known in (np.ones(3), np.ones(3, np.uint8), torch.ones(2)):
        assert NanToNum()(known, rng()) is known


def test_the_default_scale_is_for_eight_bits_whatever_the_dtype() -> None:
    values = np.arange(256, dtype=np.uint8)
    made = Normalize()(values, rng())
    assert made.dtype == np.float32
    assert made[0] == 0
    assert made[255] == 1
    assert np.abs(made - values / 255).max() < 1e-7
    assert Normalize()(torch.tensor([255], dtype=torch.uint8), rng()).dtype == torch.float32
    assert Normalize(1, 2)(np.array([1.0, np.nan]), rng()).tolist()[0] == 4.0
    signed = Normalize(-127.5, 1 / 127.5)(values, rng())
    assert (signed[0], signed[255]) == (-1, 1)
    assert Normalize(0, 1)(np.array([3], np.uint16), rng()).tolist() == [3.0]


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomContrast(2, 1), "low must be <= high, got low=2, high=1"),
        (lambda: RandomContrast(-1, 1), "low must be a finite number >= 0, got -1"),
        (lambda: RandomContrast(value_range=1), r"value_range must be \(low, high\), got 1"),
        (lambda: RandomContrast(p=2), "p must be a probability .*, got 2"),
        (lambda: RandomGamma(0, 1), "low must be > 0, got 0: .* make all values equal"),
        (lambda: RandomGamma(value_range=(1, 0)), "must be two numbers, the smaller one first"),
        (lambda: RandomGamma(value_range=(0, np.inf)), "value_range must be two finite numbers"),
        (lambda: Blur(-1), "sigma must be a finite number >= 0, got -1"),
        (lambda: Blur("wide"), "sigma must be a finite number >= 0, got 'wide'"),
        (lambda: Blur(()), r"sigma must be a number, .*, got \(\)"),
        (lambda: Blur(1, scale=(4, 4)), r"scale must be 3 numbers, .*, got \(4, 4\)"),
        (lambda: Blur((1, 1), scale=(4, 0)), "scale must be > 0"),
        (lambda: Binarize(None), "threshold must be a finite number, got None"),
        (lambda: Binarize(np.nan), "threshold must be a finite number, got nan"),
        (lambda: NanToNum(np.nan), "nan must be a finite number, got nan"),
        (lambda: NanToNum(posinf=np.inf), "posinf must be a finite number, got inf"),
        (lambda: Normalize(scale=0), "scale must not be 0, got 0"),
        (lambda: Normalize(field=-1), "field must be a name, .*, got -1"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


@pytest.mark.parametrize("transform", [RandomContrast(), RandomGamma(), Blur(1)], ids=lambda each: type(each).__name__)
def test_integers_are_refused_if_results_would_be_rounded(transform: Any) -> None:
    with pytest.raises(OptionError, match=f"{type(transform).__name__} needs floating-point data, got uint8"):
        transform(np.ones((1, 2, 2, 2), np.uint8), rng())


def test_items_with_too_few_axes_are_refused() -> None:
    with pytest.raises(OptionError, match=r"Blur needs items of at least 3 axes, got shape \(4, 4\)"):
        Blur(1)(np.ones((4, 4)), rng())


@pytest.mark.parametrize(
    "steps",
    [
        [Standardize(0.5, 0.3), RandomGamma()],
        [Standardize(0.5, 0.3), RandomContrast(value_range=(0, 1))],
        [Binarize(), Clip(0.2, 0.8)],
        [RandomGamma(value_range=(0, 255)), Clip(0, 1)],
    ],
)
def test_an_order_that_destroys_data_is_refused(steps: list[Any]) -> None:
    with pytest.raises(OptionError, match="would destroy data"):
        Compose(steps)


def test_an_order_that_destroys_nothing_is_accepted() -> None:
    steps = [Normalize(), RandomGamma(), RandomContrast(value_range=(0, 1)), Clip(0, 1), Blur(1), Standardize(0.5, 0.3)]
    assert list(Compose(steps).steps) == steps
