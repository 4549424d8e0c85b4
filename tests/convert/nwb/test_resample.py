"""Resampling by windows gives slices of the whole resampled series."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from scipy import signal

from penstock.core.errors import OptionError
from penstock.source.audio.resample import Resampler

RATES = [(1000, 500), (1000, 300), (300, 1000), (44_100, 16_000), (24_414.0625, 1000), (1000, 1000), (1000, 999)]


@pytest.mark.parametrize(("rate_in", "rate_out"), RATES)
@few_cases
@given(data=st.data())
def test_a_window_is_the_slice_of_the_whole_recording(rate_in, rate_out, data):
    n_in = data.draw(st.integers(1, 6000))
    rows = np.random.default_rng(n_in).normal(size=(n_in, 2))
    resampler = Resampler(rate_in, rate_out)
    whole = signal.resample_poly(rows, resampler.up, resampler.down, axis=0)
    assert resampler.n_out(n_in) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    read_rows = []

    def read(a, b):
        assert 0 <= a <= b <= n_in
        read_rows.append(b - a)
        return rows[a:b]

    found = resampler.rows(read, n_in, start, stop)
    assert found.shape == (stop - start, 2)
    np.testing.assert_allclose(found, whole[start:stop], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found, resampler.rows(read, n_in, 0, len(whole))[start:stop])


def test_a_window_reads_little_more_than_itself():
    read_rows = []

    def read(a, b):
        read_rows.append((a, b))
        return np.zeros((b - a, 1))

    Resampler(30_000, 1000).rows(read, 10**9, 5000, 5100)
    assert read_rows == [(149_700, 153_271)]  # 10 zero crossings of 30 samples on each side


def test_what_is_above_half_of_the_new_rate_is_gone():
    times = np.arange(20_000) / 1000
    slow, fast = np.sin(2 * np.pi * 5 * times), np.sin(2 * np.pi * 180 * times)
    found = Resampler(1000, 200).rows(lambda a, b: (slow + fast)[a:b, np.newaxis], 20_000, 200, 3800)[:, 0]
    np.testing.assert_allclose(found, slow[1000:19_000:5], atol=0.01)


def test_rates_become_whole_numbers_without_common_divisors():
    assert (Resampler(24_414.0625, 1000).up, Resampler(24_414.0625, 1000).down) == (128, 3125)
    assert (Resampler(11_025, 44_100).up, Resampler(11_025, 44_100).down) == (4, 1)
    assert pickle.loads(pickle.dumps(Resampler(44_100, 16_000))) == Resampler(44_100, 16_000)


@pytest.mark.parametrize(("rate_in", "rate_out"), [(30_000, 0.01), (1, 12_345.678), (30_000.0, 1.0001234)])
def test_rates_that_no_small_ratio_fits_are_refused(rate_in, rate_out):
    with pytest.raises(OptionError, match=r"close to a ratio of integers <= 10000, got .* Hz"):
        Resampler(rate_in, rate_out)


@pytest.mark.parametrize("rate", [0, -1, np.nan, np.inf])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(OptionError, match="must be a sampling rate > 0 in Hz"):
        Resampler(1000, rate)
