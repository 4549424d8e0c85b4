"""What all recordings of a dataset have in common, so that every item has the same fields, units and columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.convert.nwb.find import Modalities
from penstock.convert.nwb.options import NWBOptions

__all__ = ["Common", "Completion", "Member"]

Member = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a field or a mask; the dtype of a text is "str"."""


@dataclass(frozen=True, slots=True, repr=False)
class Common:
    """What every item of a dataset has, whatever its own file has."""

    unit_ids: tuple[int, ...] | None = None
    """The unit of each column of spikes; None: those of the file."""

    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The columns of a field, by field; those of the file if it is not named here."""

    absent: tuple[tuple[str, tuple[Member, ...]], ...] = ()
    """Fields that some files lack, each with its mask."""

    masks_spikes: bool = False
    """Whether items have `spikes_valid`, because some file has units that were not observed throughout a window."""

    def __repr__(self) -> str:
        """Return a digest: the repr of an input is part of the identity of a conversion, once for each input."""
        said = repr((self.unit_ids, self.columns, self.absent, self.masks_spikes)).encode()
        return f"Common({xxhash.xxh3_128_hexdigest(said)})"


class Completion:
    """Makes the fields of a recording those that all items of the dataset have."""

    def __init__(self, options: NWBOptions, common: Common, found: Modalities, *, masks_spikes: bool) -> None:
        self._options = options
        self._masks_spikes = masks_spikes or common.masks_spikes or options.units == "pad"
        self._fill = np.float32(np.nan if options.fill is None else options.fill)
        self._units = None if found.spikes is None else _find_places(found.spikes.ids, common.unit_ids)
        wanted = dict(common.columns)
        self.columns: Mapping[str, list[str]] = {
            one.field: list(wanted.get(one.field, one.columns)) for one in found.binned
        }
        """The columns of each field that is interpolated at the bins."""

        self._places = {one.field: _find_places(one.columns, wanted.get(one.field)) for one in found.binned}
        present = [name for name in options.all_fields if name not in found.missing]
        self._constant: dict[str, Any] = {}
        if options.missing == "allow":
            self._constant |= {f"has_{name}": np.True_ for name in present}
            for name, members in common.absent:
                if name not in present:
                    self._constant |= {member[0]: self._make_empty(*member[1:]) for member in members}
                    self._constant[f"has_{name}"] = np.False_
        self._order = [member for name in options.all_fields for member in (name, f"{name}_valid", f"has_{name}")]

    def complete(self, fields: Mapping[str, Any], observed: NDArray[np.bool_] | None) -> dict[str, Any]:
        """Return all fields of an item, in the order of the options, each followed by its masks.

        Units of the file that are not `observed` are filled in, as those that it lacks; None: all are observed.
        """
        found = {**fields, **self._constant}
        if self._units is not None:
            places = self._units if observed is None else np.where(observed[self._units], self._units, -1)
            found["spikes"] = _take(found["spikes"], places, self._fill)
            if self._masks_spikes:
                found["spikes_valid"] = places >= 0
        for name, places in self._places.items():
            found[name] = _take(found[name], places, self._fill)
            found[f"{name}_valid"] = _take(found[f"{name}_valid"], places, np.False_)
        return {name: found[name] for name in self._order if name in found}

    def _make_empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype == "str":
            return ""
        # Whole numbers are labels and ids, of which none is negative; pixels are unsigned.
        empty = {"f": self._fill, "i": -1}.get(np.dtype(dtype).kind, 0)
        return np.full(shape, empty, dtype)[()]


def _find_places(own: Sequence[Any], wanted: Sequence[Any] | None) -> NDArray[np.int64]:
    """Return the column of the file for each wanted one; -1 if the file lacks it."""
    at = {label: number for number, label in enumerate(own)}
    return np.array(list(range(len(own))) if wanted is None else [at.get(label, -1) for label in wanted], np.int64)


def _take(values: NDArray[Any], places: NDArray[np.int64], fill: Any) -> NDArray[Any]:
    """Return columns of (bins, columns) values, `fill` in those at place -1."""
    if len(places) == values.shape[1] and (places == np.arange(len(places))).all():
        return values
    out = values[:, places]
    out[:, places < 0] = fill
    return out
