"""SpecAugment: random masks in time and frequency (Park et al., 2019)."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.transform.field_transform import FieldTransform, Fill, check_fill, check_probability, fill_value

__all__ = ["SpecAugment"]

_LOG = logging.getLogger("penstock")
_TOO_LARGE: set[tuple[str, int]] = set()  # parameters that were reported


@dataclass(frozen=True, slots=True)
class SpecAugment(FieldTransform):
    """Masks random stripes of a spectrogram of shape (frequency, time) or (channel, frequency, time).

    The width of a mask is uniform in 0 … `..._mask_param`, and its position is uniform, and the same in all channels.
    An axis is never masked entirely: on one that is not longer than the parameter, masks are narrower than the axis,
    which is logged once, and a mask that would hide the last visible place is left out.

    Examples
    --------
    >>> augment = SpecAugment(time_mask_param=2, freq_mask_param=0, p=1.0)
    >>> augment(np.ones((2, 6)), np.random.default_rng(1)).tolist()
    [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    """

    time_mask_param: int = 40
    """Width of the widest mask in time, in columns."""

    freq_mask_param: int = 15
    """Width of the widest mask in frequency, in bins."""

    num_time_masks: int = 1
    num_freq_masks: int = 1
    mask_value: Fill = 0.0
    """Value of masked places, in the units of the data: 0.0 is silence in a linear spectrogram and the mean of a
    standardized one, but full volume in decibels. `"mean"` and `"min"` are those of the item."""

    p: float = 0.8
    """Probability that an item is changed."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def _check(self) -> None:
        for name in ("time_mask_param", "freq_mask_param", "num_time_masks", "num_freq_masks"):
            check_integer(name, getattr(self, name), at_least=0)
        check_fill("mask_value", self.mask_value)
        check_probability("p", self.p)

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        if values.ndim not in (2, 3):
            raise OptionError(
                "SpecAugment takes items of shape (frequency, time) or (channel, frequency, time), got shape "
                f"{values.shape}. It is called for each item of a batch."
            )
        if rng.random() >= self.p:
            return values
        masked, fill = values.copy(), fill_value(values, self.mask_value)
        n_bins, n_columns = values.shape[-2:]
        for stripe in _stripes("time_mask_param", n_columns, self.time_mask_param, self.num_time_masks, rng):
            masked[..., stripe] = fill
        for stripe in _stripes("freq_mask_param", n_bins, self.freq_mask_param, self.num_freq_masks, rng):
            masked[..., stripe, :] = fill
        return masked


def _stripes(name: str, length: int, widest: int, count: int, rng: np.random.Generator) -> list[slice]:
    """Return the masks of an axis of `length` places; together, they leave at least one place visible."""
    if widest >= length and count:
        if (name, widest) not in _TOO_LARGE:
            _TOO_LARGE.add((name, widest))
            _LOG.warning(
                "SpecAugment: %s=%s is too large for the data: an item has %s places on that axis, of which masks must "
                "leave one. Masks there are narrower. Use a smaller %s.",
                name, widest, length, name,
            )  # fmt: skip
        widest = max(0, length - 1)
    stripes: list[slice] = []
    hidden = np.zeros(length, bool)
    for _ in range(count):
        width = int(rng.integers(0, widest, endpoint=True))
        begin = int(rng.integers(0, length - width, endpoint=True))
        stripe = slice(begin, begin + width)
        if hidden[:begin].all() and hidden[begin + width :].all():
            continue
        hidden[stripe] = True
        stripes.append(stripe)
    return stripes
