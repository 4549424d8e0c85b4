"""Random access to items in tar shards; every byte is verified the first time it is read."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import DamageError, OptionError, SourceError
from penstock.core.index import Index
from penstock.core.metadata.records import Records
from penstock.core.protocols import Source
from penstock.core.text import did_you_mean
from penstock.core.types import Block, Field, Span
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.columns.row_index import METADATA_SUFFIX
from penstock.shard.decoders.decode import Decoding, check_decoding, is_uncompressed
from penstock.shard.manifest import FieldInfo, Manifest, manifest_place
from penstock.shard.names import KEY, holds_file
from penstock.shard.places.open_dataset import open_complete
from penstock.shard.tar import TAR_BLOCK
from penstock.source.checks import check_items, check_span
from penstock.source.combine import Zip
from penstock.source.remote_parts import RemoteParts
from penstock.source.select.selectable import Selectable
from penstock.source.tar.axis_lengths import read_axis_lengths
from penstock.source.tar.engine import ShardEngine
from penstock.source.tar.quarantine import Quarantine
from penstock.source.tar.read_items import ReadSpec, Verify
from penstock.source.tar.ready.joined import JoinedShards
from penstock.source.tar.ready.shards import ReadyShards
from penstock.source.tar.remote.engine import RemoteEngine

__all__ = ["STRETCH_ITEMS", "TarSource"]

_Int64s = NDArray[np.int64]

OnError = Literal["raise", "substitute"]

_MAX_SUBSTITUTES = 64

_RECORD_BYTES = 64  # of the metadata of an item that nobody looks at, in memory
_KEYS = Field(np.dtype(object), None, typical_bytes=64)

STRETCH_ITEMS = 64
"""Consecutive items that a buffered shuffle moves together, because one disk read brings them all."""


class TarSource(Selectable, RemoteParts):
    """Items in tar shards of a folder or a URL, written by Penstock or indexed with `penstock index`.

    1. A shard that is missing, truncated, replaced, swapped or has a single bit flipped: DamageError, which names shard
       and item, before any byte of that item is delivered. With `on_error="substitute"`, a healthy item instead.
    2. A shard that is written to while it is read: its items are verified again, and an item is delivered complete or
       not at all.
    3. Hostile content: only plain data are unpickled, and no more memory is allocated than the file justifies.
    4. A shard at a URL that was replaced since the source was made: DamageError. A server that does not answer within
       its deadline: ReadError, which names shard and item.

    Parameters
    ----------
    path
        The folder; or a pattern, `train-{000000..000009}.tar`, that `penstock index` was called with; or the URL of
        one, such as `s3://bucket/train`.
    fields
        The fields to read, including `"metadata"` if needed. None: all. Only their bytes are read. `"__key__"` is the
        key of an item: the part of its members' names that they share.
    chunk_items
        Items per chunk, the unit of `WindowShuffle`. None: whole shards. Smaller chunks mix better; compressed shards
        are always one chunk.
    verify
        Verify checksums the `"first"` time this process reads an item, `"always"`, or `"never"`. From a URL, `"first"`
        is always, because the bytes may come again.
    on_error
        `"raise"` an error for a damaged item, or `"substitute"` a healthy item, always the same one.
    max_bad_items
        With `"substitute"`: raise an error if more items than this are damaged.
    quarantine
        With `"substitute"`: the file that lists bad items. None: `quarantine.jsonl` beside the shards, or for a URL
        beside the cache folder.
    decode
        A mode of images, as in the webdataset library: `"rgb8"` (numpy, bytes), `"rgb"` (numpy, 0 to 1), `"torchrgb"`,
        `"l8"`, `"pil"`, …. True: the colours that are stored. `"basic"`: images and sounds stay bytes. False: all
        members do.
    allow_pickle
        Unpickle `.pyd` members, which can run any code that is in them.
    store
        With a URL: how to reach it. None: as the environment says.
    cache, cache_bytes
        With a URL: a folder of this machine in which what was read is kept, for all processes and epochs, and how much
        of it. None: nothing is kept; if only `cache_bytes` is, four fifths of the free disk.

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
        decode: Decoding = True,
        allow_pickle: bool = False,
        store: StoreOptions | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        for name, value, allowed in (("verify", verify, Verify), ("on_error", on_error, OnError)):
            if value not in get_args(allowed):
                raise OptionError(f"{name} must be one of {', '.join(map(repr, get_args(allowed)))}, got {value!r}.")
        check_decoding(decode)
        self.path = manifest_place(path)
        self.manifest, self._archives = open_complete(self.path, store=store, cache=cache, cache_bytes=cache_bytes)
        self._parts = () if self._archives is None else (self._archives,)
        table = self.manifest.table
        self._borders = np.concatenate([[0], np.cumsum(table.n_items)]).astype(np.int64)
        infos, self.fields = _select_fields(self.manifest, fields, decode=decode)
        self._spec = ReadSpec(
            self.manifest, infos, self.fields, self._borders, verify, decode, allow_pickle, self._archives
        )
        chunk: _Int64s | None = None
        if chunk_items is not None:
            check_integer("chunk_items", chunk_items, at_least=1)
            chunk = np.where(table.is_plain, chunk_items, table.n_items)
        self.index = Index.from_sizes(table.n_items, identity=self.manifest.fingerprint, chunk=chunk)
        self._quarantine: Quarantine | None = None
        if on_error == "substitute":
            check_integer("max_bad_items", max_bad_items, at_least=0)
            where = self._default_quarantine() if quarantine is None else quarantine
            self._quarantine = Quarantine(where, self.manifest.fingerprint, max_bad_items)
        self._engine: ShardEngine | RemoteEngine | None = None

    def with_fields(self, fields: Sequence[str]) -> "TarSource":
        """Return a source of the same items with these fields; the manifest is not read again."""
        other = copy.copy(self)
        infos, other.fields = _select_fields(self.manifest, fields, decode=self._spec.decode)
        other._spec, other._engine = replace(self._spec, infos=infos, fields=other.fields), None
        return other

    def as_stored(self) -> Source:
        """Return a source of the same items whose files, such as images and sounds, are their bytes."""
        files = [name for name in self.fields if name != KEY and holds_file(name)]
        if not files:
            return self
        infos, fields = _select_fields(self.manifest, files, decode=False)
        stored = copy.copy(self)
        stored.fields = fields
        stored._spec, stored._engine = replace(self._spec, infos=infos, fields=fields, decode=False), None
        rest = [name for name in self.fields if name not in files]
        return stored if not rest else Zip([stored, self.with_fields(rest)]).with_fields(list(self.fields))

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, by the side indexes alone; None if they do not tell it."""
        only = self.with_fields([name])
        first = only.take(np.zeros(1, np.int64))[name][0] if len(self.index) else None
        is_flat = isinstance(first, np.ndarray) and first.ndim == 1
        return read_axis_lengths(only._spec, name) if is_flat else None

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether a shard is compressed, and can only be read as a whole."""
        return not bool(self.manifest.table.is_plain.all())

    @property
    def stored_fields(self) -> Mapping[str, Field]:
        """All fields of the shards, also those that are not delivered."""
        return _select_fields(self.manifest, [*self.manifest.fields, KEY], decode=self._spec.decode)[1]

    def __repr__(self) -> str:
        return f"TarSource({str(self.manifest.folder)!r}, {len(self.index)} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        given = out or {}
        block = {name: given[name] if name in given else field.blank(len(items)) for name, field in self.fields.items()}
        if not self._take_ready(items, None, block):
            self._fill(items, np.arange(len(items)), block)
        return {**block, **given}

    def fill(self, items: _Int64s, rows: _Int64s, out: Block) -> None:
        """Read any items into rows of `out`, which has an array for every field; other rows stay as they are."""
        if not self._take_ready(items, rows, out):
            self._fill(items, rows, out)

    def _take_ready(self, items: _Int64s, rows: _Int64s | None, out: Mapping[str, Any]) -> bool:
        """Do as `fill` if the shards are open and nothing is wrong; otherwise return False. None: the first rows."""
        engine = self._process_engine()
        if not (isinstance(engine, ShardEngine) and engine.take(np.asarray(items, np.int64), rows, out)):
            return False
        return self._has_valid_records(out, np.arange(len(items)) if rows is None else rows)

    def _fill(self, items: _Int64s, rows: _Int64s, out: Block) -> None:
        """Do as `fill`, whatever is in the way."""
        items = check_items(items, self)
        if not len(items):
            return
        block: dict[str, NDArray[Any]] = {
            name: out[name] if _can_fill(out[name]) else field.blank(len(out[name]))
            for name, field in self.fields.items()
        }
        engine = self._process_engine()
        try:
            engine.fill(items, rows, block)
            self._check_records(block, rows)
        except DamageError:
            if self._quarantine is None:
                raise
            for row, item in zip(rows.tolist(), items.tolist(), strict=True):
                self._fill_or_substitute(engine, item, np.array([row]), block)
        for name, array in block.items():
            if array is not out[name]:
                out[name][rows] = array[rows]

    def join(self, sources: Sequence[Source]) -> JoinedShards | None:
        """Return what reads items of several sources with one call, numbered from one source to the next.

        None if that is not possible. It is if all are shards on this machine that are read in the same way, and their
        fields have a fixed shape.
        """
        mine = [source for source in sources if isinstance(source, TarSource)]
        alike = len(mine) == len(sources) and all(source._spec.reads_like(self._spec) for source in mine)
        if not alike or self._archives is not None or len(self._spec.fixed) < len(self.fields):
            return None
        if not ReadyShards.can_read(self._spec):
            return None
        borders = np.cumsum([0, *(len(source.index) for source in mine)]).astype(np.int64)
        return JoinedShards([source._find_ready for source in mine], borders)

    def _find_ready(self) -> ReadyShards | None:
        engine = self._process_engine()
        return engine.ready if isinstance(engine, ShardEngine) else None

    def prepare(self, items: _Int64s) -> int:
        """Start reading items, without waiting for them; return the bytes that were not in memory, or in the cache."""
        return self._process_engine().read_ahead(items) if len(items) else 0

    def release(self, items: _Int64s) -> None:
        """Give back the memory of the pages that hold nothing but these items; of a URL, of the spans."""
        if len(items):
            self._process_engine().give_back(items)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self.manifest.table.stored_bytes.sum())

    @property
    def url(self) -> Url | None:
        """Where the shards are; None if they are on this machine."""
        return None if self._archives is None else self._archives.url

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that each process keeps between reads: open shards and which items are verified."""
        if self._archives is None:
            return ShardEngine.memory_bytes(self._spec)
        return RemoteEngine.memory_bytes(self._spec) + min(self._archives.memory_bytes, self.stored_bytes)

    @property
    def quarantine(self) -> Path | None:
        """The file that lists bad items; None with `on_error="raise"`."""
        return None if self._quarantine is None else self._quarantine.path

    def shard_of(self, item: int) -> tuple[int, int]:
        """Return the shard that holds an item, and the item's number in it."""
        shard = int(np.searchsorted(self._borders, item, side="right")) - 1
        return shard, item - int(self._borders[shard])

    def key_of(self, item: int) -> str:
        """Return the key of an item: the part of its members' names that they share, as in the webdataset library."""
        items = check_items(np.array([check_integer("item", item, at_least=0)]), self)
        return self._process_engine().read_keys(items)[0]

    def close(self) -> None:
        """Close files and connections; the next read opens them again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        if self._archives is not None:
            self._archives.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def _default_quarantine(self) -> Path:
        if isinstance(self.path, Path):
            return self.path.with_name("quarantine.jsonl")
        cache = None if self._archives is None else self._archives.options.cache
        if cache is not None:
            return cache.with_name("quarantine.jsonl")
        raise OptionError(
            f"on_error='substitute' needs a file of this machine that lists the bad items of {self.manifest.folder}. "
            "Choose one with quarantine=..., or use cache=..."
        )

    def _process_engine(self) -> ShardEngine | RemoteEngine:
        """Return the engine of this process; after a fork, a new one: nothing open, locked or verified."""
        engine = self._engine
        if engine is None or engine.process != os.getpid():
            engine = self._engine = (ShardEngine if self._archives is None else RemoteEngine)(self._spec)
        return engine

    def _check_records(self, block: Mapping[str, Any], rows: _Int64s) -> None:
        """Parse metadata, if items that cannot be parsed are substituted."""
        for name in self.fields if self._quarantine is not None else ():
            column = block[name]
            if isinstance(column, Records):
                column.choose(rows).check()

    def _has_valid_records(self, block: Mapping[str, Any], rows: _Int64s) -> bool:
        try:
            self._check_records(block, rows)
        except DamageError:
            return False
        return True

    def _fill_or_substitute(
        self, engine: ShardEngine | RemoteEngine, item: int, place: _Int64s, block: dict[str, NDArray[Any]]
    ) -> None:
        assert self._quarantine is not None, "called with on_error='substitute' only"
        # The substitute depends on the item number alone, so it is the same in every process and order.
        candidate, n_items = item, len(self.index)
        for attempt in range(_MAX_SUBSTITUTES):
            try:
                engine.fill(np.array([candidate]), place, block)
                self._check_records(block, place)
            except DamageError as error:
                self._quarantine.add(candidate, self.manifest.shards[self.shard_of(candidate)[0]].name, error)
                candidate = xxhash.xxh3_64_intdigest(f"{item} {attempt}".encode()) % n_items
            else:
                return
        raise DamageError(self.path.name, item, f"no healthy item among {_MAX_SUBSTITUTES} possible substitutes")


def _varying_bytes(manifest: Manifest) -> int:
    """Return the approximate total size of the fields of an item that have no fixed size."""
    fixed = sum(info.field().item_bytes or 0 for info in manifest.fields.values())
    least = _RECORD_BYTES if manifest.layout == "columns" else TAR_BLOCK
    return max(least, int(manifest.table.tar_bytes.sum()) // max(1, manifest.n_items) - fixed)


def _delivered_field(info: FieldInfo, varying_bytes: int, *, decode: Decoding) -> Field:
    """Return the field as delivered, with a typical size if its size varies and can be estimated."""
    field = info.field()
    if field.item_bytes is not None:
        return field if decode is not False else Field(np.dtype(object), None, field.item_bytes)
    typical_bytes = varying_bytes if is_uncompressed(info.suffix, decode) else None
    return replace(field, typical_bytes=typical_bytes, holds_records=info.suffix == METADATA_SUFFIX and bool(decode))


def _can_fill(column: Any) -> bool:
    """Return whether items can be read into a column without a copy in between."""
    return isinstance(column, Records) or bool(column.flags.c_contiguous)


def _select_fields(
    manifest: Manifest, fields: Sequence[str] | None, *, decode: Decoding
) -> tuple[dict[str, FieldInfo], Mapping[str, Field]]:
    """Return how the fields to read are stored, and as what they are delivered."""
    infos = dict(manifest.fields) if fields is None else _find_infos(manifest, fields)
    varying_bytes = _varying_bytes(manifest)
    return infos, {
        name: _delivered_field(infos[name], varying_bytes, decode=decode) if name in infos else _KEYS
        for name in fields or infos
    }


def _find_infos(manifest: Manifest, fields: Sequence[str]) -> dict[str, FieldInfo]:
    if isinstance(fields, str) or not fields:
        raise OptionError(f"fields must be a list of names, such as {list(manifest.fields)[:1]!r}, got {fields!r}.")
    unknown = [name for name in fields if name not in manifest.fields and name != KEY]
    if unknown:
        near, given = did_you_mean(unknown[0], manifest.fields), ", ".join(map(repr, unknown))
        raise SourceError(f"fields must be names of {list(manifest.fields)}, got {given}.{near}")
    return {name: manifest.fields[name] for name in fields if name != KEY}
