"""Resamples windows of a recording: each equals the slice of the whole resampled recording.

The filter is scipy's `resample_poly`: linear phase, anti-aliased, zeros beyond both ends of the recording. Its output
`j` needs only the inputs around `j * down / up`. So a section that begins at a common multiple of both rates and
includes the filter's reach on both sides gives the same output as the whole recording.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError

__all__ = ["Resampler"]

_MAX_FACTOR = 10_000  # of up and down: 24414.0625 Hz to 1 kHz is 128 / 3125
_RATIO_ERROR = 1e-6
_ZEROS = 10  # zero crossings of the filter on each side: the default of resample_poly


@dataclass(frozen=True, slots=True)
class Resampler:
    """Resamples rows along axis 0 from `rate_in` to `rate_out`, in Hz.

    Examples
    --------
    >>> resampler = Resampler(44_100, 16_000)
    >>> resampler.up, resampler.down, resampler.n_out(44_100)
    (160, 441, 16000)
    """

    rate_in: float
    rate_out: float
    up: int = field(init=False)
    down: int = field(init=False)

    def __post_init__(self) -> None:
        for name, rate in (("rate_in", self.rate_in), ("rate_out", self.rate_out)):
            if not np.isfinite(rate) or rate <= 0:
                raise OptionError(f"{name} must be a sampling rate > 0 in Hz, got {rate!r}.")
        larger, smaller = max(self.rate_in, self.rate_out), min(self.rate_in, self.rate_out)
        ratio = (Fraction(smaller) / Fraction(larger)).limit_denominator(_MAX_FACTOR)
        if abs(float(ratio) * larger / smaller - 1) > _RATIO_ERROR:
            raise OptionError(
                f"The ratio of rates must be close to a ratio of integers <= {_MAX_FACTOR}, got {self.rate_in:g} Hz "
                f"and {self.rate_out:g} Hz. Use a rate nearer to {self.rate_in:g} Hz, or a simple fraction of it."
            )
        falling = self.rate_out <= self.rate_in
        object.__setattr__(self, "up", ratio.numerator if falling else ratio.denominator)
        object.__setattr__(self, "down", ratio.denominator if falling else ratio.numerator)

    @property
    def extra_rows(self) -> int:
        """Maximum number of input rows that a window needs in addition to its own."""
        return 2 * (_ZEROS * max(self.up, self.down) // self.up + 1) + self.down

    def n_out(self, n_in: int) -> int:
        """Return the number of output rows for `n_in` input rows."""
        return -(-n_in * self.up // self.down)

    def rows(
        self, read: Callable[[int, int], NDArray[Any]], n_in: int, start_out: int, stop_out: int
    ) -> NDArray[np.float64]:
        """Return resampled rows [start_out, stop_out), reading only the input rows that they need.

        Parameters
        ----------
        read
            Returns input rows [a, b), rows on axis 0.
        n_in
            Number of input rows in the whole recording; beyond them are zeros.
        """
        if self.up == self.down:
            return read(start_out, stop_out).astype(np.float64)
        if stop_out <= start_out:
            return read(0, 0).astype(np.float64)
        reach = _ZEROS * max(self.up, self.down)
        # Begin at a multiple of `down`, where an input and an output row have the same time.
        first = max(0, (start_out * self.down - reach) // self.up) // self.down * self.down
        last = min(n_in, ((stop_out - 1) * self.down + reach) // self.up + 1)
        section = read(first, last).astype(np.float64)
        offset = first // self.down * self.up
        return _resample(section, self.up, self.down)[start_out - offset : stop_out - offset]


def _resample(rows: NDArray[np.float64], up: int, down: int) -> NDArray[np.float64]:
    try:
        from scipy import signal  # type: ignore[import-untyped]  # noqa: PLC0415  # scipy has no types
    except ImportError as error:
        raise MissingDependency("scipy", "audio", "Resampling") from error
    out: NDArray[np.float64] = signal.resample_poly(rows, up, down, axis=0, window=_taps(up, down))
    return out


@lru_cache(maxsize=8)
def _taps(up: int, down: int) -> NDArray[np.float64]:
    """Return the filter that `resample_poly` would design; cached, because it is the same for every window."""
    from scipy import signal  # noqa: PLC0415

    steps = max(up, down)
    taps: NDArray[np.float64] = signal.firwin(2 * _ZEROS * steps + 1, 1 / steps, window=("kaiser", 5.0))
    return taps
