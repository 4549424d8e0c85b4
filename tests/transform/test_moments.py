"""Moments of blocks equal those of the whole, however it is divided; NaNs, offsets and constants do no harm."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.moments import Moments


def exact(values: NDArray[Any]) -> tuple[int, float, float]:
    """Count, mean and deviation of a column, in fractions: nothing is rounded before the end."""
    kept = [Fraction(float(value)) for value in values.ravel() if math.isfinite(float(value))]
    if not kept:
        return 0, math.nan, math.nan
    mean = sum(kept) / len(kept)
    variance = sum((value - mean) ** 2 for value in kept) / len(kept)
    return len(kept), float(mean), math.sqrt(variance)


def matches(moments: Moments, whole: NDArray[Any], *, scale: float | None = None) -> None:
    """`whole` has channels on its last axis."""
    columns = whole.reshape(-1, whole.shape[-1])
    for channel in range(columns.shape[1]):
        column = columns[:, channel].astype(np.float64)
        count, mean, std = exact(column)
        finite = column[np.isfinite(column)]
        assert moments.count[channel] == count
        assert moments.n_nan[channel] == np.isnan(column).sum()
        assert moments.n_infinite[channel] == np.isinf(column).sum()
        size = (np.abs(finite).max() if count else 0.0) if scale is None else scale
        np.testing.assert_allclose(moments.mean[channel], mean, rtol=1e-12, atol=1e-13 * size)
        np.testing.assert_allclose(moments.std[channel], std, rtol=1e-9, atol=1e-13 * size)
        assert moments.minimum[channel] == (finite.min() if count else pytest.approx(math.nan, nan_ok=True))
        assert moments.maximum[channel] == (finite.max() if count else pytest.approx(math.nan, nan_ok=True))


def of(block: Any, **options: Any) -> Moments:
    moments = Moments(**options)
    moments.update(block)
    return moments


FLOATS = st.floats(-1e6, 1e6, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e9])


@given(
    whole=hnp.arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3)), elements=FLOATS),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    updated=st.booleans(),
)
def test_pieces_give_the_moments_of_the_whole(whole, cuts, updated):
    pieces = np.split(whole, sorted(min(cut, len(whole)) for cut in cuts))
    moments = Moments()
    for piece in pieces:
        if updated:
            moments.update(piece)
        else:
            moments = moments.merge(of(piece))
    matches(moments, whole)


@given(
    noise=hnp.arrays(np.float64, (20, 2, 2), elements=st.floats(-1, 1)),
    offset=st.sampled_from([1e9, -1e12, 3e15]),
    cut=st.integers(0, 20),
)
def test_a_large_offset_costs_no_digits(noise, offset, cut):
    whole = noise + offset
    matches(of(whole[:cut]).merge(of(whole[cut:])), whole, scale=1e-3)


def test_small_noise_on_a_large_offset_over_many_pieces():
    whole = 1e9 + np.random.default_rng(0).normal(scale=1e-3, size=(300, 1000, 2))
    moments = Moments()
    for piece in np.array_split(whole, 17):
        moments = moments.merge(of(piece))
    columns = whole.reshape(-1, 2).astype(np.longdouble) - np.longdouble(10) ** 9
    np.testing.assert_allclose(moments.std, columns.std(axis=0).astype(float), rtol=1e-9)
    np.testing.assert_allclose(moments.mean - 1e9, columns.mean(axis=0).astype(float), atol=3e-7)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -3.7e-300, 5e307, 0.0])
def test_a_constant_channel_has_a_deviation_of_exactly_zero(value):
    moments = Moments()
    for n_items in (1, 7, 100_000, 3):
        moments = moments.merge(of(np.full((n_items, 2, 1), value)))
        moments.update(np.full((3, 1, 1), value))
    assert moments.std.tolist() == [0.0]
    assert moments.mean.tolist() == [value]
    assert moments.minimum.tolist() == moments.maximum.tolist() == [value]


def test_each_channel_leaves_out_its_own_nans():
    block = np.array([[[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]]])
    moments = of(block)
    assert moments.count.tolist() == [2, 1, 0]
    assert moments.n_nan.tolist() == [0, 1, 2]
    assert moments.mean.tolist()[:2] == [2.0, 5.0]
    assert moments.std.tolist()[:2] == [1.0, 0.0]
    assert np.isnan([moments.mean[2], moments.std[2], moments.minimum[2], moments.maximum[2]]).all()


def test_infinities_are_counted_and_left_out():
    moments = of(np.array([[[np.inf, 1.0], [2.0, -np.inf], [4.0, np.inf]]]))
    assert moments.n_infinite.tolist() == [1, 2]
    assert moments.count.tolist() == [2, 1]
    assert moments.mean.tolist() == [3.0, 1.0]
    assert moments.maximum.tolist() == [4.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "per", "expected"),
    [
        ((6,), "channel", ()),
        ((6, 4), "channel", ()),
        ((6, 4, 3), "channel", (3,)),
        ((6, 1, 1), "channel", (1,)),
        ((6, 2, 5, 3), "channel", (3,)),
        ((6, 4, 3), "scalar", ()),
    ],
)
def test_channels_lie_on_the_last_axis_of_items_of_two_dimensions_or_more(shape, per, expected):
    block = np.random.default_rng(1).normal(size=shape)
    moments = of(block, per=per)
    axes = tuple(range(block.ndim - len(expected)))
    assert moments.mean.shape == moments.std.shape == moments.count.shape == moments.minimum.shape == expected
    np.testing.assert_allclose(moments.mean, block.mean(axis=axes), rtol=1e-12)
    np.testing.assert_allclose(moments.std, block.std(axis=axes), rtol=1e-12)
    assert np.array_equal(moments.minimum, block.min(axis=axes))


@pytest.mark.parametrize("dtype", ["bool", "i1", "u1", "i2", ">i4", "u8", "f2", ">f4", "f8", "longdouble"])
def test_numbers_of_every_width_are_taken(dtype):
    block = (np.arange(60).reshape(5, 4, 3) * 7 % 50).astype(dtype)
    moments = of(block)
    np.testing.assert_allclose(moments.mean, block.astype(float).mean(axis=(0, 1)), rtol=1e-12)
    np.testing.assert_allclose(moments.std, block.astype(float).std(axis=(0, 1)), rtol=1e-12)


def test_blocks_in_any_layout_give_the_same_moments():
    block = np.random.default_rng(2).normal(size=(50, 40, 30))
    turned = np.ascontiguousarray(block.transpose(2, 1, 0)).transpose(2, 1, 0)
    assert of(block) == of(turned)
    assert of(block[::2]) == of(block[::2].copy())


def test_the_block_stays_as_it_was():
    block = np.array([[[1.0, np.nan], [np.inf, 4.0]]])
    kept = block.copy()
    block.flags.writeable = False
    of(block)
    np.testing.assert_array_equal(block, kept)


# -- merging -----------------------------------------------------------------------------------------------------------


@given(
    parts=st.lists(
        hnp.arrays(np.float64, st.tuples(st.integers(0, 5), st.just(2), st.just(2)), elements=FLOATS), max_size=6
    ),
    at=st.integers(0, 6),
)
def test_merging_is_associative_up_to_rounding_and_the_same_order_gives_the_same_bits(parts, at):
    one_by_one, again = Moments(), Moments()
    for part in parts:
        one_by_one, again = one_by_one.merge(of(part)), again.merge(of(part))
    assert one_by_one.to_json() == again.to_json()
    left, right = Moments(), Moments()
    for number, part in enumerate(parts):
        left, right = (left.merge(of(part)), right) if number < at else (left, right.merge(of(part)))
    grouped = left.merge(right)
    assert grouped.count.tolist() == one_by_one.count.tolist()
    np.testing.assert_allclose(grouped.mean, one_by_one.mean, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(grouped.std, one_by_one.std, rtol=1e-9, atol=1e-6)


def test_merging_with_nothing_changes_no_bit_on_either_side():
    some = of(np.random.default_rng(3).normal(size=(9, 3, 2)))
    nothing, unseen = of(np.empty((0, 3, 2))), Moments()
    for merged in (some.merge(nothing), nothing.merge(some), some.merge(unseen), unseen.merge(some)):
        assert merged.to_json() == some.to_json()
    assert unseen.merge(unseen) == Moments()
    assert unseen.mean.shape == ()
    assert np.isnan(unseen.mean)
    assert unseen.count == 0


def test_merging_changes_neither_side():
    left, right = of(np.ones((3, 2, 2))), of(np.zeros((3, 2, 2)))
    before = left.to_json(), right.to_json()
    merged = left.merge(right)
    merged.update(np.ones((1, 2, 2)))
    left.mean[:] = 7
    assert (left.to_json(), right.to_json()) == before


# -- JSON --------------------------------------------------------------------------------------------------------------


@given(whole=hnp.arrays(np.float64, (3, 2, 2), elements=st.floats(-1e300, 1e300) | st.just(math.nan)))
def test_json_keeps_every_bit(whole):
    moments = of(whole)
    text = json.dumps(moments.to_json(), allow_nan=False)
    back = Moments.from_json(json.loads(text))
    assert back == moments
    assert back.to_json() == moments.to_json()
    for name in ("mean", "std", "minimum", "maximum", "count", "n_nan", "n_infinite"):
        assert getattr(back, name).tobytes() == getattr(moments, name).tobytes()
    back.update(whole)
    moments.update(whole)
    assert back == moments


@pytest.mark.parametrize("block", [None, np.array([1.5, 2.5]), np.empty((0, 2, 3))])
def test_json_of_little_or_nothing_comes_back(block):
    moments = Moments() if block is None else of(block)
    back = Moments.from_json(json.loads(json.dumps(moments.to_json(), allow_nan=False)))
    assert back == moments
    assert back.mean.shape == moments.mean.shape


@pytest.mark.parametrize(
    "edit", [{"version": 99}, {"per": "row"}, {"origin": [1.0]}, {"count": "many"}, {"offset": None}, {"n_channels": 5}]
)
def test_values_that_are_no_stored_moments_are_refused(edit):
    stored = of(np.ones((2, 2, 2))).to_json()
    with pytest.raises(OptionError):
        Moments.from_json(stored | edit)
    with pytest.raises(OptionError, match=r"[Ss]tored moments must be"):
        Moments.from_json({"version": 2})


# -- invalid arguments -------------------------------------------------------------------------------------------------


def test_fields_that_differ_are_refused():
    moments = of(np.ones((2, 4, 3)))
    with pytest.raises(OptionError, match="must have 3 channels, like the first, got 5 channels"):
        moments.update(np.ones((2, 4, 5)))
    with pytest.raises(OptionError, match="must have 3 channels, like the first, got single values"):
        moments.merge(of(np.ones(4)))
    with pytest.raises(OptionError, match="same per, got 'channel' and 'scalar'"):
        moments.merge(Moments(per="scalar"))
    assert moments == of(np.ones((2, 4, 3)))


@pytest.mark.parametrize(
    "block", [np.array(["a"]), np.array([1j]), np.array([None]), np.array(["2026-01-01"], "M8[D]"), np.float64(3)]
)
def test_what_has_no_mean_is_refused(block):
    with pytest.raises(OptionError):
        Moments().update(block)


def test_an_unknown_per_is_refused():
    with pytest.raises(OptionError, match="per must be one of 'channel', 'scalar', got "):
        Moments(per="pixel")  # type: ignore[arg-type]
