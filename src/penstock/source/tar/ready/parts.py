"""A shard that is ready to be read from: where each field lies in it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.source.tar.row_places import AboutColumns, ColumnPlaces, RowForm

__all__ = ["CHECKSUM_BYTES", "Part", "VaryingColumn"]

_Int64s = NDArray[np.int64]

CHECKSUM_BYTES = 8
"""Of rows that vary in size."""


class VaryingColumn(NamedTuple):
    """Where the rows of a column lie in one shard."""

    form: RowForm | None
    """None: members of the layout "samples"."""

    numbers: tuple[int, ...]
    """First number, step and place in the side index of begins, data offsets and sizes; the last of checksums."""

    begins: _Int64s | None = None
    """Where the rows of each block begin, if they all have one size."""

    @classmethod
    def of_rows(cls, form: RowForm, places: ColumnPlaces) -> "VaryingColumn | None":
        """Return a column of the layout "columns"; None if some items lack it, or if it has short checksums."""
        if not places.is_complete or form.checksum_bytes != CHECKSUM_BYTES:
            return None
        if places.begins is not None:
            return cls(form, (0, 0, 0, 0, 0, 0, form.row_bytes, 0, 0, places.checksums_at), places.begins)
        begins = (0, 0, places.begins_at)
        return cls(form, (*begins, *begins, 0, 0, places.sizes_at, places.checksums_at))


class Part(NamedTuple):
    """A shard that is ready to be read from."""

    numbers: _Int64s
    """`struct part` of native.c, with a column for each field of fixed shape, then for metadata that are numbers."""

    varying: tuple[VaryingColumn, ...]
    """The fields of varying shape, then sample ids, then the other columns of metadata."""

    about: AboutColumns | None
    """The columns of metadata in the layout "columns", if metadata are read."""
