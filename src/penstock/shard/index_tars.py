"""Indexing of existing tar archives: a side index for each and a manifest; the archives stay unchanged."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from penstock.core.errors import DamageError, OptionError, SourceError
from penstock.core.text import cause, count
from penstock.files.kinds import local_path
from penstock.files.read_ahead import exceeds_cache
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.shard.columns.index_packed import PackedIndex, index_packed, is_packed
from penstock.shard.columns.read_index import ShardIndex, layout_of
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.compression import Compression, DecompressedStream, compression_of, max_decompressed_bytes
from penstock.shard.manifest import MANIFEST, METADATA, FieldInfo, Manifest, manifest_path, manifest_place
from penstock.shard.names import field_names, fold_extension, split_name
from penstock.shard.places.archives import Archive, find_archives
from penstock.shard.places.targets import FolderTarget, Target, UrlTarget
from penstock.shard.side_index import MISSING, SideIndex, SideIndexBuilder, index_name
from penstock.shard.table import ShardEntry, table_path
from penstock.shard.tar import TAR_BLOCK, Member, Readable, read_members

__all__ = ["Problem", "index_archives"]

_MOST_FIELDS = 10_000  # a million members of one item would take minutes and gigabytes

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a shard or of one of its items, or what was skipped of it."""

    shard: str
    item: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}{'' if self.item is None else f', item {self.item}'}: {self.reason}"


def _log_skipped(skipped: Problem) -> None:
    _LOG.warning("%s.", skipped)


def index_archives(
    where: str | os.PathLike[str] | Url,
    *,
    workers: int = 1,
    allow_missing: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    on_skip: Callable[[Problem], None] = _log_skipped,
    output: str | os.PathLike[str] | None = None,
    store: StoreOptions | None = None,
) -> tuple[Manifest | None, list[Problem]]:
    """Read and check every archive and write its side index, then the manifest; write nothing if there are problems.

    Parameters
    ----------
    where
        A folder of archives, or a pattern such as `train-{000000..000009}.tar`; or the URL of one.
    workers
        Number of archives to read at once.
    allow_missing
        Accept items that lack a member which others have; the field is then None.
    progress
        Called with the size in bytes of each archive that is done.
    on_skip
        Called for each archive of which hidden files were skipped, such as the `._*` of macOS. Default: a warning in
        the log.
    output
        A folder of this machine for the index of a URL, to which nothing is then written. None: beside the archives.
    store
        How to reach the URL.

    Returns
    -------
    The manifest and no problems, or None and the problems.

    Examples
    --------
    >>> manifest, problems = index_archives("photos/train-{000000..000009}.tar")  # doctest: +SKIP
    """
    place = parse_place(where)
    archives = find_archives(where, store)
    folders = {archive.place.parent for archive in archives if isinstance(archive.place, Path)}
    if len(folders) > 1:
        raise SourceError(f"All archives must be in one folder, got {len(folders)} for {where}. Index each by itself.")
    target, name = _choose_target(place, archives[0], output)
    elsewhere = None if output is None else _url_of(archives[0])
    _check_replaceable(target, name, elsewhere)
    done = []
    for found in _index_all(archives, workers):
        progress(found.archive.n_bytes)
        if found.hidden:
            on_skip(_name_hidden(found))
        done.append(found)
    problems = [problem for found in done for problem in found.problems]
    indexed = list(_number_items(done))
    if not allow_missing:
        problems += _find_missing_members([(archive.name, side_index) for archive, side_index, _ in indexed])
    if problems:
        return None, problems
    return _write(target, name, indexed, elsewhere), []


def _index_all(archives: list[Archive], workers: int) -> "Iterator[_Indexed]":
    give_back = exceeds_cache(archive.n_bytes for archive in archives)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(partial(_index_archive, give_back=give_back), archives)


def _name_hidden(found: "_Indexed") -> Problem:
    names = ", ".join(map(repr, found.hidden[:3])) + (", …" if len(found.hidden) > 3 else "")
    files = "1 hidden file was" if len(found.hidden) == 1 else f"{len(found.hidden)} hidden files were"
    return Problem(found.archive.name, None, f"{files} skipped: {names}")


def _choose_target(place: Path | Url, archive: Archive, output: str | os.PathLike[str] | None) -> tuple[Target, str]:
    """Return where the index is written, and the name of its manifest."""
    if output is not None:
        if isinstance(place, Path):
            raise OptionError(f"output is for the index of a URL, got the archives {place}: theirs is beside them.")
        return FolderTarget(local_path(output)), MANIFEST
    if isinstance(archive.place, Path):
        return FolderTarget(archive.place.parent), manifest_path(place).name if isinstance(place, Path) else MANIFEST
    return UrlTarget(archive.place), manifest_place(place).name


def _url_of(archive: Archive) -> Url | None:
    return None if isinstance(archive.place, Path) else archive.place.url


def _write(
    target: Target, name: str, indexed: Sequence[tuple[Archive, ShardIndex, Compression]], elsewhere: Url | None
) -> Manifest:
    """Write side indexes, then the manifest; `elsewhere` is where the archives are, if not in the same folder."""
    files: list[tuple[str, bytes]] = []
    shards = []
    for archive, side_index, compression in indexed:
        stored = side_index.to_bytes()
        files.append((index_name(archive.name), stored))
        sizes = side_index.n_items, side_index.tar_bytes, archive.n_bytes
        shards.append(ShardEntry(archive.name, *sizes, xxhash.xxh3_128_hexdigest(stored), compression))
    fields = _merge_columns([side_index for _, side_index, _ in indexed])
    layout = "+".join(sorted({layout_of(side_index) for _, side_index, _ in indexed}))
    manifest = Manifest(target.place, fields, tuple(shards), None, "as found", archives=elsewhere, layout=layout)
    content = manifest.to_bytes()
    table = manifest.table_bytes(content)
    if table is not None:
        files.append((table_path(Path(name)).name, table))
    target.write([*files, (name, content)])
    return manifest


class _Indexed(NamedTuple):
    """What was found in an archive; no side index if it is unusable."""

    archive: Archive
    side_index: SideIndex | PackedIndex | None
    compression: Compression
    problems: list[Problem]
    hidden: list[str]


def _number_items(done: "Sequence[_Indexed]") -> Iterator[tuple[Archive, ShardIndex, Compression]]:
    """Yield the usable archives, and their side indexes, in which automatic keys count on from archive to archive."""
    first = 0
    for found in done:
        if found.side_index is None:
            continue
        side_index: ShardIndex | PackedIndex = found.side_index
        if isinstance(side_index, PackedIndex):
            side_index = side_index.number_from(first)
        first += side_index.n_items
        yield found.archive, side_index, found.compression


def _index_archive(archive: Archive, *, give_back: bool = False) -> _Indexed:
    """Read an archive from front to back."""
    problems: list[Problem] = []
    hidden: list[str] = []
    compression: Compression = "none"

    def fail(item: int | None, reason: str) -> _Indexed:
        return _Indexed(archive, None, compression, [*problems, Problem(archive.name, item, reason)], hidden)

    builder = SideIndexBuilder()
    fields: set[str] = set()
    try:
        with archive.open(give_back=give_back) as file:
            compression = compression_of(file.peek(8))
            stream: Readable = file
            if compression != "none":
                limit = max_decompressed_bytes(archive.n_bytes)
                stream = DecompressedStream(file, compression, archive.name, limit)
            counted = _CountingStream(stream, stream.read(TAR_BLOCK))
            if is_packed(counted.first):
                return _Indexed(archive, index_packed(counted, archive.name), compression, problems, hidden)
            found = _visible_members(read_members(counted, archive.name), hidden)
            for key, suffix, member in _group_members(found, archive.name, problems):
                if key is not None:
                    builder.begin_item(key.encode(errors="surrogateescape"))
                fields.add(suffix)
                if len(fields) > _MOST_FIELDS:
                    reason = f"its members have more than {_MOST_FIELDS:,} extensions; each is a field of the dataset"
                    return fail(builder.n_items - 1, reason)
                if builder.has(suffix):
                    problems.append(Problem(archive.name, builder.n_items - 1, f"{member.name!r} appears twice"))
                    continue
                npy = _read_npy_header(suffix, member, archive.name, builder.n_items - 1, problems)
                builder.add(suffix, (member.begin, member.offset, member.size), member.checksum, npy)
    except DamageError as error:
        return fail(error.item, error.reason)
    except OSError as error:
        return fail(None, f"it cannot be read: {cause(error)}")
    if not builder.n_items:
        return fail(None, "it has no items; members must be named KEY.FIELD")
    return _Indexed(archive, builder.build(counted.position), compression, problems, hidden)


class _CountingStream:
    """Counts the bytes that are read; the first of them were read before."""

    def __init__(self, stream: Readable, first: bytes) -> None:
        self._stream, self.first = stream, first
        self.position = 0

    def read(self, size: int, /) -> bytes:
        start = min(self.position, len(self.first))
        content = self.first[start : start + size]
        if len(content) < size:
            content += self._stream.read(size - len(content))
        self.position += len(content)
        return content


def _visible_members(found: Iterator[Member], hidden: list[str]) -> Iterator[Member]:
    """Yield the members whose names do not begin with a dot, and append the names of the others to `hidden`."""
    for member in found:
        if Path(member.name).name.startswith("."):
            hidden.append(member.name)
        else:
            yield member


def _group_members(
    found: Iterator[Member], shard: str, problems: list[Problem]
) -> Iterator[tuple[str | None, str, Member]]:
    """Yield (key, suffix, member) for each member; the key is None unless a new item begins."""
    current, seen, n_items = "", set[str](), 0
    for member in found:
        key, suffix = split_name(member.name)
        if not key:
            problems.append(Problem(shard, None, f"the name {member.name!r} must have a key and an extension"))
            continue
        if key != current and key in seen:
            reason = f"members of {key!r} are interleaved with those of other items: {member.name!r} comes too late"
            problems.append(Problem(shard, max(0, n_items - 1), reason))
            continue
        if key != current:
            n_items += 1
        yield (key if key != current else None), fold_extension(suffix), member
        seen.add(key)
        current = key


def _read_npy_header(suffix: str, member: Member, shard: str, item: int, problems: list[Problem]) -> NpyHeader | None:
    if suffix.rpartition(".")[2].lower() != "npy":
        return None
    try:
        return parse_npy_header(member.head, member.size)
    except ValueError as error:
        problems.append(Problem(shard, item, f"{member.name!r}: {error}"))
        return None


def _find_missing_members(indexed: Sequence[tuple[str, ShardIndex]]) -> list[Problem]:
    """Return a problem for each member that some items lack and others have."""
    suffixes = dict.fromkeys(field.suffix for _, side_index in indexed for field in side_index.stored_fields)
    problems = []
    for archive, side_index in indexed:
        n_items = side_index.n_items
        if isinstance(side_index, RowIndex):  # its items have all fields of the shard
            have = {field.suffix: np.zeros(n_items, bool) for field in side_index.stored_fields}
        else:
            rows = np.arange(n_items)
            have = {column.suffix: column.begins.at(rows) == MISSING for column in side_index.columns}
        for suffix in suffixes:
            is_missing = have.get(suffix, np.ones(n_items, bool))
            if is_missing.any():
                has = "has" if is_missing.sum() == 1 else "have"
                reason = f"{is_missing.sum()} of {count(n_items, 'item')} {has} no .{suffix}"
                problems.append(Problem(archive, None, reason))
    return problems


def _merge_columns(side_indexes: list[ShardIndex]) -> dict[str, FieldInfo]:
    """Return the fields of all archives; the metadata come last."""
    infos: dict[str, FieldInfo] = {}
    for side_index in side_indexes:
        for suffix, dtype, shape in side_index.stored_fields:
            info = FieldInfo(suffix, dtype, shape)
            infos[suffix] = infos[suffix].merge(info) if suffix in infos else info
    # A column that one archive lacks has no fixed shape.
    counts = Counter(field.suffix for side_index in side_indexes for field in side_index.stored_fields)
    for suffix, info in infos.items():
        if counts[suffix] < len(side_indexes):
            infos[suffix] = FieldInfo(suffix, info.dtype, None)
    names = field_names(infos)
    ordered = sorted(infos, key=lambda suffix: names[suffix] == METADATA)
    return {names[suffix]: infos[suffix] for suffix in ordered}


def _check_replaceable(target: Target, name: str, elsewhere: Url | None) -> None:
    """Refuse to replace the manifest of a dataset that Penstock wrote, or of other archives: it could be lost."""
    try:
        found = target.read_manifest(name)
    except (SourceError, DamageError):
        return
    if found.shard_size is not None:
        raise SourceError(
            f"{target.place} was written by Penstock and already has an index. Check it with `penstock check`, or "
            f"remove {name} to index the archives again."
        )
    if found.archives != elsewhere:
        raise SourceError(
            f"{target.place} has the index of {found.archives or 'the archives in it'}. Use another folder, or remove "
            f"{name}."
        )
