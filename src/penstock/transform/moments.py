"""Streaming mean and standard deviation, which can be merged across processes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_choice
from penstock.core.errors import OptionError
from penstock.transform.field_transform import check_axis
from penstock.transform.read_values import read_blocks

__all__ = ["Moments"]

_Floats = NDArray[np.float64]
_Int64s = NDArray[np.int64]

_TABLE_VALUES = 1 << 16  # per update: half a megabyte as float64, which stays in the cache of a core
_VERSION = 2
_STORED = ("count", "n_nan", "n_infinite"), ("origin", "offset", "squares", "minimum", "maximum")


class Moments:
    """Streaming count, mean, standard deviation and range, per channel or frequency bin.

    Blocks are measured relative to one of their values and then merged (Chan, Golub and LeVeque), so a large offset
    costs no digits and a constant channel has a deviation of exactly 0. Merging is associative up to rounding; the same
    updates and merges in the same order give the same bits.

    NaNs are left out, per channel, and counted in `n_nan`. Infinities have no mean: they are left out, too, and counted
    in `n_infinite`.

    Parameters
    ----------
    per
        `"channel"`: items of two or more dimensions have their channels on the last axis; all values of smaller items
        are one channel. `"scalar"`: all values are one channel.
    axis
        Channel axis of an item, if it is not the last: 0 for images of shape (channel, height, width), -2 for the
        frequency bins of spectrograms of shape (channel, frequency, time).

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

    def __init__(self, per: Literal["channel", "scalar"] = "channel", *, axis: int = -1) -> None:
        self._per: str = check_choice("per", per, ("channel", "scalar"))
        self._axis = check_axis(axis)
        if per == "scalar" and axis != -1:
            raise OptionError(f"axis must be left out with per='scalar', which has no channels, got {axis}.")
        self._n_channels: int | None = None
        """0 if values are not per channel; None before the first update."""
        self._reset(1)

    def _reset(self, width: int) -> None:
        self._count: _Int64s = np.zeros(width, np.int64)
        self._nan: _Int64s = np.zeros(width, np.int64)
        self._infinite: _Int64s = np.zeros(width, np.int64)
        self._origin: _Floats = np.zeros(width)
        self._offset: _Floats = np.zeros(width)
        """Mean minus origin (a value that was seen); a single number for both would lose digits to a large offset."""
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
        """Return the moments of some items of a source or dataset, read once, in storage order.

        A source that can `prepare` items reads the next ones while the last are added up. If its files take more than
        half of the memory, items that were not in memory before are released when they were read.

        Parameters
        ----------
        data
            A `Source`, a torch dataset, an array, or any object with `len` and `[i]`.
        items
            Items to read: those used for training. An item that is named twice counts twice. None: all.
        field
            Field of an item: its name, or its index in a tuple. None: the item itself, the first element of a tuple, or
            the only field of a source.
        memory_bytes
            Memory budget; at least one item is held.
        """
        moments = cls(per, axis=axis)
        for block in read_blocks(data, items, field, memory_bytes):
            moments.update(block)
        return moments

    @property
    def per(self) -> str:
        """`"channel"` or `"scalar"`."""
        return self._per

    @property
    def axis(self) -> int | None:
        """Axis of an item that `mean` and `std` belong to; None if they are single values."""
        return self._axis if self._n_channels else None

    @property
    def count(self) -> _Int64s:
        """Finite values seen, per channel; of shape () if there is only one channel."""
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
        """Mean per channel; NaN if no value was seen."""
        return self._reshape(np.where(self._count > 0, self._origin + self._offset, np.nan))

    @property
    def std(self) -> _Floats:
        """Population standard deviation per channel; 0 if constant, NaN if no value was seen."""
        deviation = np.sqrt(self._squares / np.maximum(self._count, 1))
        return self._reshape(np.where(self._count > 0, deviation, np.nan))

    @property
    def minimum(self) -> _Floats:
        """Smallest value per channel; NaN if none was seen."""
        return self._reshape(np.where(self._count > 0, self._low, np.nan))

    @property
    def maximum(self) -> _Floats:
        """Largest value per channel; NaN if none was seen."""
        return self._reshape(np.where(self._count > 0, self._high, np.nan))

    def update(self, block: ArrayLike) -> None:
        """Add items, of shape (items, ...): real numbers or booleans."""
        values = np.asarray(block)
        if values.dtype.kind not in "fiub":
            raise OptionError(f"A block must be real numbers or booleans, got {values.dtype}.")
        if not values.ndim:
            raise OptionError("A block must be an array with items on its first axis, got a single value.")
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
        # New memory for each table would cost more than its sums. The order in memory decides the order of additions.
        room = np.empty((min(rows, len(table)), width)) if table.flags.c_contiguous else None
        for begin in range(0, len(table), rows):
            part = table[begin : begin + rows]
            if room is None:
                self._add_table(part.astype(np.float64))
            else:
                np.copyto(room[: len(part)], part, casting="unsafe")
                self._add_table(room[: len(part)])

    def _with_channels_last(self, values: NDArray[Any]) -> NDArray[Any]:
        axis = self._axis + 1 if self._axis >= 0 else self._axis  # the first axis of a block is that of the items
        if not -values.ndim < axis < values.ndim:
            raise OptionError(
                f"Items must have axis {self._axis}, which these moments are along, got shape {values.shape[1:]}."
            )
        return np.moveaxis(values, axis, -1)

    def _add_table(self, table: _Floats) -> None:
        """Add a table of shape (values, channels), which is overwritten."""
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = table.min(axis=0), table.max(axis=0)  # NaN if there is one
            is_finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
            if is_finite:
                count = np.full(table.shape[1], len(table))
                origin = table[0].copy()
                table -= origin
            else:
                finite = np.isfinite(table)
                count = finite.sum(axis=0)
                n_nan = np.isnan(table).sum(axis=0)
                self._nan = self._nan + n_nan
                self._infinite = self._infinite + (len(table) - count - n_nan)
                low = np.where(finite, table, np.inf).min(axis=0)
                high = np.where(finite, table, -np.inf).max(axis=0)
                origin = np.where(count > 0, table[finite.argmax(axis=0), np.arange(table.shape[1])], 0.0)
                table -= origin
                table[~finite] = 0.0
            n_values = np.maximum(count, 1)
            offset = table.sum(axis=0) / n_values
            table -= offset
            if not is_finite:
                table[~finite] = 0.0
            # Correct the squares for the rounding error of the mean.
            error = table.sum(axis=0)
            squares = np.square(table, out=table).sum(axis=0)
            squares -= np.where(np.isfinite(squares), np.square(error) / n_values, 0.0)
            self._add_sums(count, origin, offset, np.maximum(squares, 0.0))
            self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of all values seen by this one and `other`; neither is changed."""
        if other._per != self._per:
            raise OptionError(f"Merged moments must have the same per, got {self._per!r} and {other._per!r}.")
        if other._axis != self._axis:
            raise OptionError(f"Merged moments must have the same axis, got {self._axis} and {other._axis}.")
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
        weight = count / np.maximum(total, 1)
        # An empty side leaves the other unchanged, to the last bit.
        empty, both = self._count == 0, (self._count > 0) & (count > 0)
        distance = np.where(both, (origin - self._origin) + (offset - self._offset), 0.0)
        self._squares = self._squares + squares + np.square(distance) * (self._count * weight)
        self._offset = np.where(empty, offset, self._offset + distance * weight)
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
            raise OptionError(
                f"All blocks must have {known}, like the first, got {given}. Use one Moments for each field."
            )

    def _reshape(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.copy() if self._n_channels else values.reshape(()).copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes with every update

    def __repr__(self) -> str:
        return f"Moments(mean={self.mean.tolist()}, std={self.std.tolist()}, count={self.count.tolist()})"

    def to_json(self) -> dict[str, Any]:
        """Return the moments as plain JSON; `from_json` restores them to the last bit."""
        counts = (self._count, self._nan, self._infinite)
        sums = (self._origin, self._offset, self._squares, self._low, self._high)
        return {
            "version": _VERSION,
            "per": self._per,
            "axis": self._axis,
            "n_channels": self._n_channels,
            # For readers of the file; all others restore the moments.
            "mean": _to_plain(np.atleast_1d(self.mean)),
            "std": _to_plain(np.atleast_1d(self.std)),
            **{name: table.tolist() for name, table in zip(_STORED[0], counts, strict=True)},
            **{name: _to_plain(table) for name, table in zip(_STORED[1], sums, strict=True)},
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the moments from the result of `to_json`."""
        if isinstance(stored, Mapping) and stored.get("version", _VERSION) != _VERSION:
            raise OptionError(
                f"The version of stored moments must be {_VERSION}, got {stored['version']!r}. Read them with the "
                "version of Penstock that stored them."
            )
        try:
            moments = cls(stored["per"], axis=stored["axis"])
            n_channels = stored["n_channels"]
            moments._n_channels = None if n_channels is None else int(n_channels)
            counts = [np.array(stored[name], np.int64) for name in _STORED[0]]
            sums = [np.array([float(value) for value in stored[name]]) for name in _STORED[1]]
        except OptionError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(
                f"Stored moments must be what to_json() returned: {type(error).__name__}: {error}."
            ) from error
        width = moments._n_channels or 1
        if any(table.shape != (width,) for table in (*counts, *sums)):
            raise OptionError(f"Stored moments must be what to_json() returned: not all lists have {width} values.")
        moments._count, moments._nan, moments._infinite = counts
        moments._origin, moments._offset, moments._squares, moments._low, moments._high = sums
        return moments


def _to_plain(values: _Floats) -> list[float | str]:
    """Return values for JSON, which are exact; infinities, which JSON does not have, become text."""
    return [value if math.isfinite(value) else repr(value) for value in values.tolist()]
