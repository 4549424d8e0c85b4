"""Writing samples as a dataset: shards, side indexes and, last, the manifest.

Shards of a folder are written into its `.writing` and moved when all are complete; those at a URL are no dataset until
the manifest is put. A previous dataset stays readable until then.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import xxhash

from penstock.core.errors import OptionError, WriteError
from penstock.core.text import count
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place
from penstock.shard.codec import is_plain_array
from penstock.shard.columns.packed_shard import PackedShard
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.manifest import FieldInfo, Manifest, ShardEntry
from penstock.shard.names import automatic_key, encode_key, field_name
from penstock.shard.outputs.contents import ShardContents
from penstock.shard.outputs.place import open_place
from penstock.shard.outputs.stored_samples import StoredSamples
from penstock.shard.outputs.uploads import untag
from penstock.shard.outputs.write_options import Shard, WriteOptions, open_shard
from penstock.shard.sample_form import Members, SampleForm

__all__ = ["ShardWriter", "merge_fields"]

_COMPLETE = "is complete"


class ShardWriter:
    """Writes samples in the given order into a dataset that appears all at once.

    1. An invalid sample (a wrong type, a repeated id): OptionError; nothing of it is stored, and the writer accepts
       the next one.
    2. The disk is full, or the server of a URL fails: WriteError; finished shards are kept for `resume=True`.
    3. The process is killed at any moment: there is no dataset, the previous one or the new one.
    4. A second writer on the same folder: refused while the first one lives.
    5. A dataset in the folder: WriteError, unless `overwrite` or `resume`; it is replaced when the new one is complete.
    6. After `resume=True`, samples may come from number `written` on, or from the beginning, if nobody has asked for
       `written` before the first of them: those that are stored are compared and skipped. Others than the stored ones,
       or fewer of them: OptionError.
    """

    _ended = "never started"

    def __init__(
        self,
        folder: str | os.PathLike[str] | Url,
        options: WriteOptions,
        *,
        resume: bool = False,
        overwrite: bool = False,
        store: StoreOptions | None = None,
    ) -> None:
        self.folder, self.options = parse_place(folder), options
        self._place = open_place(self.folder, store)
        self._lock = self._place.lock()
        self._shards: list[ShardEntry] = []
        self._fields: dict[str, FieldInfo] = {}
        self._contents = ShardContents()
        self._form = SampleForm(options.array_format)
        self._keys: set[int] | None = None
        self._open: Shard | None = None
        self._n_written = 0
        self._resumed: _Resumed | None = None
        try:
            self._ended = ""
            self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self.abandon()
            raise

    @property
    def written(self) -> int:
        """Number of samples so far. After `resume=True`, the number of the sample to continue with."""
        if self._resumed is not None and not self._resumed.n_given:
            self._resumed.continues = True
        return self._n_written

    def write(self, sample: Mapping[str, Any], sample_id: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Add one sample."""
        if sample_id is None and not metadata and self._write_plain(sample):
            return
        if self._resumed is not None and self._is_stored(sample, sample_id, metadata):
            return
        if self._ended:
            raise WriteError(f"Could not write a sample: this writer of {self.folder} {self._ended}. Create a new one.")
        key, key_hash = self._new_key(sample_id)
        members = self._form.encode(sample, self._n_written, key, sample_id or key, metadata)
        try:
            shard = self._open_shard_for(members)
            self._form.add(members, shard, len(self._shards))
            self._n_written += 1
            if self._keys is not None:
                self._keys.add(key_hash)
            if shard.n_items == self.options.shard_size:
                self._close_shard()
        except OSError as error:
            raise self._fail(error) from error

    def _write_plain(self, sample: Mapping[str, Any]) -> bool:
        """Add a sample of arrays like those before it into columns, and return True; the quick way of `write`."""
        shard = self._open
        if not (isinstance(shard, PackedShard) and isinstance(sample, Mapping) and self._counts_only):
            return False
        try:
            is_added = shard.add_plain(sample, self._form.suffixes)
            self._n_written += is_added
            if shard.n_items == self.options.shard_size:
                self._close_shard()
        except OSError as error:
            raise self._fail(error) from error
        return is_added

    def write_rows(self, arrays: Mapping[str, Any], start: int, stop: int) -> None:
        """Add rows of arrays as samples without ids and metadata; into columns, whole blocks of them at once."""
        while start < stop:
            sample = {name: array[start] for name, array in arrays.items()}
            members = self._encode_first(sample, arrays)
            if members is None:
                self.write(sample, None, None)
                start += 1
                continue
            try:
                shard = self._open_shard_for(members)
                assert isinstance(shard, PackedShard), "rows are written at once into columns only"
                end = min(stop, start + self.options.shard_size - shard.n_items)
                self._form.add_rows(members, shard, {name: array[start:end] for name, array in arrays.items()})
                self._n_written += end - start
                start = end
                if shard.n_items == self.options.shard_size:
                    self._close_shard()
            except OSError as error:
                raise self._fail(error) from error

    @property
    def _counts_only(self) -> bool:
        """Whether nothing is asked of a sample without id and metadata but how many there are."""
        return not self._ended and [self._resumed, self._keys, self.options.most_tar_bytes] == [None, None, None]

    def _encode_first(self, sample: Mapping[str, Any], arrays: Mapping[str, Any]) -> Members | None:
        """Return the first of many rows, encoded, if they can be written at once; None if they cannot."""
        if not self._counts_only or not all(is_plain_array(array) for array in arrays.values()):
            return None
        key = automatic_key(self._n_written)
        members = self._form.encode(sample, self._n_written, key, key, None)
        is_packed = isinstance(self._open, PackedShard) if self._open else self.options.packs(members.n_bytes)
        return members if is_packed else None

    def commit(self) -> Manifest:
        """Publish the dataset, and return its manifest."""
        if self._resumed is not None and self._resumed.n_given and not self._resumed.continues:
            raise OptionError(
                f"Of the {count(len(self._resumed.stored), 'sample')} that were in {self.folder} before resume=True, "
                f"only the first {self._resumed.n_given} were written again. Write all of them, or start over with "
                "overwrite=True."
            )
        if self._ended == _COMPLETE:
            return self._read_published()
        if self._ended:
            raise WriteError(
                f"Could not publish the dataset: this writer of {self.folder} {self._ended}. Create a new one."
            )
        if not self._n_written:
            raise OptionError("A dataset must have at least one sample, but no samples were written.")
        try:
            if self._open is not None and self._open.n_items:
                self._close_shard()
            self._place.prepare(self._manifest())
            self._lock.check()
            self._place.finish(self.options.shard_name)
        except OSError as error:
            raise self._fail(error) from error
        self._ended = _COMPLETE
        self._lock.release()
        return self._read_published()

    def abandon(self) -> None:
        """Stop without publishing; finished shards are kept for `resume=True`. Does nothing after `commit`."""
        if not self._ended:
            self._ended = "was abandoned"
            self._discard_open()
        self._lock.release()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and not self._ended and self._lock.is_held:  # late, modules are gone; a fork has no lock
            warnings.warn(
                f"A writer of {self.folder} with {count(self._n_written, 'sample')} was dropped without finalize(), so "
                "no dataset was published. Use it in a `with` statement, or continue with resume=True.",
                ResourceWarning,
                stacklevel=1,
            )
            self.abandon()

    # -- start and end -------------------------------------------------------------------------------------------------

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        place, options = self._place, json.dumps(self.options.to_json(), sort_keys=True)
        if resume and overwrite:
            raise OptionError(
                "At most one of resume and overwrite must be set, got both. Resume an interrupted write, or start over."
            )
        if resume:
            place.finish(self.options.shard_name)
            complete = None if place.is_begun else place.read_published()
            if complete is not None:
                self._check_same(complete)
                self._n_written, self._ended = complete.n_items, _COMPLETE
                self._form = SampleForm(self.options.array_format, complete.fields)
                self._resume_after(place.read_published_index, complete.shards)
                self._lock.release()
                return
            if place.options not in (None, options):
                raise OptionError(
                    f"resume=True needs the options with which {self.folder} was started, {place.options}, got "
                    f"{options}. Use the same options, or overwrite=True instead to start over."
                )
            self._take_finished_shards()
        else:
            if not overwrite and place.read_published() is not None:
                raise WriteError(
                    f"{self.folder} holds a dataset already. Replace it with overwrite=True, or use another folder."
                )
            place.clear()
        place.begin(options)

    def _take_finished_shards(self) -> None:
        keys: list[int] = []
        for entry, side_index in self._place.take_finished(self.options.shard_name, self.options.compression):
            self._add_shard(entry, side_index)
            self._n_written += entry.n_items
            keys += side_index.keys.tolist()
        if any(key != _hash_key(automatic_key(number)) for number, key in enumerate(keys)):
            self._keys = set(keys)
        self._resume_after(self._place.shards.read_index, self._shards)

    def _resume_after(self, read_index: Callable[[str], bytes], shards: Sequence[ShardEntry]) -> None:
        if shards:
            self._resumed = _Resumed(StoredSamples(read_index, [(shard.name, shard.n_items) for shard in shards]))

    def _read_published(self) -> Manifest:
        """Return the manifest of the dataset that this writer has published, or found."""
        if (published := self._place.read_published()) is None:
            raise WriteError(f"The dataset in {self.folder} has disappeared. Write it again.")
        return published

    def _check_same(self, complete: Manifest) -> None:
        """Raise OptionError if the complete dataset was written with other options than this writer's."""
        found, wanted = (
            (one.shard_size, one.compression, one.array_format, dict(one.metadata), one.layout)
            for one in (complete, self.options)
        )
        if self.options.layout == "auto":
            found = (*found[:-1], "auto")
        if found != wanted or untag(complete.shards[0].name) != self.options.shard_name(0):
            raise OptionError(
                f"resume=True needs the options of the complete dataset in {self.folder}, {found}, got {wanted}. Use "
                "overwrite=True instead to replace it."
            )

    def _fail(self, error: OSError) -> WriteError:
        """Close this writer, and return the error to raise."""
        self._discard_open()
        self._ended = "has failed"
        self._lock.release()
        message = str(error) if isinstance(error, WriteError) else f"Could not write to {self.folder}: {error}"
        advice = "" if "resume=True" in message else " Fix the cause and continue with resume=True."
        return WriteError(f"{message.removesuffix('.')}.{advice}")

    def _discard_open(self) -> None:
        """Discard the shard that is open; finished ones are kept, and may still be on their way to a server."""
        with suppress(OSError):
            if self._open is not None:
                self._open.discard()
        with suppress(OSError):
            self._place.shards.wait()

    def _manifest(self) -> Manifest:
        shape = (self.options.shard_size, self.options.array_format, self.options.metadata)
        self._contents.suggest_columns(self.folder, self._shards)
        return Manifest(self.folder, self._fields, tuple(self._shards), *shape, layout=self._contents.layout)

    # -- shards --------------------------------------------------------------------------------------------------------

    def _open_shard_for(self, members: Members) -> Shard:
        """Return an open shard that has room for a sample."""
        limit = self.options.most_tar_bytes
        if limit is not None and self._open is not None and members.size_in(self._open) > limit:
            self._close_shard()
        if self._open is None:
            self._lock.check()
            place = len(self._shards), self._n_written, members.n_bytes
            self._open = open_shard(self._place.shards, self.options, *place)
            if limit is not None and (needed := members.size_in(self._open)) > limit:
                self._open.discard()
                self._open = None
                raise OptionError(
                    f"A sample must fit into a shard of {limit} bytes, but sample {self._n_written} needs {needed}. "
                    "Raise max_shard_bytes."
                )
        return self._open

    def _close_shard(self) -> None:
        assert self._open is not None, "called only while a shard is open"
        with self._open as shard:
            self._open = None
            self._add_shard(*shard.close())

    def _add_shard(self, entry: ShardEntry, side_index: ShardIndex) -> None:
        self._shards.append(entry)
        self._contents.add(side_index)
        if not self._fields:
            self._form = SampleForm(self.options.array_format, merge_fields({}, side_index))
        self._fields = merge_fields(self._fields, side_index)

    # -- one sample ----------------------------------------------------------------------------------------------------

    def _is_stored(self, sample: Mapping[str, Any], sample_id: str | None, metadata: Mapping[str, Any] | None) -> bool:
        """Compare a sample that comes after `resume=True`; return whether it is stored already, and to be skipped."""
        assert self._resumed is not None, "called only after resuming"
        resumed, number = self._resumed, self._resumed.n_given
        key = automatic_key(number) if sample_id is None else encode_key(sample_id)
        named = self._n_written if resumed.continues else number
        members = self._form.encode(sample, named, key, sample_id or key, metadata)
        is_same = resumed.stored.has(number, members)
        if sample_id is not None and is_same:
            resumed.continues = False  # ids are unique: this one cannot be that of another sample
        if not resumed.continues:
            if not is_same:
                raise OptionError(
                    f"With resume=True, samples must come from number {self._n_written} on (writer.written), or all of "
                    f"them again from the beginning, but the sample that was given as number {number} differs from the "
                    f"one in {self.folder}. Write the same samples, or start over with overwrite=True."
                )
            resumed.n_given += 1
            if resumed.n_given == len(resumed.stored):
                self._resumed = None
            return True
        resumed.n_given += 1
        resumed.contents.add(members.content_hash())
        if is_same and resumed.n_given < resumed.stored.first_shard_items:
            return False
        self._resumed = None
        if is_same and len(resumed.contents) > 1:  # samples that are all alike say nothing
            self.abandon()
            raise OptionError(
                f"The {resumed.n_given} samples that were written after resume=True are the first ones in "
                f"{self.folder} again. After asking for writer.written, continue with the sample of that number, "
                f"{len(resumed.stored)}; to write all of them again from the beginning, do not ask for it before."
            )
        return False

    def _new_key(self, sample_id: str | None) -> tuple[str, int]:
        """Return a key that no sample has yet, and its hash."""
        number = self._n_written
        if sample_id is None and self._keys is None:
            return automatic_key(number), 0
        if self._keys is None:
            # Automatic keys never repeat. From the first id that the user gives, remember every key.
            self._keys = {_hash_key(automatic_key(earlier)) for earlier in range(number)}
        key = automatic_key(number) if sample_id is None else encode_key(sample_id)
        key_hash = _hash_key(key)
        if key_hash in self._keys:
            raise OptionError(f"sample_id must be unique, got {sample_id or key!r} again for sample {number}.")
        return key, key_hash


@dataclass(slots=True)
class _Resumed:
    """The samples of an earlier writer, until it is clear that those that come are others."""

    stored: StoredSamples
    continues: bool = False
    """Whether somebody asked for `written` before the first sample, and so knows which one is next."""
    n_given: int = 0
    contents: set[int] = field(default_factory=set)
    """Hashes of the samples that were given to a writer that continues."""


def merge_fields(fields: Mapping[str, FieldInfo], side_index: ShardIndex) -> dict[str, FieldInfo]:
    """Return `fields` merged with those of one more shard."""
    merged = dict(fields)
    for stored in side_index.stored_fields:
        name = field_name(stored.suffix)
        info = FieldInfo(*stored)
        merged[name] = merged[name].merge(info) if name in merged else info
    return merged


def _hash_key(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
