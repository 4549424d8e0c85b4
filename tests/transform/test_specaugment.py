"""SpecAugment: widths, positions and values of masks, on axes of any length."""

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.noise import GaussianNoise
from penstock.transform.presets import get_augmentation_params, get_recommended_params
from penstock.transform.specaugment import SpecAugment


def item(*shape: int) -> np.ndarray:
    return np.arange(1.0, np.prod(shape) + 1).reshape(shape)


def stripes(masked: np.ndarray, axis: int) -> list[int]:
    """Indices along the axis where all values are -1."""
    over = tuple(other for other in range(masked.ndim) if other != axis % masked.ndim)
    return np.flatnonzero((masked == -1).all(axis=over)).tolist()


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
    | st.tuples(st.integers(1, 12), st.integers(1, 12)),
    widest=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    n_masks=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
def test_masks_are_stripes_and_nothing_else_changes(shape: Any, widest: Any, n_masks: Any, seed: int) -> None:
    values = item(*shape)
    augment = SpecAugment(widest[0], widest[1], n_masks[0], n_masks[1], mask_value=-1.0, p=1.0)
    made = augment(values, generator_for(seed, "augment"))
    times, bins = stripes(made, -1), stripes(made, -2)
    expected = values.copy()
    expected[..., times] = -1
    expected[..., bins, :] = -1
    assert np.array_equal(made, expected)
    assert len(times) <= min(n_masks[0] * widest[0], shape[-1] - 1)
    assert len(bins) <= min(n_masks[1] * widest[1], shape[-2] - 1)


@pytest.mark.parametrize(("length", "widest"), [(7, 3), (4, 4), (3, 9)])
def test_widths_and_positions_of_masks_are_uniform(length: int, widest: int) -> None:
    tries = 6000
    found: Counter[tuple[int, int]] = Counter()
    values = item(2, length)
    augment = SpecAugment(time_mask_param=widest, num_freq_masks=0, mask_value=-1.0, p=1.0)
    rng = generator_for(4, "augment")
    for _ in range(tries):
        columns = stripes(augment(values, rng), -1)
        assert columns == list(range(columns[0], columns[-1] + 1)) if columns else True
        found[len(columns), columns[0] if columns else 0] += 1
    most = min(widest, length - 1)
    places = {(width, begin) for width in range(1, most + 1) for begin in range(length - width + 1)}
    assert set(found) == places | {(0, 0)}
    for (width, begin), count in found.items():
        expected = tries / (most + 1) / (length - width + 1 if width else 1)
        assert abs(count - expected) < 5 * np.sqrt(expected), (width, begin)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10])
def test_items_that_are_shorter_than_the_parameter_are_never_masked_entirely(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    widest = 1000 + length  # reported for the first time in this process
    augment = SpecAugment(widest, 5, 4, 4, mask_value=-1.0, p=1.0)
    with caplog.at_level(logging.WARNING, "penstock"):
        made = [augment(item(2, 6, length), generator_for(0, "augment", number)) for number in range(300)]
    assert all(len(stripes(masked, -1)) < length for masked in made)
    assert all(len(stripes(masked, -2)) < 6 for masked in made)
    assert max(len(stripes(masked, -1)) for masked in made) == length - 1
    told = f"time_mask_param={widest} is too large for the data: an item has {length} places"
    assert [told in message for message in caplog.messages] == [True]


def test_masks_on_longer_axes_are_what_they_were() -> None:
    made = SpecAugment(5, 3, 2, 2, mask_value=-1.0, p=1.0)(item(8, 12), generator_for(2, "augment"))
    assert (stripes(made, -1), stripes(made, -2)) == ([5, 7, 8, 9, 10], [2, 3, 4, 5, 6])


def test_p_is_the_fraction_of_changed_items() -> None:
    values = item(6, 6)
    augment = SpecAugment(6, 6, 4, 4, p=0.3)
    changed = sum(augment(values, generator_for(0, "augment", 0, number)) is not values for number in range(2000))
    assert abs(changed - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.parametrize(("value", "expected"), [("mean", 4.0), ("min", -8.0), (7, 7.0), (-80.5, -80.5)])
def test_masks_have_a_value_in_the_units_of_the_item(value: Any, expected: float) -> None:
    values = np.array([[-8.0, 4.0, 16.0, np.nan]])
    augment = SpecAugment(4, 0, mask_value=value, p=1.0)
    made = [augment(values, generator_for(0, "augment", number)) for number in range(40)]
    masks = {float(x) for row in made for x, old in zip(row[0], values[0], strict=True) if x != old and not np.isnan(x)}
    assert masks == {expected}


def test_integers_get_integer_masks_only() -> None:
    values = np.array([[3, 4, 4]], np.uint8)
    made = [SpecAugment(3, 0, mask_value="mean", p=1.0)(values, generator_for(0, "augment", n)) for n in range(20)]
    assert {row.dtype for row in made} == {np.dtype(np.uint8)}
    assert {int(x) for row in made for x in row[0][:1]} == {3, 4}
    for wrong in (0.5, -1, 256):
        with pytest.raises(OptionError, match="must fit uint8"):
            SpecAugment(mask_value=wrong, p=1.0)(values, generator_for(0, "augment"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_mask_param": -1}, "time_mask_param must be an integer >= 0, got -1"),
        ({"freq_mask_param": 1.5}, "freq_mask_param must be an integer >= 0, got 1.5"),
        ({"num_time_masks": True}, "num_time_masks must be an integer >= 0, got True"),
        ({"num_freq_masks": -2}, "num_freq_masks must be an integer >= 0, got -2"),
        ({"mask_value": "max"}, "mask_value must be a number or one of 'mean', 'min', got 'max'"),
        ({"mask_value": np.nan}, "mask_value must be a finite number, got nan"),
        ({"p": 1.2}, "p must be a finite number >= 0 and <= 1, got 1.2"),
        ({"field": 1.0}, "field must be a name, .*, got 1.0"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SpecAugment(**options)


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5, 5)])
def test_items_that_are_no_spectrogram_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match=r"\(channel, frequency, time\), got shape"):
        SpecAugment(p=0.0)(np.ones(shape), generator_for(0, "augment"))


# -- how much of it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "classes", "size", "expected"),
    [
        (49, 1, (224, 313), (25, 10, 1, 1, 0.6)),
        (50, 1, (224, 313), (39, 14, 1, 1, 0.8)),
        (99 * 31, 31, (400, 400), (40, 15, 1, 1, 0.8)),
        (100, 1, (224, 313), (50, 18, 2, 1, 0.9)),
        (10_000, 2, (240, 60), (10, 20, 2, 1, 0.9)),
        (10, 31, (40, 48), (4, 2, 1, 1, 0.6)),
    ],
)
def test_recommended_masks_follow_the_samples_per_class_and_the_size(
    samples: int, classes: int, size: tuple[int, int], expected: tuple[float, ...]
) -> None:
    params = get_recommended_params(samples, classes, size)
    names = ("time_mask_param", "freq_mask_param", "num_time_masks", "num_freq_masks", "p")
    assert params == dict(zip(names, expected, strict=True))
    SpecAugment(**params)


def test_aggressive_augmentation_has_more_masks_and_noise() -> None:
    plain, more = (get_augmentation_params(1000, 5, aggressive) for aggressive in (False, True))
    assert plain["spec_augment_params"] == get_recommended_params(1000, 5)
    for kind, maker in (("spec_augment_params", SpecAugment), ("gaussian_noise_params", GaussianNoise)):
        maker(**plain[kind])
        maker(**more[kind])
        assert all(more[kind][name] >= value for name, value in plain[kind].items())
    assert more["spec_augment_params"]["num_freq_masks"] == 2
    assert more["spec_augment_params"]["p"] == 1.0
    for wrong in ((0, 5), (5, 0), (1.5, 2)):
        with pytest.raises(OptionError, match="must be an integer >= 1"):
            get_augmentation_params(*wrong)
    with pytest.raises(OptionError, match=r"input_size must be .*, got 224"):
        get_recommended_params(5, 5, 224)  # type: ignore[arg-type]


def test_without_a_generator_torchs_global_state_is_used() -> None:
    augment, ones = SpecAugment(time_mask_param=9, p=1.0), np.ones((4, 16))
    torch.manual_seed(3)
    seen = [augment(ones).tolist() for _ in range(8)]
    torch.manual_seed(3)
    assert [augment(ones).tolist() for _ in range(8)] == seen
    assert len({str(found) for found in seen}) > 1
