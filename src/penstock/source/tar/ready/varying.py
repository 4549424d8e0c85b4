"""Fields of varying size, texts and JSON of items in open shards: those of a whole batch with a few calls of C."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.metadata.table import Payloads
from penstock.shard.decoders.decode import decode
from penstock.shard.tar import TAR_BLOCK
from penstock.source.tar.read_items import ReadSpec
from penstock.source.tar.ready.parts import CHECKSUM_BYTES, VaryingColumn
from penstock.source.tar.request import Request
from penstock.source.tar.rows import make_arrays
from penstock.source.tar.visit import Located, OpenPart, ShardTables

__all__ = ["VaryingRows"]

_Int64s = NDArray[np.int64]

_MOST_BYTES = 1 << 22  # read at once, besides what is made of them; more is for the engine, which reads in parts


class VaryingRows:
    """The columns of varying size of open shards. All shards have the same number of them.

    Parameters
    ----------
    shards
        The shards, and the columns of each.
    """

    def __init__(self, shards: Sequence[tuple[OpenPart, Sequence[VaryingColumn]]]) -> None:
        self.shards = [shard for shard, _ in shards]
        self.forms = [[column.form for column in columns] for _, columns in shards]
        self._tables = ShardTables(self.shards)
        self._numbers = np.array([[column.numbers for column in columns] for _, columns in shards], np.int64)
        self._blocks = [_Blocks.of(shards, place) for place in range(len(self.forms[0]))]

    def read(
        self, which: _Int64s, items: _Int64s, rows: _Int64s, unverified: NDArray[np.bool_]
    ) -> list[Payloads] | None:
        """Return the bytes of each column, verified if needed; raise DamageError if something is wrong.

        None if an item lacks one, if they are many, or if a shard was written to.

        Parameters
        ----------
        which
            Place of each item's shard.
        rows
            Number of each item in its shard.
        """
        n_items, n_columns = len(which), len(self._blocks)
        # (columns and items, numbers)
        numbers = self._numbers[which].transpose(1, 0, 2).reshape(n_items * n_columns, -1)
        each = [np.tile(array, n_columns) for array in (which, items, rows)]
        request = Request(
            self.shards, *each, places=each[2], unverified=np.tile(unverified, n_columns), tables=self._tables
        )
        begins, sizes = request.numbers_at(numbers[:, :3]), request.numbers_at(numbers[:, 6:9])
        for place, blocks in enumerate(self._blocks):
            if blocks is not None:
                mine = slice(place * n_items, (place + 1) * n_items)
                begins[mine] = blocks.find_begins(which, rows, begins[mine], sizes[mine])
        if begins.min() < 0 or sizes.min() < 0 or sizes.max() > _MOST_BYTES or sizes.sum() > _MOST_BYTES:
            return None
        heads, lengths = np.zeros_like(begins), sizes
        is_member = np.array([forms[0] is None for forms in self.forms])[each[0]]
        if is_member.any():
            heads = np.where(is_member, request.numbers_at(numbers[:, 3:6]) - begins, 0)
            lengths = np.where(is_member, heads + -(-sizes // TAR_BLOCK) * TAR_BLOCK, sizes)
        everything = np.arange(len(begins))
        located = Located("", everything, begins, heads, sizes, lengths, numbers[:, 9], CHECKSUM_BYTES)
        joined, ends = request.read_together(located)
        if self._tables.find_changed(with_indexes=True, places=np.flatnonzero(np.bincount(which))).any():
            return None
        content, borders = joined.tobytes(), np.concatenate([[0], ends])
        return [Payloads(content, borders[begin : begin + n_items + 1]) for begin in range(0, len(ends), n_items)]

    def make_values(self, place: int, which: _Int64s, payloads: Payloads, spec: ReadSpec, name: str) -> list[Any]:
        """Return the values of a column, each with its own memory; raise ValueError if bytes are invalid."""
        forms, suffix = [forms[place] for forms in self.forms], spec.infos[name].suffix
        borders, content = payloads.borders.tolist(), payloads.content
        one = forms[0]
        if one is not None and one.kind != "bytes" and all(form == one for form in forms):
            return make_arrays(one, content[borders[0] : borders[-1]], payloads.borders - borders[0])
        found: list[Any] = []
        for shard, begin, end in zip(which.tolist(), borders, borders[1:]):  # noqa: B905  # one begin more
            form, stored = forms[shard], content[begin:end]
            if form is not None and form.kind != "bytes":
                found += make_arrays(form, stored, np.array([0, end - begin]))
            else:
                found.append(decode(suffix, stored, decoding=spec.decode, allow_pickle=spec.allow_pickle))
        return found


class _Blocks(NamedTuple):
    """Blocks of the rows of a column, in all shards, one after the other."""

    bases: _Int64s
    """The number of the first row of each shard; -1: its rows vary in size."""

    starts: _Int64s
    """The number of the first row of each block, in ascending order."""

    begins: _Int64s

    @classmethod
    def of(cls, shards: Sequence[tuple[OpenPart, Sequence[VaryingColumn]]], place: int) -> "_Blocks | None":
        """Return the blocks of one column; None if its rows vary in size in every shard."""
        bases, starts, begins, n_rows = [], [], [], 0
        for shard, columns in shards:
            found, rows = columns[place].begins, shard.rows
            bases.append(-1 if found is None else n_rows)
            if found is not None and rows is not None:
                starts.append(rows.starts[:-1] + n_rows)
                begins.append(found)
                n_rows += rows.n_items
        return cls(np.array(bases), np.concatenate(starts), np.concatenate(begins)) if starts else None

    def find_begins(self, which: _Int64s, rows: _Int64s, begins: _Int64s, sizes: _Int64s) -> _Int64s:
        """Return where rows begin; as they were given, if they are not in blocks."""
        bases = self.bases[which]
        numbers = bases + rows
        blocks = np.searchsorted(self.starts, numbers, side="right") - 1
        return np.where(bases < 0, begins, self.begins[blocks] + (numbers - self.starts[blocks]) * sizes)
