"""What sources that are made of others pass on to them."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source
from penstock.source.checks import sum_memory, sum_stored
from penstock.source.remote_parts import RemoteParts, is_remote_part

__all__ = ["Wrapper", "add_up", "call_prepare", "call_release", "list_leaves"]

_Int64s = NDArray[np.int64]


class Wrapper(RemoteParts):
    """A source made of others, each of which has its items under the same numbers."""

    _parts: "tuple[Source, ...]"

    def prepare(self, items: _Int64s) -> int | None:
        """Start reading items into the page cache, as far as the sources do; return the bytes that were not there."""
        return add_up([call_prepare(part, items) for part in self._parts])

    def release(self, items: _Int64s) -> None:
        """Give the pages of items back to the system, as far as the sources do; only what is remote, if a part is."""
        for part in self._parts:
            call_release(part, items, only_remote=self.is_remote)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the local files of the sources; None if one does not know them."""
        return sum_stored(*self._parts)

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that the sources keep between reads."""
        return sum_memory(*self._parts)

    def close(self) -> None:
        """Close every source."""
        for part in self._parts:
            part.close()


def list_leaves(source: Source) -> list[Source]:
    """Return the sources that a source is made of, and that are made of no others."""
    return [leaf for part in source._parts for leaf in list_leaves(part)] if isinstance(source, Wrapper) else [source]


def call_prepare(source: Source, items: _Int64s) -> int | None:
    """Call `prepare` of a source, if it has it."""
    prepare: Callable[[_Int64s], int | None] | None = getattr(source, "prepare", None)
    return 0 if prepare is None else prepare(items)


def call_release(source: Source, items: _Int64s, *, only_remote: bool = False) -> None:
    """Call `release` of a source, if it has it.

    Parameters
    ----------
    only_remote
        Do nothing for a source of this machine: what was fetched is released after every batch, however little it is,
        and pages of files would have to be read again in the next epoch.
    """
    if only_remote and not is_remote_part(source):
        return
    release: Callable[[_Int64s], None] | None = getattr(source, "release", None)
    if release is not None:
        release(items)


def call_axis_lengths(source: Source, name: str) -> NDArray[np.uint32] | None:
    """Return the length of a 1-D field in every item, if the source knows it without reading items."""
    find: Callable[[str], NDArray[np.uint32] | None] | None = getattr(source, "axis_lengths", None)
    return None if find is None else find(name)


def add_up(missing: Iterable[int | None]) -> int | None:
    """Return a sum of bytes; None if one of the numbers is not known."""
    known = list(missing)
    return None if None in known else sum(number or 0 for number in known)
