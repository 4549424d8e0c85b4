"""Noise, gain, clipping, crops and shifts against plain NumPy."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.compose import Compose
from penstock.transform.crops import RandomCrop, RandomShift
from penstock.transform.moments import Moments
from penstock.transform.noise import Clip, GaussianNoise
from penstock.transform.specaugment import SpecAugment
from penstock.transform.standardize import Standardize


def rng(number: int = 0) -> np.random.Generator:
    return generator_for(6, "augment", 0, number)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_is_normal_of_the_given_deviation_and_nothing_is_clipped(dtype: Any) -> None:
    values = np.linspace(0, 1, 20_000).astype(dtype)
    made = GaussianNoise(std=0.5, p=1.0)(values, rng())
    assert made.dtype == dtype
    noise = (made.astype(np.float64) - values) / 0.5
    assert stats.kstest(noise, "norm").pvalue > 0.01
    assert made.min() < -0.5
    assert made.max() > 1.5


def test_a_range_holds_with_noise_and_without_it() -> None:
    values = np.linspace(-1, 2, 1000)
    without = GaussianNoise(std=0.5, p=1.0)(values, rng())
    assert np.array_equal(GaussianNoise(0.5, 1.0, (0, 1))(values, rng()), without.clip(0, 1))
    assert np.array_equal(GaussianNoise(0.5, 0.0, (0, 1))(values, rng()), values.clip(0, 1))


def test_p_is_the_fraction_of_items_with_noise() -> None:
    values = np.ones(2)
    for transform in (GaussianNoise(p=0.8), RandomShift(1, p=0.8)):
        changed = sum(transform(values, rng(number)) is not values for number in range(1500))
        assert abs(changed - 1200) < 5 * np.sqrt(1500 * 0.16)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "expected"),
    [
        ("f4", 0.0, 1.0, [0.0, 0.5, 1.0]),
        ("f2", -np.inf, 1e30, [-3.0, 0.5, 7.0]),
        ("i8", -np.inf, 2.7, [-3, 0, 2]),
        ("i8", -1.5, np.inf, [-1, 0, 7]),
        ("i1", -1000, 1000, [-3, 0, 7]),
    ],
)
def test_clipping_keeps_the_type(dtype: str, low: float, high: float, expected: list[float]) -> None:
    values = np.array([-3.0, 0.5, 7.0]).astype(dtype)
    made = Clip(low, high)(values, rng())
    assert made.dtype == values.dtype
    assert made.tolist() == expected


def test_nans_are_not_clipped() -> None:
    assert np.isnan(Clip(0, 1)(np.array([np.nan, 3.0]), rng())).tolist() == [True, False]


# -- crops and shifts --------------------------------------------------------------------------------------------------


def test_crops_are_stretches_at_equally_likely_positions() -> None:
    values = np.arange(3 * 8 * 2).reshape(3, 8, 2)
    counts = np.zeros(6, int)
    for number in range(3000):
        made = RandomCrop(3, axis=1)(values, rng(number))
        begin = int(made[0, 0, 0]) // 2
        assert np.array_equal(made, values[:, begin : begin + 3])
        counts[begin] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
    whole = RandomCrop(8, axis=-2)(values, rng())
    assert np.array_equal(whole, values)
    assert not np.shares_memory(RandomCrop(2)(values, rng()), values)


@pytest.mark.parametrize(("length", "most"), [(9, 3), (4, 4), (3, 10)])
def test_shifts_reach_both_ways_and_are_what_numpy_rolls(length: int, most: int) -> None:
    values = np.arange(1, 2 * length + 1).reshape(2, length)
    reach = min(length, most)
    wrapped = {number: np.roll(values, number, axis=1).tobytes() for number in range(-reach, reach + 1)}
    padded = {}
    for number in range(-reach, reach + 1):
        wide = np.zeros((2, 3 * length), values.dtype)
        wide[:, length + number : 2 * length + number] = values
        padded[number] = wide[:, length : 2 * length].tobytes()
    seen, filled = set(), set()
    for number in range(60 * (reach + 1)):
        seen.add(RandomShift(most)(values, rng(number)).tobytes())
        filled.add(RandomShift(most, fill=0)(values, rng(number)).tobytes())
    assert seen == set(wrapped.values())
    assert filled == set(padded.values())


def test_free_places_may_be_filled_with_the_mean() -> None:
    values = np.array([1.0, 2.0, 6.0])
    made = {tuple(RandomShift(1, fill="mean")(values, rng(number)).tolist()) for number in range(30)}
    assert made == {(1.0, 2.0, 6.0), (3.0, 1.0, 2.0), (2.0, 6.0, 3.0)}


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GaussianNoise(std=-1), "std must be a finite number >= 0, got -1"),
        (lambda: GaussianNoise(std="loud"), "std must be a finite number >= 0, got 'loud'"),
        (lambda: GaussianNoise(p=-0.1), "p must be a finite number >= 0 and <= 1, got -0.1"),
        (
            lambda: GaussianNoise(value_range=(1, 0)),
            r"value_range must be two numbers, the smaller one first, got \(1, 0\)",
        ),
        (lambda: GaussianNoise(value_range=1), "value_range must be two numbers, the smaller one first, got 1"),
        (lambda: Clip(1, 1), r"\(low, high\) must be two numbers, the smaller one first, got \(1, 1\)"),
        (lambda: Clip(None, 1), "must be two numbers, the smaller one first"),
        (lambda: RandomCrop(0), "size must be an integer >= 1, got 0"),
        (lambda: RandomShift(1, axis="time"), "axis must be an integer, .*, got 'time'"),
        (lambda: RandomShift(-1), "most must be an integer >= 0, got -1"),
        (lambda: RandomShift(1, fill="edge"), "fill must be a number or one of 'mean', 'min', 'wrap', got 'edge'"),
        (lambda: RandomShift(1, p=None), "p must be a finite number >= 0 and <= 1, got None"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


@pytest.mark.parametrize(
    ("transform", "values", "said"),
    [
        (GaussianNoise(), np.ones(3, int), "GaussianNoise needs floating-point data, got int64"),
        (RandomCrop(4), np.ones(3), r"size must be <= 3, the length of axis -1 of an item of shape \(3,\), got 4"),
        (RandomShift(4, axis=2), np.ones(3), "RandomShift needs axis 2"),
        (Clip(0, 1), np.ones(3, bool), "got booleans"),
        (Clip(0.2, 0.8), np.ones(3, int), "must contain a value of int64, got 0.2 … 0.8"),
        (Clip(300, 400), np.ones(3, np.uint8), "must contain a value of uint8, got 300 … 400"),
    ],
)
def test_items_that_do_not_fit_are_refused(transform: Any, values: np.ndarray, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        transform(values, rng())


# -- compose -----------------------------------------------------------------------------------------------------------


def test_steps_follow_each_other_with_one_stream_of_randomness() -> None:
    values = np.linspace(0, 1, 40).reshape(4, 10)
    steps = [RandomShift(3), GaussianNoise(0.1, p=1.0), Standardize(0.5, 0.25), SpecAugment(3, 2, p=1.0)]
    by_hand, stream = values, rng()
    for step in steps:
        by_hand = step(by_hand, stream)
    nested = Compose([steps[0], Compose(steps[1:3]), Compose([Compose(steps[3:])])])
    assert list(nested.steps) == steps
    for composed in (Compose(steps), nested):
        assert np.array_equal(composed(values, rng()), by_hand)


class Decibels:
    """A user-defined transform that declares its output range."""

    output_range = (-80.0, 0.0)

    def __call__(self, item: Any, rng: np.random.Generator) -> Any:
        return 20 * np.log10(item)


DATA = np.linspace(0, 1, 50)


@pytest.mark.parametrize(
    "steps",
    [
        [Standardize(0.5, 0.3), Clip(0, 1)],
        [Standardize(0.5, 0.3), GaussianNoise(value_range=(0, 1))],
        [Standardize(0.5, 0.3), SpecAugment(), Compose([RandomShift(1), Clip(-1, 1)])],
        [Compose([Standardize(0.5, 0.3, field=0)]), Clip(-5, 2)],
        [Standardize(np.zeros(2), np.ones(2), axis=0, field="x"), Clip(0, 1, field="x")],
        [Decibels(), Clip(0, 1)],
    ],
)
def test_an_order_that_destroys_data_is_refused_with_advice(steps: list[Any]) -> None:
    with pytest.raises(
        OptionError, match=r"would destroy data: .* it clips to .* Put it before (Standardize|Decibels), or"
    ):
        Compose(steps)


@pytest.mark.parametrize(
    "steps",
    [
        [Clip(0, 1), Standardize(0.5, 0.3)],
        [GaussianNoise(value_range=(0, 1)), Standardize(0.5, 0.3), GaussianNoise()],
        [Standardize(0.5, 0.3), Clip(-5, 5)],  # outliers, in deviations
        [Standardize(0.5, 0.3, field="x"), Clip(0, 1, field="y")],
        [Clip(0, 1), Clip(0.2, 0.8)],
        [Decibels(), Clip(-100, 0)],
        [Standardize(Moments.over(DATA)), Clip(-1.75, 1.75)],
    ],
)
def test_an_order_that_destroys_nothing_is_accepted(steps: list[Any]) -> None:
    assert list(Compose(steps).steps) == steps


def test_values_that_are_no_transforms_are_refused() -> None:
    with pytest.raises(OptionError, match="steps must be a list of transforms, got Clip"):
        Compose(Clip(0, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"must be callable as transform\(item, rng\), got 3"):
        Compose([3])  # type: ignore[list-item]
