"""A dataset at a URL. There is no rename there, so shards are put at their place, and the manifest is put last.

URL/.writing/options.json           a write has begun: its options and writer, the tag of its shards, what it replaces
URL/NAME, URL/NAME.index            a finished shard
URL/.writing/NAME.empty             what a conversion notes of a shard
URL/.writing/dataset_metadata.json  all shards are finished: from here on, a resumed writer only puts the manifest
URL/dataset_metadata.json           the dataset is published

1. Nothing that a published manifest lists is replaced or removed before another manifest is in its place: if there is a
   dataset, the shards of the next one have a tag in their names, and the others are removed after the commit.
2. Killed before the commit: the previous dataset, or none, is there. Killed after it: the new one. Resuming puts or
   removes what is left.
3. The server fails, the credentials expire, the bucket is full: WriteError; resuming continues.
4. Another writer begins at the same URL: nobody keeps it out; the first one raises WriteError before its next shard, or
   before it publishes.
"""

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

from penstock.core.errors import DamageError, ReadError, SourceError, WriteError
from penstock.files.staging import WRITING
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import Store, open_store
from penstock.files.stores.url import Url
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.outputs.uploads import RemoteShards, run_together
from penstock.shard.shard_file import Finished
from penstock.shard.side_index import index_name
from penstock.shard.table import table_path

__all__ = ["RemotePlace", "Turn"]

_OPTIONS, _COMMIT = f"{WRITING}/options.json", f"{WRITING}/{MANIFEST}"
_TABLE = table_path(Path(MANIFEST)).name


@dataclass(frozen=True, slots=True)
class _Begun:
    """An unfinished write."""

    options: str
    tag: str
    replaces: tuple[str, ...]
    """The shards of the dataset that was there when it began, which are removed after the commit."""

    writer: str
    """Differs from writer to writer."""


class RemotePlace:
    """A URL; see `outputs.place`."""

    def __init__(self, url: Url, options: StoreOptions | None = None) -> None:
        self.where = url
        self.shards = RemoteShards(url, options)
        self._writer = ""
        with self._name_place_in_errors():
            self._use(self._read_begun())

    @property
    def _store(self) -> Store:
        return open_store(self.where, self.shards.options)

    @property
    def is_begun(self) -> bool:
        """Whether there is an unfinished write."""
        return self._begun is not None

    @property
    def options(self) -> str | None:
        """The options of an unfinished write; None if there is none."""
        return None if self._begun is None else self._begun.options

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest."""
        with self._name_place_in_errors():
            try:
                self._store.describe(MANIFEST)
            except MissingObjectError:
                return False
            return True

    def lock(self) -> "Turn":
        """Return what notices that another writer has begun."""
        return Turn(self)

    def check_unchallenged(self) -> None:
        """Raise WriteError if another writer has begun since this one has."""
        with self._name_place_in_errors():
            found = self._read_begun()
        if self._writer and (found is None or found.writer != self._writer):
            raise WriteError(
                f"Another writer is at work in {self.where}: it began after this one. Wait for it, or use another URL."
            )

    def read_published(self) -> Manifest | None:
        """Return the manifest of the dataset at the URL; None if Penstock has published none there."""
        with self._name_place_in_errors():
            return self._parse(self._read(MANIFEST))

    def read_published_index(self, name: str) -> bytes:
        """Return the side index of a published shard."""
        return self.shards.read_index(name)

    def begin(self, options: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Begin or resume a write: choose names that no reader looks at, then put notes and options."""
        with self._name_place_in_errors():
            if self._begun is None:
                self._store.remove(_COMMIT)  # of a writer that was killed after it had published
                published = self._parse(self._read(MANIFEST))
                # Archives that Penstock only indexed belong to others.
                is_ours = published is not None and published.shard_size is not None
                replaces = tuple(shard.name for shard in published.shards) if published and is_ours else ()
                self._use(_Begun(options, secrets.token_hex(4) if self._has_archives() else "", replaces, ""))
            assert self._begun is not None
            self._writer = secrets.token_hex(8)
            begun = replace(self._begun, options=options, writer=self._writer)
            for name, content in (notes or {}).items():
                self.shards.write_note(name, content)
            self._store.put(_OPTIONS, json.dumps(asdict(begun)).encode())
            self._use(begun)

    def take_finished(self, shard_name: Callable[[int], str], compression: Compression) -> list[Finished]:
        """Return the finished shards up to the first that is missing, and remove those after it."""
        if self._begun is None:
            return []
        with self._name_place_in_errors():
            names = self._list_written()
            n_most = sum(name.endswith(".tar") for name in names)
            found = self.shards.find_finished([shard_name(number) for number in range(n_most)], compression)
            finished = [shard for shard in takewhile(lambda shard: shard is not None, found) if shard is not None]
            kept = {file for entry, _ in finished for file in (entry.name, index_name(entry.name))}
            self._remove(names - kept)
            return finished

    def prepare(self, manifest: Manifest) -> None:
        """Make sure that all shards are there as they were written, then put the manifest aside."""
        with self._name_place_in_errors():
            self.shards.wait()
            self.check_unchallenged()
            stored = {info.key: info.n_bytes for info in self._store.list_folder()[1]}
            for shard in manifest.shards:
                if stored.get(shard.name) != shard.stored_bytes or index_name(shard.name) not in stored:
                    raise WriteError(
                        f"{shard.name} must have {shard.stored_bytes:,} bytes and a side index in {self.where}, but "
                        "somebody has removed or replaced it. Continue with resume=True."
                    )
            self._store.put(_COMMIT, manifest.to_bytes())

    def withdraw(self) -> None:
        """Remove the manifest that was put aside."""
        with self._name_place_in_errors():
            self._store.remove(_COMMIT)

    def finish(self, shard_name: Callable[[int], str]) -> None:
        """Put the manifest that was prepared at its place, then remove what it replaces and what is not needed."""
        del shard_name  # names of objects are in the manifest
        with self._name_place_in_errors():
            if self._begun is None:
                self._remove_notes()  # what a writer that was killed after it had published left
                return
            commit = self._read(_COMMIT)
            if commit is None:
                return
            if self._read(MANIFEST) != commit:
                table = Manifest.from_bytes(commit, self.where / MANIFEST).table_bytes(commit)
                if table is not None:
                    self._store.put(_TABLE, table)  # of another manifest until the next line: readers ignore it
                self._store.put(MANIFEST, commit)
            self._clean_up(commit)

    def clear(self) -> None:
        """Discard an unfinished write, but nothing that is published."""
        with self._name_place_in_errors():
            commit = self._read(_COMMIT) if self._begun is not None else None
            if commit is not None and commit == self._read(MANIFEST):
                self._clean_up(commit)  # it was killed after the commit
                return
            # The commit first, or half a write could be published; the options last, or others could resume it.
            self._store.remove(_COMMIT)
            if self._begun is not None:
                self._remove(self._list_written())
            self._remove_notes()

    def _clean_up(self, commit: bytes) -> None:
        """Remove what the published dataset has replaced, and the notes of its writer."""
        assert self._begun is not None, "called only while a write is unfinished"
        new = Manifest.from_bytes(commit, self.where / MANIFEST)
        old = {file for name in self._begun.replaces for file in (name, index_name(name))}
        if new.table_bytes(commit) is None:
            old.add(_TABLE)
        self._remove(old - _file_names(new))
        self._remove_notes()

    def _remove_notes(self) -> None:
        """Remove all that is not published, the mark of an unfinished write first."""
        self._store.remove(_OPTIONS)
        self._use(None)
        self._remove([info.key for info in self._store.list_objects(WRITING)])

    def _remove(self, keys: Collection[str]) -> None:
        run_together(self._store.remove, sorted(keys))

    def _has_archives(self) -> bool:
        return any(info.key.endswith(".tar") for info in self._store.list_folder()[1])

    def _list_written(self) -> set[str]:
        """Return the shards of the unfinished write, and their side indexes."""
        end = f"-{self.shards.tag}.tar" if self.shards.tag else ".tar"
        keys = (info.key for info in self._store.list_folder()[1])
        published = _file_names(self._parse(self._read(MANIFEST)))
        return {key for key in keys if key.endswith((end, index_name(end)))} - published

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.read_object(key)[0]
        except MissingObjectError:
            return None

    def _parse(self, stored: bytes | None) -> Manifest | None:
        """Return a manifest of Penstock; None if there is none, or another program's."""
        try:
            return None if stored is None else Manifest.from_bytes(stored, self.where / MANIFEST)
        except (SourceError, DamageError):
            return None

    def _read_begun(self) -> _Begun | None:
        stored = self._read(_OPTIONS)
        if stored is None:
            return None
        try:
            found = json.loads(stored)
            options, tag, writer = (str(found[name]) for name in ("options", "tag", "writer"))
            return _Begun(options, tag, tuple(map(str, found["replaces"])), writer)
        except (ValueError, LookupError, TypeError) as error:
            raise WriteError(f"{self.where / _OPTIONS} is damaged: {error}. Remove it.") from error

    def _use(self, begun: _Begun | None) -> None:
        self._begun = begun
        self.shards.tag = "" if begun is None else begun.tag

    @contextmanager
    def _name_place_in_errors(self) -> Iterator[None]:
        """Turn errors of the server into a WriteError."""
        try:
            yield
        except ReadError as error:
            raise WriteError(f"Could not write to {self.where}: {error}") from error


class Turn:
    """The turn of one writer at a URL, in the process that began it, in place of a lock."""

    def __init__(self, place: RemotePlace) -> None:
        self._place, self._process = place, os.getpid()

    @property
    def is_held(self) -> bool:
        """Whether this process writes."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise WriteError if another writer has begun."""
        self._place.check_unchallenged()

    def release(self) -> None:
        """Stop looking for other writers."""
        self._process = 0


def _file_names(manifest: Manifest | None) -> set[str]:
    """Return the files of the shards that a manifest lists."""
    shards = () if manifest is None else manifest.shards
    return {file for shard in shards for file in (shard.name, index_name(shard.name))}
