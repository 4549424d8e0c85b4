"""Items in tar shards, read like an array: any item at any time, every byte checked the first time it is read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import DamageError, OptionError, ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.shard.codec import is_uncompressed
from penstock.shard.manifest import FieldInfo, Manifest, manifest_path
from penstock.shard.tar import TAR_BLOCK
from penstock.source.checks import check_span, check_items
from penstock.source.tar.gather import Gather, Reading, Verify
from penstock.source.tar.quarantine import Quarantine

__all__ = ["RUN_ITEMS", "TarSource"]

_Int64s = NDArray[np.int64]

OnError = Literal["raise", "substitute"]

_SUBSTITUTES_TRIED = 64

RUN_ITEMS = 64
"""Items that a buffered shuffle moves together: a run of neighbours, which one read of the disk brings along."""


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
        self.path = manifest_path(path)
        self.manifest = Manifest.read(self.path)
        _check_present(self.manifest)
        infos = _chosen(self.manifest, fields)
        sizes = np.array([shard.n_items for shard in self.manifest.shards], np.int64)
        varying_bytes = _varying_bytes(self.manifest)
        self.fields: Mapping[str, Field] = {
            name: _field(info, varying_bytes, decode=decode) for name, info in infos.items()
        }
        self._borders = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._reading = Reading(
            self.manifest, infos, self.fields, self._borders, verify, decode=decode, allow_pickle=allow_pickle
        )
        self.index = Index.from_sizes(_cut(self.manifest, chunk_items), identity=self.manifest.fingerprint)
        self._quarantine: Quarantine | None = None
        if on_error == "substitute":
            check_integer("max_bad_items", max_bad_items, at_least=0)
            where = self.path.with_name("quarantine.jsonl") if quarantine is None else quarantine
            self._quarantine = Quarantine(where, self.manifest.fingerprint, max_bad_items)
        self._gather: Gather | None = None

    def __repr__(self) -> str:
        return f"TarSource({str(self.path.parent)!r}, {len(self.index)} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        items = check_items(items, self)
        block: dict[str, NDArray[Any]] = {}
        for name, field in self.fields.items():
            given = out.get(name) if out is not None else None
            fits = given is not None and given.flags.c_contiguous
            block[name] = given if given is not None and fits else _empty(field, len(items))
        if not len(items):
            return block
        gather = self._gathering()
        try:
            gather.fill(items, np.arange(len(items)), block)
        except DamageError:
            if self._quarantine is None:
                raise
            for place, item in enumerate(items.tolist()):
                self._fill_or_substitute(gather, item, np.array([place]), block)
        for name, given in (out or {}).items():
            if block[name] is not given:
                np.copyto(given, block[name])
        return {**block, **(out or {})}

    @property
    def quarantine(self) -> Path | None:
        """The file that lists bad items; None where they are errors."""
        return None if self._quarantine is None else self._quarantine.path

    def shard_of(self, item: int) -> tuple[int, int]:
        """Return the shard that holds an item, and the item's number in it."""
        shard = int(np.searchsorted(self._borders, item, side="right")) - 1
        return shard, item - int(self._borders[shard])

    def close(self) -> None:
        """Let go of files; the next read opens them again."""
        self._gather = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gather": None}

    def _gathering(self) -> Gather:
        """Return what is open in this process; a forked one begins with nothing open, locked or verified."""
        gather = self._gather
        if gather is None or gather.process != os.getpid():
            gather = self._gather = Gather(self._reading)
        return gather

    def _fill_or_substitute(self, gather: Gather, item: int, place: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        assert self._quarantine is not None, "called only where bad items are replaced"
        # The same item gets the same substitute, whoever asks and in whatever order: its number decides.
        candidate, n_items = item, len(self.index)
        for attempt in range(_SUBSTITUTES_TRIED):
            try:
                gather.fill(np.array([candidate]), place, block)
            except DamageError as error:
                self._quarantine.add(candidate, self.manifest.shards[self.shard_of(candidate)[0]].name, error)
                candidate = xxhash.xxh3_64_intdigest(f"{item} {attempt}".encode()) % n_items
            else:
                return
        raise DamageError(self.path.name, item, f"no healthy item among {_SUBSTITUTES_TRIED} that could replace it")


def _varying_bytes(manifest: Manifest) -> int:
    """Return about how much of an item is of no fixed size, all of it together."""
    n_items = sum(shard.n_items for shard in manifest.shards)
    fixed = sum(info.field().item_bytes or 0 for info in manifest.fields.values())
    return max(TAR_BLOCK, sum(shard.tar_bytes for shard in manifest.shards) // max(1, n_items) - fixed)


def _field(info: FieldInfo, varying_bytes: int, *, decode: bool) -> Field:
    """Return what is given of a member, and about how large it is where its size varies and can be known."""
    field = info.field()
    if field.item_bytes is not None:
        return field if decode else Field(np.dtype(object), None, field.item_bytes)
    return replace(field, typical_bytes=varying_bytes if not decode or is_uncompressed(info.suffix) else None)


def _empty(field: Field, n_items: int) -> NDArray[Any]:
    return np.empty((n_items, *(field.shape or ())), field.dtype)


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
    check_integer("chunk_items", chunk_items, at_least=1)
    plain = np.array([shard.compression == "none" for shard in manifest.shards])
    counts = np.where(plain, -(-sizes // chunk_items), 1)
    small, larger = np.divmod(sizes, np.maximum(counts, 1))
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    number = np.arange(counts.sum()) - np.repeat(first, counts)
    cut: _Int64s = np.repeat(small, counts) + (number < np.repeat(larger, counts))
    return cut
