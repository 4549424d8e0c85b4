"""Mean and deviation of values that are seen piece by piece, in any number of places, and brought together."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError
from penstock.transform.checks import check_axis
from penstock.transform.read_values import read_blocks

__all__ = ["Moments"]

_Floats = NDArray[np.float64]
_Int64s = NDArray[np.int64]

_TABLE_VALUES = 1 << 16  # looked at together: half a megabyte as float64, which stays in the cache of a core
_VERSION, _VERSION_WITH_AXIS = 1, 2  # the second where channels do not lie on the last axis: others would misread it


class Moments:
    """Count, mean, standard deviation and range of values that stream by, per channel or frequency bin.

    Each piece is measured from a value of its own and then merged (Chan, Golub and LeVeque), so that a large offset
    costs no digits and a constant channel has a deviation of exactly 0. Merging is associative up to rounding; the same
    updates and merges in the same order give the same bits.

    NaNs are left out, each channel for itself. Infinities have no mean: they are left out as well and counted in
    `n_infinite`, for whoever reads the result to judge.

    Parameters
    ----------
    per
        `"channel"`: items of two or more dimensions have their channels on the last axis; smaller items have one
        channel, which is all of their values. `"scalar"`: one channel, whatever the items are.
    axis
        The axis of an item that has the channels, where it is not the last one: 0 for images of (channel, height,
        width), -2 for the frequency bins of spectrograms of (channel, frequency, time).

    Examples
    --------
    >>> left, right = Moments(), Moments()
    >>> left.update(np.array([[[1.0, 10.0], [3.0, np.nan]]]))  # one item: two times, two channels
    >>> right.update(np.array([[[5.0, 10.0]]]))
    >>> both = left.merge(right)
    >>> both.mean.tolist(), both.std.round(3).tolist(), both.count.tolist()
    ([3.0, 10.0], [1.633, 0.0], [3, 2])
    >>> Moments.from_json(both.to_json()) == both
    True
    >>> spectrograms = np.zeros((10, 1, 3, 50)) + np.array([[1.0], [2.0], [3.0]])  # channel, frequency, time
    >>> Moments.over(spectrograms, [0, 1, 2, 4], axis=-2).mean.tolist()
    [1.0, 2.0, 3.0]
    """

    __slots__ = (
        "_axis",
        "_count",
        "_high",
        "_infinite",
        "_low",
        "_n_channels",
        "_nan",
        "_offset",
        "_origin",
        "_per",
        "_squares",
    )

    def __init__(self, per: Literal["channel", "scalar"] = "channel", *, axis: int = -1) -> None:
        if per not in ("channel", "scalar"):
            raise OptionError(f"per={per!r}; use 'channel' or 'scalar'.")
        self._per = per
        self._axis = check_axis(axis)
        if per == "scalar" and axis != -1:
            raise OptionError(f"axis={axis} tells channels apart, and per='scalar' does not; leave out one of them.")
        self._n_channels: int | None = None
        """0 where there are none to tell apart; None before the first update."""
        self._reset(1)

    def _reset(self, width: int) -> None:
        self._count: _Int64s = np.zeros(width, np.int64)
        self._nan: _Int64s = np.zeros(width, np.int64)
        self._infinite: _Int64s = np.zeros(width, np.int64)
        self._origin: _Floats = np.zeros(width)
        self._offset: _Floats = np.zeros(width)
        """Of the mean from the origin, a value that was seen: in one number, it would lose digits to what is common."""
        self._squares: _Floats = np.zeros(width)
        self._low: _Floats = np.full(width, np.inf)
        self._high: _Floats = np.full(width, -np.inf)

    @classmethod
    def over(
        cls,
        data: Any,
        items: Iterable[int] | ArrayLike | None = None,
        *,
        per: Literal["channel", "scalar"] = "channel",
        axis: int = -1,
        field: str | int | None = None,
        memory_bytes: int = 1 << 26,
    ) -> Self:
        """Return the moments of some items of a source or data set, read once, in the order in which they are stored.

        Parameters
        ----------
        data
            A `Source`, a torch data set, an array, or whatever else has `len` and `[i]`.
        items
            Which ones: those of the training. An item that is named twice counts twice. None: all.
        field
            What of an item counts: its name, or its place in a tuple. None: the item itself, the first of a tuple, the
            only field of a source.
        memory_bytes
            What may be held at a time; one item at the least.
        """
        moments = cls(per, axis=axis)
        for block in read_blocks(data, items, field, memory_bytes):
            moments.update(block)
        return moments

    @property
    def per(self) -> str:
        """What the values are told apart by."""
        return self._per

    @property
    def axis(self) -> int | None:
        """The axis of an item that `mean` and `std` lie along; None where they are single values."""
        return self._axis if self._n_channels else None

    @property
    def count(self) -> _Int64s:
        """Finite values seen, per channel; of shape () where there is only one."""
        return self._reshape(self._count)

    @property
    def n_nan(self) -> _Int64s:
        """NaNs seen, and left out of everything else."""
        return self._reshape(self._nan)

    @property
    def n_infinite(self) -> _Int64s:
        """Infinities seen, and left out of everything else."""
        return self._reshape(self._infinite)

    @property
    def mean(self) -> _Floats:
        """Mean per channel; NaN where no value was seen."""
        return self._reshape(np.where(self._count > 0, self._origin + self._offset, np.nan))

    @property
    def std(self) -> _Floats:
        """Standard deviation of the population, per channel: 0 where it is constant, NaN where no value was seen."""
        deviation = np.sqrt(self._squares / np.maximum(self._count, 1))
        return self._reshape(np.where(self._count > 0, deviation, np.nan))

    @property
    def minimum(self) -> _Floats:
        """Smallest value per channel; NaN where none was seen."""
        return self._reshape(np.where(self._count > 0, self._low, np.nan))

    @property
    def maximum(self) -> _Floats:
        """Largest value per channel; NaN where none was seen."""
        return self._reshape(np.where(self._count > 0, self._high, np.nan))

    def update(self, block: ArrayLike) -> None:
        """Take in items, of shape (items, ...): numbers or booleans of any width."""
        values = np.asarray(block)
        if values.dtype.kind not in "fiub":
            raise OptionError(f"A block of {values.dtype} has no mean; give real numbers or booleans.")
        if not values.ndim:
            raise OptionError("A single value is no block of items; give an array with items on its first axis.")
        if self._per == "channel" and (values.ndim > 2 or self._axis != -1):
            values = self._with_channels_last(values)
            self._set_channels(values.shape[-1])
        else:
            self._set_channels(0)
        width = len(self._count)
        if not values.size:
            return
        # table: (values of a channel, channels)
        table = values.reshape(-1, width)
        rows = max(1, _TABLE_VALUES // width)
        for begin in range(0, len(table), rows):
            self._add_table(table[begin : begin + rows])

    def _with_channels_last(self, values: NDArray[Any]) -> NDArray[Any]:
        axis = self._axis + 1 if self._axis >= 0 else self._axis  # of the block: its first one has the items
        if not -values.ndim < axis < values.ndim:
            raise OptionError(
                f"Items of shape {values.shape[1:]} have no axis {self._axis}; these moments are per index of it."
            )
        return np.moveaxis(values, axis, -1)

    def _add_table(self, piece: NDArray[Any]) -> None:
        """Take in a small table of values and channels."""
        with np.errstate(over="ignore", invalid="ignore"):
            table = piece.astype(np.float64)
            finite = np.isfinite(table)
            if finite.all():
                count = np.full(table.shape[1], len(table))
                low, high = table.min(axis=0), table.max(axis=0)
                origin = table[0]
                centred = table - origin
            else:
                count = finite.sum(axis=0)
                n_nan = np.isnan(table).sum(axis=0)
                self._nan = self._nan + n_nan
                self._infinite = self._infinite + (len(table) - count - n_nan)
                low = np.where(finite, table, np.inf).min(axis=0)
                high = np.where(finite, table, -np.inf).max(axis=0)
                origin = np.where(count > 0, table[finite.argmax(axis=0), np.arange(table.shape[1])], 0.0)
                centred = np.where(finite, table - origin, 0.0)
            n_values = np.maximum(count, 1)
            offset = centred.sum(axis=0) / n_values
            centred -= offset
            if not finite.all():
                centred[~finite] = 0.0
            # What rounding has left of the mean is taken out of the squares.
            squares = np.square(centred).sum(axis=0)
            squares -= np.where(np.isfinite(squares), np.square(centred.sum(axis=0)) / n_values, 0.0)
            self._add_sums(count, origin, offset, np.maximum(squares, 0.0))
            self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of everything that this one and another have seen; both stay as they are."""
        if other._per != self._per:
            raise OptionError(f"Moments per {other._per} cannot be merged with moments per {self._per}.")
        if other._axis != self._axis:
            raise OptionError(f"Moments along axis {other._axis} cannot be merged with moments along {self._axis}.")
        merged = Moments.from_json(self.to_json())
        if other._n_channels is None:
            return merged
        merged._set_channels(other._n_channels)
        merged._nan, merged._infinite = merged._nan + other._nan, merged._infinite + other._infinite
        with np.errstate(over="ignore", invalid="ignore"):
            merged._add_sums(other._count, other._origin, other._offset, other._squares)
        merged._low, merged._high = np.minimum(merged._low, other._low), np.maximum(merged._high, other._high)
        return merged

    def _add_sums(self, count: _Int64s, origin: _Floats, offset: _Floats, squares: _Floats) -> None:
        total = self._count + count
        share = count / np.maximum(total, 1)
        # A side that is empty leaves the other as it is, to the last bit.
        empty, both = self._count == 0, (self._count > 0) & (count > 0)
        apart = np.where(both, (origin - self._origin) + (offset - self._offset), 0.0)
        self._squares = self._squares + squares + np.square(apart) * (self._count * share)
        self._offset = np.where(empty, offset, self._offset + apart * share)
        self._origin = np.where(empty, origin, self._origin)
        self._count = total

    def _set_channels(self, n_channels: int) -> None:
        if self._n_channels is None:
            self._n_channels = n_channels
            self._reset(n_channels or 1)
        elif self._n_channels != n_channels:
            known, given = (
                f"{number} channels" if number else "single values" for number in (self._n_channels, n_channels)
            )
            raise OptionError(f"These moments are of {known}, and {given} were given; use one Moments for each field.")

    def _reshape(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.copy() if self._n_channels else values.reshape(()).copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes with every update

    def __repr__(self) -> str:
        return f"Moments(mean={self.mean.tolist()}, std={self.std.tolist()}, count={self.count.tolist()})"

    def to_json(self) -> dict[str, Any]:
        """Return everything that is known, as JSON; `from_json` gives the same moments back, to the last bit."""
        return {
            "version": _VERSION if self._axis == -1 else _VERSION_WITH_AXIS,
            "per": self._per,
            **({} if self._axis == -1 else {"axis": self._axis}),
            "n_channels": self._n_channels,
            "count": self._count.tolist(),
            "n_nan": self._nan.tolist(),
            "n_infinite": self._infinite.tolist(),
            # For who reads the file; the three that follow are what they are made from.
            "mean": _to_plain(np.atleast_1d(self.mean)),
            "std": _to_plain(np.atleast_1d(self.std)),
            "origin": _to_plain(self._origin),
            "offset": _to_plain(self._offset),
            "squares": _to_plain(self._squares),
            "minimum": _to_plain(self._low),
            "maximum": _to_plain(self._high),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the moments that `to_json` described."""
        try:
            if stored["version"] not in (_VERSION, _VERSION_WITH_AXIS):
                raise OptionError(
                    f"These moments are of version {stored['version']!r}; this Penstock reads up to "
                    f"{_VERSION_WITH_AXIS}."
                )
            moments = cls(stored["per"], axis=stored["axis"] if stored["version"] == _VERSION_WITH_AXIS else -1)
            n_channels = stored["n_channels"]
            moments._n_channels = None if n_channels is None else int(n_channels)
            moments._count, moments._nan, moments._infinite = (
                np.array(stored[name], np.int64) for name in ("count", "n_nan", "n_infinite")
            )
            moments._origin, moments._offset, moments._squares, moments._low, moments._high = (
                np.array([float(value) for value in stored[name]])
                for name in ("origin", "offset", "squares", "minimum", "maximum")
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"These are no stored moments: {type(error).__name__}: {error}.") from error
        width = moments._n_channels or 1
        counts, sums = (moments._count, moments._nan, moments._infinite), (moments._origin, moments._offset)
        if any(table.shape != (width,) for table in (*counts, *sums, moments._squares, moments._low, moments._high)):
            raise OptionError(f"These are no stored moments: not all of their lists have {width} values.")
        return moments


def _to_plain(values: _Floats) -> list[float | str]:
    """Return numbers that JSON holds exactly; infinities, which it does not have, as text."""
    return [value if math.isfinite(value) else repr(value) for value in values.tolist()]
