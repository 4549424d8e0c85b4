"""Indexing of existing tar archives: a side index for each and a manifest; the archives stay unchanged."""

import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.core.errors import DamageError, SourceError, WriteError
from penstock.core.text import cause, count
from penstock.files.durable import remove_asides, write_aside
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.read_ahead import exceeds_cache, open_once
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.shard.compression import DecompressedStream, detect_compression, max_decompressed_bytes
from penstock.shard.manifest import MANIFEST, METADATA, FieldInfo, Manifest, manifest_path
from penstock.shard.names import field_names, fold_extension, split_name
from penstock.shard.shard_file import write_index
from penstock.shard.side_index import MISSING, SideIndex, SideIndexBuilder, index_name
from penstock.shard.table import table_path
from penstock.shard.tar import Member, Readable, read_members

__all__ = ["ARCHIVE", "Problem", "expand_archives", "index_archives"]

_MOST_FIELDS = 10_000  # a million members of one item would take minutes and gigabytes

ARCHIVE = re.compile(r"\.(tar|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
"""The file name extensions of archives."""

_LOG = logging.getLogger("penstock")
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_BRACES, _MAX_ARCHIVES = 16, 250_000  # the largest public dataset of tar archives has 231,350


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a shard or of one of its items, or what was skipped of it."""

    shard: str
    item: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}{'' if self.item is None else f', item {self.item}'}: {self.reason}"


def expand_archives(where: str | os.PathLike[str]) -> list[Path]:
    """Return the archives of a folder, brace pattern, glob or path, in order.

    Examples
    --------
    >>> list(_expand_braces("train-{000008..000010}.tar", itertools.count()))
    ['train-000008.tar', 'train-000009.tar', 'train-000010.tar']
    """
    path = local_path(where)
    try:
        found = _find_archives(path)
        missing = [entry for entry in found if not entry.exists()]
    except SourceError:
        raise
    except (OSError, ValueError) as error:  # a name that is too long, or no valid pattern
        raise SourceError(f"{where} must be a folder, an archive or a pattern of archives: {cause(error)}.") from error
    if missing:
        raise SourceError(
            f"All archives of {where} must exist, but {len(missing)} of {len(found)} are missing: {missing[0]}, …."
        )
    if not found:
        raise SourceError(f"No shards found: there are no tar archives in {where}.")
    return found


def _find_archives(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(
            entry for entry in path.iterdir() if ARCHIVE.search(entry.name) and not entry.name.startswith(".")
        )
    if "{" in path.name:
        names = list(itertools.islice(_expand_braces(str(path), itertools.count()), _MAX_ARCHIVES + 1))
        if len(names) > _MAX_ARCHIVES:
            raise SourceError(f"A pattern must name at most {_MAX_ARCHIVES:,} archives, but {path.name} names more.")
        return [Path(name) for name in names]
    if any(letter in path.name for letter in "*?["):
        return sorted(path.parent.glob(path.name))
    return [path]


def _expand_braces(pattern: str, steps: Iterator[int]) -> Iterator[str]:
    """Yield the names of a pattern; `steps` counts the calls, since a range may be empty after millions of them."""
    if pattern.count("{") > _MAX_BRACES:
        raise SourceError(f"A pattern must have at most {_MAX_BRACES} braces, got {pattern.count('{')}.")
    if next(steps) > 2 * _MAX_ARCHIVES:
        raise SourceError(f"The ranges of a pattern must have at most {_MAX_ARCHIVES:,} numbers, got more.")
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, dots, last = match[1].partition("..")
    if dots and not (_NUMBER.fullmatch(first) and _NUMBER.fullmatch(last)):
        raise SourceError(f"A brace range must be like {{000000..000009}} or {{a,b}}, got {{{match[1]}}}.")
    width = len(first) if first.startswith("0") else 0
    numbers = (f"{n:0{width}d}" for n in range(int(first), int(last) + 1)) if dots else None
    for choice in match[1].split(",") if numbers is None else numbers:
        yield from _expand_braces(pattern[: match.start()] + choice + pattern[match.end() :], steps)


def _log_skipped(skipped: Problem) -> None:
    _LOG.warning("%s.", skipped)


def index_archives(
    where: str | os.PathLike[str],
    *,
    workers: int = 1,
    allow_missing: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    on_skip: Callable[[Problem], None] = _log_skipped,
) -> tuple[Manifest | None, list[Problem]]:
    """Read and check every archive and write its side index, then the manifest; write nothing if there are problems.

    Parameters
    ----------
    where
        A folder of archives, or a pattern such as `train-{000000..000009}.tar`.
    workers
        Number of archives to read at once.
    allow_missing
        Accept items that lack a member which others have; the field is then None.
    progress
        Called with the size in bytes of each archive that is done.
    on_skip
        Called for each archive of which hidden files were skipped, such as the `._*` of macOS. Default: a warning in
        the log.

    Returns
    -------
    The manifest and no problems, or None and the problems.
    """
    archives = expand_archives(where)
    path = manifest_path(where)
    _check_replaceable(path)
    folders = {archive.parent for archive in archives}
    if len(folders) > 1:
        raise SourceError(f"All archives must be in one folder, got {len(folders)} for {where}. Index each by itself.")
    give_back = exceeds_cache(archive.stat().st_size for archive in archives)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = []
        found = pool.map(partial(_index_archive, give_back=give_back), archives)
        for archive, (side_index, problems, hidden) in zip(archives, found, strict=True):
            progress(archive.stat().st_size)
            if hidden:
                names = ", ".join(map(repr, hidden[:3])) + (", …" if len(hidden) > 3 else "")
                files = "1 hidden file was" if len(hidden) == 1 else f"{len(hidden)} hidden files were"
                on_skip(Problem(archive.name, None, f"{files} skipped: {names}"))
            done.append((archive, side_index, problems))
    problems = [problem for *_, found in done for problem in found]
    indexed = [(archive, side_index) for archive, side_index, _ in done if side_index is not None]
    if not allow_missing:
        problems += _find_missing_members(indexed)
    if problems:
        return None, problems
    lock = FolderLock(archives[0].parent)
    try:
        return _write(path, indexed), []
    finally:
        lock.release()


def _write(path: Path, indexed: list[tuple[Path, SideIndex]]) -> Manifest:
    """Write side indexes, then the manifest, whose path is given; remove what one that was killed left behind."""
    folder = indexed[0][0].parent
    try:
        remove_asides(folder, {path.name, table_path(path).name, *(index_name(archive.name) for archive, _ in indexed)})
    except OSError as error:
        raise WriteError(f"Could not write to {folder}: {cause(error)}.") from error
    shards = [write_index(archive, side_index, detect_compression(archive)) for archive, side_index in indexed]
    fields = _merge_columns([side_index for _, side_index in indexed])
    manifest = Manifest(folder, fields, tuple(shards), None, "as found")
    _keep_other_manifest(path)
    stored = manifest.to_bytes()
    table = manifest.table_bytes(stored)
    if table is not None:
        write_aside(table_path(path), table)
    write_aside(path, stored)
    return manifest


def _index_archive(archive: Path, *, give_back: bool = False) -> tuple[SideIndex | None, list[Problem], list[str]]:
    """Read an archive; return its side index, or None if it is unusable, its problems and what was skipped."""
    builder = SideIndexBuilder()
    problems: list[Problem] = []
    hidden: list[str] = []
    fields: set[str] = set()
    try:
        compression = detect_compression(archive)
        with open_once(archive, give_back=give_back) as file:
            stream: Readable = file
            if compression != "none":
                limit = max_decompressed_bytes(os.fstat(file.fileno()).st_size)
                stream = DecompressedStream(file, compression, archive.name, limit)
            counted = _CountingStream(stream)
            found = _visible_members(read_members(counted, archive.name), hidden)
            for key, suffix, member in _group_members(found, archive.name, problems):
                if key is not None:
                    builder.begin_item(key.encode(errors="surrogateescape"))
                fields.add(suffix)
                if len(fields) > _MOST_FIELDS:
                    reason = f"its members have more than {_MOST_FIELDS:,} extensions; each is a field of the dataset"
                    return None, [*problems, Problem(archive.name, builder.n_items - 1, reason)], hidden
                if builder.has(suffix):
                    problems.append(Problem(archive.name, builder.n_items - 1, f"{member.name!r} appears twice"))
                    continue
                npy = _read_npy_header(suffix, member, archive.name, builder.n_items - 1, problems)
                builder.add(suffix, (member.begin, member.offset, member.size), member.checksum, npy)
    except DamageError as error:
        return None, [*problems, Problem(archive.name, error.item, error.reason)], hidden
    except OSError as error:
        return None, [*problems, Problem(archive.name, None, f"it cannot be read: {cause(error)}")], hidden
    if not builder.n_items:
        return (
            None,
            [*problems, Problem(archive.name, None, "it has no items; members must be named KEY.FIELD")],
            hidden,
        )
    return builder.build(counted.position), problems, hidden


class _CountingStream:
    """Counts the bytes that are read."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.position = 0

    def read(self, size: int, /) -> bytes:
        content = self._stream.read(size)
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


def _find_missing_members(indexed: list[tuple[Path, SideIndex]]) -> list[Problem]:
    """Return a problem for each member that some items lack and others have."""
    suffixes = dict.fromkeys(column.suffix for _, side_index in indexed for column in side_index.columns)
    problems = []
    for archive, side_index in indexed:
        n_items = side_index.n_items
        columns = {column.suffix: column for column in side_index.columns}
        rows = np.arange(n_items)
        for suffix in suffixes:
            is_missing = columns[suffix].begins.at(rows) == MISSING if suffix in columns else np.ones(n_items, bool)
            if is_missing.any():
                has = "has" if is_missing.sum() == 1 else "have"
                reason = f"{is_missing.sum()} of {count(n_items, 'item')} {has} no .{suffix}"
                problems.append(Problem(archive.name, None, reason))
    return problems


def _merge_columns(side_indexes: list[SideIndex]) -> dict[str, FieldInfo]:
    """Return the fields of all archives; the metadata come last."""
    infos: dict[str, FieldInfo] = {}
    for side_index in side_indexes:
        for column in side_index.columns:
            info = FieldInfo(column.suffix, column.dtype, column.shape)
            infos[column.suffix] = infos[column.suffix].merge(info) if column.suffix in infos else info
    # A column that one archive lacks has no fixed shape.
    counts = Counter(column.suffix for side_index in side_indexes for column in side_index.columns)
    for suffix, info in infos.items():
        if counts[suffix] < len(side_indexes):
            infos[suffix] = FieldInfo(suffix, info.dtype, None)
    names = field_names(infos)
    ordered = sorted(infos, key=lambda suffix: names[suffix] == METADATA)
    return {names[suffix]: infos[suffix] for suffix in ordered}


def _check_replaceable(path: Path) -> None:
    """Refuse to replace the manifest of a dataset that Penstock wrote: it holds more than indexing can recover."""
    try:
        is_own = Manifest.read(path).shard_size is not None
    except (SourceError, DamageError):
        return
    if is_own:
        raise SourceError(
            f"{path.parent} was written by Penstock and already has an index. Run `penstock verify` to check it, or "
            f"remove {path.name} to index the archives again."
        )


def _keep_other_manifest(path: Path) -> None:
    """Rename another program's manifest, so that it is not overwritten."""
    if path.name != MANIFEST or not path.exists():
        return
    try:
        Manifest.read(path)
    except SourceError:
        kept = path.with_name("dataset_metadata.before_index.json")
        while kept.exists():
            kept = kept.with_name(f"{kept.stem}_.json")
        path.rename(kept)
    except DamageError:
        return
