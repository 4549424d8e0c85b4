"""Samples become shards, side indexes and, last of all, a manifest.

Everything is written into a hidden folder, `.writing`, shard by shard, and moved into place only when the whole data
set is there. A data set that was in the folder before stays readable until then.
"""

import json
import logging
import os
import string
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import xxhash

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, WriteError
from penstock.files.durable import write_aside
from penstock.files.locks import lock, unlock
from penstock.shard.codec import ArrayFormat, json_bytes
from penstock.shard.compression import COMPRESSIONS, Compression, max_decompressed_bytes
from penstock.shard.manifest import MANIFEST, FieldInfo, Manifest, ShardEntry
from penstock.shard.names import automatic_key, encode_key
from penstock.shard.publish import (
    OPTIONS,
    WRITING,
    clear_unfinished,
    find_finished_shards,
    finish_publication,
    publish,
    read_published,
)
from penstock.shard.sample_form import Members, SampleForm
from penstock.shard.shard_file import ShardFile, stored_size
from penstock.shard.side_index import SideIndex
from penstock.shard.tar import END, TAR_BLOCK, padded_size

__all__ = ["ShardWriter", "WriteOptions", "merge_fields"]

_LOG = logging.getLogger("penstock")
_COMPLETE = "is complete"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What decides over the bytes of a data set, besides the samples."""

    shard_size: int = 1000
    shard_name_pattern: str = "shard_{shard_idx:06d}.tar"
    compression: Compression = "none"
    array_format: ArrayFormat = "npy"
    max_shard_bytes: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("shard_size", self.shard_size, at_least=1)
        if self.max_shard_bytes is not None:
            check_integer("max_shard_bytes", self.max_shard_bytes, at_least=4096)
        if self.compression not in COMPRESSIONS:
            raise OptionError(f"compression={self.compression!r}; use one of {', '.join(COMPRESSIONS)}.")
        if self.array_format not in get_args(ArrayFormat):
            raise OptionError(f"array_format={self.array_format!r}; use 'npy', or 'pyd' for pickles.")
        json_bytes(dict(self.metadata), "metadata")
        _check_pattern(self.shard_name_pattern)

    @property
    def most_tar_bytes(self) -> int | None:
        """The largest archive; compressed ones are decompressed whole, so that these have a bound in any case."""
        if self.compression == "none":
            return self.max_shard_bytes
        return min(self.max_shard_bytes or max_decompressed_bytes(0), max_decompressed_bytes(0))

    def shard_name(self, number: int) -> str:
        """Return the file name of a shard."""
        return self.shard_name_pattern.format(shard_idx=number)


class ShardWriter:
    """Writes samples, in the order they are given, into a data set that appears all at once.

    1. A sample that cannot be written (a wrong type, a name twice): OptionError; nothing of it is stored, and the
       writer goes on with the next one.
    2. The disk is full or goes away: WriteError; what is in finished shards is kept for `resume=True`.
    3. The process is killed at any moment: there is no data set, or the one that was there before, or the new one.
    4. A second writer on the same folder: refused, as long as the first one lives.
    """

    _ended = "never began"

    def __init__(self, folder: str | os.PathLike[str], options: WriteOptions, *, resume: bool = False) -> None:
        self.folder, self.options = Path(folder).absolute(), options
        self._lock = lock(self.folder)
        self._shards: list[ShardEntry] = []
        self._fields: dict[str, FieldInfo] = {}
        self._form = SampleForm(options.array_format)
        self._keys: set[int] | None = None
        self._open: ShardFile | None = None
        self.written = 0
        """Samples in the data set so far. After `resume=True`, go on with the sample of this number."""
        try:
            self._ended = ""
            self._begin(resume=resume)
        except BaseException:
            self.abandon()
            raise

    def write(self, sample: Mapping[str, Any], sample_id: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Add one sample."""
        if self._ended:
            raise WriteError(f"This writer of {self.folder} {self._ended}; nothing more can be written.")
        payloads = self._form.encode(sample, self.written)
        key, key_hash = self._new_key(sample_id)
        members = self._form.make_members(key, sample_id or key, payloads, metadata)
        try:
            shard = self._shard_with_room(members)
            members.add_to(shard, len(self._shards))
            self.written += 1
            if self._keys is not None:
                self._keys.add(key_hash)
            self._form.learn(payloads)
            if shard.n_items == self.options.shard_size:
                self._close_shard()
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> Manifest:
        """Make the data set appear, and return its manifest."""
        if self._ended == _COMPLETE:
            return Manifest.read(self.folder / MANIFEST)
        if self._ended:
            raise WriteError(f"This writer of {self.folder} {self._ended}; there is nothing to finish.")
        if not self.written:
            raise OptionError("No samples were written; a data set has at least one.")
        before = read_published(self.folder)
        if before is not None:
            _LOG.warning("The data set of %s samples in %s is replaced by a new one.", before.n_items, self.folder)
        try:
            if self._open is not None and self._open.n_items:
                self._close_shard()
            publish(self._manifest(), self.options.shard_name)
        except OSError as error:
            raise self._failed(error) from error
        self._ended = _COMPLETE
        self._release()
        return Manifest.read(self.folder / MANIFEST)

    def abandon(self) -> None:
        """Stop without a data set; finished shards are kept for `resume=True`. Does nothing after `commit`."""
        if not self._ended:
            self._ended = "was abandoned"
            if self._open is not None:
                self._open.discard()
        self._release()

    def __del__(self) -> None:
        if not self._ended:
            warnings.warn(
                f"A writer of {self.folder} with {self.written} samples was dropped without finalize(): there is no "
                "data set. Use it in a `with` statement, or go on with resume=True.",
                ResourceWarning,
                stacklevel=1,
            )
            self.abandon()

    # -- beginning and ending ------------------------------------------------------------------------------------------

    def _begin(self, *, resume: bool) -> None:
        writing, current = self.folder / WRITING, json.dumps(asdict(self.options), sort_keys=True)
        if resume:
            finish_publication(self.folder, self.options.shard_name)
        else:
            clear_unfinished(self.folder)
        complete = read_published(self.folder) if resume and not writing.exists() else None
        if complete is not None:
            self._check_same(complete)
            self.written, self._ended = complete.n_items, _COMPLETE
            self._release()
            return
        before = (writing / OPTIONS).read_text() if (writing / OPTIONS).exists() else current
        if before != current:
            raise OptionError(
                f"resume=True with options {current}, but {self.folder} was begun with {before}. Use the same options, "
                "or resume=False to start anew."
            )
        if resume:
            keys: list[int] = []
            for entry, layout in find_finished_shards(self.folder, self.options.shard_name, self.options.compression):
                self._add_shard(entry, layout)
                keys += layout.keys.tolist()
            if any(key != _hash(automatic_key(number)) for number, key in enumerate(keys)):
                self._keys = set(keys)
        try:
            writing.mkdir(exist_ok=True)
            write_aside(writing / OPTIONS, current.encode())
        except OSError as error:
            raise self._failed(error) from error

    def _check_same(self, complete: Manifest) -> None:
        """Refuse to take a data set that was written with other options for the one that is asked for."""
        found = (complete.shard_size, complete.compression, complete.array_format, dict(complete.metadata))
        options = self.options
        wanted = (options.shard_size, options.compression, options.array_format, dict(options.metadata))
        if found != wanted or complete.shards[0].name != options.shard_name(0):
            raise OptionError(
                f"resume=True, but the data set in {self.folder} is complete and was written with other options: "
                f"{found}, not {wanted}. Use resume=False to replace it."
            )

    def _release(self) -> None:
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1

    def _failed(self, error: OSError) -> WriteError:
        if self._open is not None:
            self._open.discard()
        self._ended = "has failed"
        self._release()
        what = str(error) if isinstance(error, WriteError) else f"Could not write to {self.folder}: {error}"
        return WriteError(what if "resume=True" in what else f"{what}. Mend that and go on with resume=True.")

    def _manifest(self) -> Manifest:
        options = self.options
        return Manifest(
            self.folder, self._fields, tuple(self._shards), options.shard_size, options.array_format, options.metadata
        )

    # -- shards --------------------------------------------------------------------------------------------------------

    def _shard_with_room(self, members: Members) -> ShardFile:
        limit = self.options.most_tar_bytes
        if limit is not None:
            needed = stored_size(members.payloads) + 2 * TAR_BLOCK + padded_size(members.metadata_bytes) + len(END)
            if needed > limit:
                raise OptionError(
                    f"Sample {self.written} takes {needed} bytes, a shard {limit} at most; raise max_shard_bytes."
                )
            if self._open is not None and self._open.tar_bytes + needed > limit:
                self._close_shard()
        if self._open is None:
            name = self.options.shard_name(len(self._shards))
            self._open = ShardFile(self.folder / WRITING, name, self.options.compression)
        return self._open

    def _close_shard(self) -> None:
        assert self._open is not None, "closed only where one is open"
        shard, self._open = self._open, None
        try:
            entry, layout = shard.close()
        except BaseException:
            shard.discard()
            raise
        self._add_shard(entry, layout)

    def _add_shard(self, entry: ShardEntry, layout: SideIndex) -> None:
        self._shards.append(entry)
        if not self._fields:
            self._form = SampleForm(self.options.array_format, merge_fields({}, layout))
        self._fields = merge_fields(self._fields, layout)
        self.written = sum(shard.n_items for shard in self._shards)

    # -- one sample ----------------------------------------------------------------------------------------------------

    def _new_key(self, sample_id: str | None) -> tuple[str, int]:
        """Return a key that no sample has yet, and its hash."""
        if sample_id is None and self._keys is None:
            return automatic_key(self.written), 0
        if self._keys is None:
            # Numbers cannot come twice; from the first id of the user's own on, every key is remembered.
            self._keys = {_hash(automatic_key(number)) for number in range(self.written)}
        key = automatic_key(self.written) if sample_id is None else encode_key(sample_id)
        key_hash = _hash(key)
        if key_hash in self._keys:
            raise OptionError(
                f"Sample {self.written} has the id {sample_id or key!r}, as one before it; use each once."
            )
        return key, key_hash


def merge_fields(fields: Mapping[str, FieldInfo], layout: SideIndex) -> dict[str, FieldInfo]:
    """Return what `fields` are when the items of one more shard are among them."""
    merged = dict(fields)
    for column in layout.columns:
        name = column.suffix.rpartition(".")[0]
        info = FieldInfo(column.suffix, column.dtype, column.shape)
        merged[name] = merged[name].merge(info) if name in merged else info
    return merged


def _hash(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())


def _check_pattern(pattern: str) -> None:
    try:
        names = {pattern.format(shard_idx=number) for number in (0, 1, 999_999, 1_000_000)}
        fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except (IndexError, KeyError, ValueError) as error:
        raise OptionError(f"shard_name_pattern={pattern!r} is no format with {{shard_idx}}: {error}.") from error
    if fields != {"shard_idx"} or len(names) < 4:
        raise OptionError(
            f"shard_name_pattern={pattern!r} gives shards the same name; use for example 'train_{{shard_idx:06d}}.tar'."
        )
    if any(
        "/" in name or name.startswith(".") or not name.endswith(".tar") or not name.isprintable() for name in names
    ):
        raise OptionError(f"shard_name_pattern={pattern!r}: use a plain file name that ends in .tar.")
