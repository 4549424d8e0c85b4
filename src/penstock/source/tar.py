"""Items in tar shards, read like an array: any item at any time, every byte checked the first time it is read."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.checks import whole_number
from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.shard.codec import decoded
from penstock.shard.layout import MISSING, Column, Numbers
from penstock.shard.manifest import FieldInfo, Manifest, manifest_path
from penstock.source.bounds import check_span, checked_items
from penstock.source.pieces import Batch, Piece, Scratch, pieces_of, read_piece
from penstock.source.quarantine import Quarantine
from penstock.source.shards import OpenShard, OpenShards

__all__ = ["TarSource"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]
OnError = Literal["raise", "substitute"]

_CHANGES_BORNE = 3  # a shard that was written to is opened and checked anew, so many times
_SUBSTITUTES_TRIED = 64
_SORTED_FROM = 64


class TarSource:
    """Items in a folder of tar shards that Penstock wrote, or that `penstock index` has given an index.

    1. A shard that is missing, truncated, replaced, swapped or changed in a single bit: DamageError, which names shard
       and item, before anything of that item is delivered. With `on_error="substitute"`, a healthy item in its place.
    2. A shard that is written to while it is read: what was verified is verified anew, and an item is delivered whole
       or not at all.
    3. Hostile content: nothing is unpickled that is not data, nothing allocated that is not in the file.

    Parameters
    ----------
    path
        The folder; or a pattern, `train-{000000..000009}.tar`, that `penstock index` was called with.
    fields
        The fields to read, with `"metadata"` if it is wanted; None: all. Only their bytes are touched.
    chunk_items
        Items that are cheap to read together, the unit of `WindowShuffle`; None: whole shards. For plain archives, less
        mixes better; compressed ones are always read whole.
    verify
        Compare checksums the first time this process reads an item, always, or never.
    on_error
        What happens at a damaged item: `"raise"`, or `"substitute"` it by a healthy one, always the same.
    max_bad_items
        With `"substitute"`: more bad items than this are an error.
    quarantine
        With `"substitute"`: the file that lists bad items; None: `quarantine.jsonl` beside the shards.
    decode
        False: give the bytes of each member as they are stored.
    allow_pickle
        Run the pickles in `.pyd` members, and with them any code that is in them.

    Examples
    --------
    >>> import tempfile
    >>> from penstock import create_shards_from_arrays
    >>> folder = tempfile.mkdtemp()
    >>> _ = create_shards_from_arrays(folder, {"x": np.arange(10) * 10}, shard_size=4)
    >>> source = TarSource(folder, fields=["x"])
    >>> source.index, source.take(np.array([9, 2]))["x"].tolist()
    (Index(10 items in 3 chunks), [90, 20])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fields: Sequence[str] | None = None,
        chunk_items: int | None = None,
        verify: Verify = "first",
        on_error: OnError = "raise",
        max_bad_items: int = 100,
        quarantine: str | os.PathLike[str] | None = None,
        decode: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        for name, value, allowed in (("verify", verify, Verify), ("on_error", on_error, OnError)):
            if value not in get_args(allowed):
                raise OptionError(f"{name}={value!r}; use one of {', '.join(get_args(allowed))}.")
        self._path = manifest_path(path)
        self.manifest = Manifest.read(self._path)
        _check_present(self.manifest)
        self._infos = _chosen(self.manifest, fields)
        self.fields: Mapping[str, Field] = {
            name: info.field() if decode else Field(np.dtype(object), None) for name, info in self._infos.items()
        }
        self._verify, self._decode, self._allow_pickle = verify, decode, allow_pickle
        sizes = np.array([shard.n_items for shard in self.manifest.shards], np.int64)
        self._borders = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.index = Index.from_sizes(_cut(self.manifest, chunk_items), identity=self.manifest.fingerprint)
        self._quarantine: Quarantine | None = None
        if on_error == "substitute":
            whole_number("max_bad_items", max_bad_items, at_least=0)
            where = self._path.with_name("quarantine.jsonl") if quarantine is None else quarantine
            self._quarantine = Quarantine(where, self.manifest.fingerprint, max_bad_items)
        self._open_in_this_process()

    def __repr__(self) -> str:
        return f"TarSource({str(self._path.parent)!r}, {len(self.index)} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        items = checked_items(items, self)
        block: dict[str, NDArray[Any]] = {}
        for name, field in self.fields.items():
            given = out.get(name) if out is not None else None
            fits = given is not None and given.flags.c_contiguous
            block[name] = given if given is not None and fits else _empty(field, len(items))
        if not len(items):
            return block
        try:
            self._fill(items, np.arange(len(items)), block)
        except ReadError:
            if self._quarantine is None:
                raise
            for place, item in enumerate(items.tolist()):
                self._fill_or_substitute(item, np.array([place]), block, self._quarantine)
        for name, given in (out or {}).items():
            if block[name] is not given:
                np.copyto(given, block[name])
        return {**block, **(out or {})}

    def shard_of(self, item: int) -> tuple[int, int]:
        """Return the shard that holds an item, and the item's number in it."""
        shard = int(np.searchsorted(self._borders, item, side="right")) - 1
        return shard, item - int(self._borders[shard])

    def close(self) -> None:
        """Let go of files; the next read opens them again."""
        self._open_in_this_process()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_shards", "_scratch", "_verified", "_geometry", "_first", "_step", "_listed", "_pieces")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_in_this_process()

    def _open_in_this_process(self) -> None:
        n_shards = len(self.manifest.shards)
        self._shards = OpenShards(self.manifest, {info.suffix for info in self._infos.values()})
        self._scratch = Scratch()
        # Pages of zeros cost nothing until an item is verified.
        self._verified = np.zeros(len(self.index), bool)
        # By shard: which way its items are read (-1: not known yet, 0: member by member), and where their pieces begin.
        self._pieces: list[tuple[Piece, ...]] = [()]
        self._geometry = np.full(n_shards, -1, np.int32)
        self._first = np.zeros((n_shards, max(1, len(self.fields))), np.int64)
        self._step = np.zeros_like(self._first)
        self._listed: dict[int, list[Numbers]] = {}

    # -- substitutes ---------------------------------------------------------------------------------------------------

    def _fill_or_substitute(self, item: int, place: _Int64s, block: dict[str, NDArray[Any]], known: Quarantine) -> None:
        # The same item gets the same substitute, whoever asks and in whatever order: its number decides.
        candidate, n_items = item, len(self.index)
        for attempt in range(_SUBSTITUTES_TRIED):
            try:
                self._fill(np.array([candidate]), place, block)
            except ReadError as error:
                known.add(candidate, self.manifest.shards[self.shard_of(candidate)[0]].name, error)
                candidate = xxhash.xxh3_64_intdigest(f"{item} {attempt}".encode()) % n_items
            else:
                return
        raise DamageError(self._path.name, item, f"no healthy item among {_SUBSTITUTES_TRIED} that could replace it")

    # -- reading -------------------------------------------------------------------------------------------------------

    def _fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into the rows `places` of `block`; every item is whole and verified, or an error is raised."""
        if len(items) > _SORTED_FROM:  # what lies near each other is read one after the other
            order = np.argsort(items)
            items, places = items[order], places[order]
        shards = np.searchsorted(self._borders, items, side="right") - 1
        present = sorted(set(shards.tolist()))
        for start in range(0, len(present), self._shards.capacity):
            some = present[start : start + self._shards.capacity]
            mine = slice(None) if len(some) == len(present) else np.isin(shards, some)
            self._fill_from(some, shards[mine], items[mine], places[mine], block)

    def _fill_from(
        self, present: list[int], shards: _Int64s, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]
    ) -> None:
        for _ in range(_CHANGES_BORNE):
            opened = self._opened(present, shards, items)
            unverified = (
                ~self._verified[items] if self._verify == "first" else np.full(len(items), self._verify == "always")
            )
            geometries = sorted(set(self._geometry[present].tolist()))
            for geometry in geometries:
                mine = slice(None) if len(geometries) == 1 else self._geometry[shards] == geometry
                batch = Batch(
                    items[mine].tolist(),
                    [opened[number] for number in shards[mine].tolist()],
                    (items[mine] - self._borders[shards[mine]]).tolist(),
                    places[mine].tolist(),
                    unverified[mine].tolist(),
                )
                self._read_fixed(batch, shards[mine], geometry, block)
                self._read_members(batch, geometry, block)
            changed = [number for number, shard in opened.items() if shard.changed]
            if not changed:
                if self._verify == "first":
                    self._verified[items] = True
                return
            self._forget(changed)
        raise DamageError(self.manifest.shards[changed[0]].name, None, "it is being written to while it is read")

    def _forget(self, changed: list[int]) -> None:
        """Let shards that were written to be opened and verified anew."""
        if self._verify == "never":
            raise DamageError(
                self.manifest.shards[changed[0]].name, None, "it was written to while it was read, and verify='never'"
            )
        self._shards.drop(changed)
        for number in changed:
            self._verified[self._borders[number] : self._borders[number + 1]] = False

    def _opened(self, present: list[int], shards: _Int64s, items: _Int64s) -> dict[int, OpenShard]:
        try:
            opened = self._shards.get(present)
        except DamageError as error:
            number = next(n for n in present if error.shard.startswith(self.manifest.shards[n].name))
            raise DamageError(error.shard, int(items[shards == number][0]), error.reason) from error
        for number in np.array(present)[self._geometry[present] < 0].tolist():
            self._learn(opened[number])
        return opened

    def _learn(self, shard: OpenShard) -> None:
        """Work out how the items of a shard are read."""
        fixed = {
            name: (self._infos[name].suffix, field)
            for name, field in self.fields.items()
            if field.item_bytes is not None
        }
        pieces = pieces_of(shard.columns, self.manifest.shards[shard.number].n_items, fixed) if fixed else None
        if pieces is None:
            self._geometry[shard.number] = 0
            return
        begins = [shard.columns[piece.parts[0].suffix].begins for piece in pieces]
        for number, numbers in enumerate(begins):
            self._first[shard.number, number], self._step[shard.number, number] = numbers.first, numbers.step
        if any(numbers.listed is not None for numbers in begins):
            self._listed[shard.number] = begins
        if pieces not in self._pieces:
            self._pieces.append(pieces)
        self._geometry[shard.number] = self._pieces.index(pieces)

    def _read_fixed(self, batch: Batch, shards: _Int64s, geometry: int, block: dict[str, NDArray[Any]]) -> None:
        rows = np.array(batch.rows, np.int64)
        listed = self._listed.keys() & set(shards.tolist()) if self._listed else ()
        raw = {part.name: _raw(block[part.name]) for piece in self._pieces[geometry] for part in piece.parts}
        for number, piece in enumerate(self._pieces[geometry]):
            begins = self._first[shards, number] + self._step[shards, number] * rows
            for shard in listed:
                mine = shards == shard
                begins[mine] = self._listed[shard][number].at(rows[mine])
            read_piece(batch, piece, begins.tolist(), raw, self._scratch)

    def _read_members(self, batch: Batch, geometry: int, block: dict[str, NDArray[Any]]) -> None:
        """Read what has no fixed layout, member by member."""
        done = {part.name for piece in self._pieces[geometry] for part in piece.parts}
        for name, field in self.fields.items():
            if name in done:
                continue
            info, column = self._infos[name], block[name]
            for number, place in enumerate(batch.places):
                value = self._member(batch, number, info)
                if field.item_bytes is not None:
                    _check_promise(batch, number, name, field, value)
                column[place] = value

    def _member(self, batch: Batch, number: int, info: FieldInfo) -> Any:
        """Return the value of one member; None where the item has none."""
        shard, row, item = batch.shards[number], np.int64(batch.rows[number]), batch.items[number]
        found: Column | None = shard.columns.get(info.suffix)
        begin = MISSING if found is None else int(found.begins.at(row))
        if found is None or begin == MISSING:
            return None
        offset, size = int(found.offsets.at(row)), int(found.sizes.at(row))
        start, stop = (begin, int(found.ends(row))) if batch.unverified[number] else (offset, offset + size)
        try:
            content = os.pread(shard.handle, stop - start, start)
        except OSError as error:
            raise ReadError(f"Could not read item {item} in {shard.name}: {error}") from error
        if len(content) != stop - start:
            raise batch.short(number, stop - start, len(content))
        if batch.unverified[number] and xxhash.xxh3_64_intdigest(content) != found.checks[row]:
            raise DamageError(shard.name, item, f"the checksum of {info.suffix!r} does not match its bytes")
        payload = content[offset - start : offset - start + size]
        if not self._decode:
            return payload
        try:
            return decoded(found.extension, payload, allow_pickle=self._allow_pickle)
        except MissingDependency:
            raise
        except ValueError as error:
            raise DamageError(shard.name, item, f"{info.suffix!r}: {error}") from error


def _empty(field: Field, n_items: int) -> NDArray[Any]:
    return np.empty((n_items, *(field.shape or ())), field.dtype)


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of each item of a contiguous array, as rows."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_promise(batch: Batch, number: int, name: str, field: Field, value: Any) -> None:
    shape = getattr(value, "shape", None)
    if shape != field.shape:
        shard, item = batch.shards[number].name, batch.items[number]
        raise DamageError(shard, item, f"field {name!r} has shape {shape}, but the manifest says {field.shape}")


def _chosen(manifest: Manifest, fields: Sequence[str] | None) -> dict[str, FieldInfo]:
    if fields is None:
        return dict(manifest.fields)
    if isinstance(fields, str) or not fields:
        raise OptionError(f"fields={fields!r}; give a list of names, such as {list(manifest.fields)[:1]!r}.")
    unknown = [name for name in fields if name not in manifest.fields]
    if unknown:
        raise SourceError(
            f"There is no field {', '.join(map(repr, unknown))}; the data set has {list(manifest.fields)}."
        )
    return {name: manifest.fields[name] for name in fields}


def _check_present(manifest: Manifest) -> None:
    """Raise where a shard is not there at all; listing a folder is cheap, looking at each file is not."""
    try:
        there = set(os.listdir(manifest.folder))  # noqa: PTH208  # names only, of tens of thousands of files
    except OSError as error:
        raise ReadError(f"Could not list the folder {manifest.folder}: {error}") from error
    missing = [shard.name for shard in manifest.shards if shard.name not in there]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DamageError(missing[0], None, f"the shard{more} is missing from {manifest.folder}")


def _cut(manifest: Manifest, chunk_items: int | None) -> _Int64s:
    """Return the sizes of chunks: shards, cut evenly where they are plain and smaller chunks are asked for."""
    sizes = np.array([shard.n_items for shard in manifest.shards], np.int64)
    if chunk_items is None:
        return sizes
    whole_number("chunk_items", chunk_items, at_least=1)
    plain = np.array([shard.compression == "none" for shard in manifest.shards])
    counts = np.where(plain, -(-sizes // chunk_items), 1)
    small, larger = np.divmod(sizes, np.maximum(counts, 1))
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    number = np.arange(counts.sum()) - np.repeat(first, counts)
    cut: _Int64s = np.repeat(small, counts) + (number < np.repeat(larger, counts))
    return cut
