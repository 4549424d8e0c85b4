"""Windows of equal length at equal distances."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.convert.windows import Windows, check_overlap
from penstock.core.errors import OptionError

overlaps = st.one_of(st.sampled_from([0.0, 0.5, 0.99]), st.floats(0, 1, exclude_max=True))


@given(total=st.integers(0, 500), length=st.integers(1, 60), overlap=overlaps)
def test_windows_are_the_starts_at_equal_distances_that_fit(total: int, length: int, overlap: float) -> None:
    windows = Windows(total, length, overlap)
    starts = windows.starts(np.arange(windows.count))
    assert starts.tolist() == list(range(0, total - length + 1, windows.step))


@given(total=st.integers(0, 500), length=st.integers(1, 60), overlap=overlaps)
def test_what_is_left_out_are_the_units_after_the_last_window(total: int, length: int, overlap: float) -> None:
    windows = Windows(total, length, overlap)
    covered = [start + length for start in windows.starts(np.arange(windows.count)).tolist()]
    assert windows.left_out == total - max(covered, default=0)
    if total >= length:
        assert 0 <= windows.left_out < windows.step


@given(length=st.integers(1, 500), overlap=overlaps)
def test_the_step_is_what_the_overlap_leaves_to_the_nearest_unit(length: int, overlap: float) -> None:
    step = Windows(10_000, length, overlap).step
    assert 1 <= step <= length
    assert step == 1 or abs(step - length * (1 - overlap)) <= 0.5


def test_no_overlap_covers_every_unit_once_and_half_repeats_half() -> None:
    assert Windows(9, 3).starts(np.arange(3)).tolist() == [0, 3, 6]
    assert Windows(8, 4, 0.5).starts(np.arange(3)).tolist() == [0, 2, 4]
    assert Windows(102, 100, 0.99).starts(np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("overlap", [1, 1.0, 1.5, -0.1, float("nan"), True, "0.5", None])
def test_an_invalid_overlap_is_refused(overlap: object) -> None:
    with pytest.raises(OptionError, match=">= 0 and < 1"):
        check_overlap(overlap)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=">= 0 and < 1"):
        Windows(10, 2, overlap)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, -3, 2.5])
def test_an_invalid_length_is_refused(length: object) -> None:
    with pytest.raises(OptionError, match="The window length must be"):
        Windows(10, length)  # type: ignore[arg-type]
