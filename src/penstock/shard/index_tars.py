"""Archives that others wrote get a side index and a manifest, without a byte of them being changed."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from penstock.core.errors import DamageError, SourceError
from penstock.files.durable import write_aside
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.shard.compression import DecompressedStream, detect_compression, max_decompressed_bytes
from penstock.shard.manifest import MANIFEST, METADATA, FieldInfo, Manifest, ShardEntry, manifest_path
from penstock.shard.names import field_names, split_name
from penstock.shard.side_index import MISSING, SideIndex, SideIndexBuilder, index_name
from penstock.shard.tar import Member, Readable, read_members

__all__ = ["ARCHIVE", "Problem", "expand_archives", "index_archives"]

ARCHIVE = re.compile(r"\.(tar|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
"""What the name of an archive ends with."""

_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a shard, or with one of its items."""

    shard: str
    item: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}{'' if self.item is None else f', item {self.item}'}: {self.reason}"


def expand_archives(where: str | os.PathLike[str]) -> list[Path]:
    """Return the archives that a folder, a brace pattern, a glob or a path means, in order.

    Examples
    --------
    >>> [path.name for path in _expand_braces("train-{000008..000010}.tar")]
    ['train-000008.tar', 'train-000009.tar', 'train-000010.tar']
    """
    path = Path(where)
    if path.is_dir():
        found = sorted(
            entry for entry in path.iterdir() if ARCHIVE.search(entry.name) and not entry.name.startswith(".")
        )
    elif "{" in path.name:
        found = list(_expand_braces(str(path)))
    elif any(letter in path.name for letter in "*?["):
        found = sorted(path.parent.glob(path.name))
    else:
        found = [path]
    missing = [entry for entry in found if not entry.is_file()]
    if missing:
        raise SourceError(f"{where} names {len(missing)} archives that are not there: {missing[0]}, ….")
    if not found:
        raise SourceError(f"No shards found: {where} has no tar archives.")
    return found


def _expand_braces(pattern: str) -> Iterator[Path]:
    match = _BRACES.search(pattern)
    if match is None:
        yield Path(pattern)
        return
    first, dots, last = match[1].partition("..")
    if dots and not (first.isdigit() and last.isdigit()):
        raise SourceError(f"{{{match[1]}}} is no range of numbers; use for example {{000000..000009}} or {{a,b}}.")
    width = len(first) if first.startswith("0") else 0
    parts = [f"{n:0{width}d}" for n in range(int(first), int(last) + 1)] if dots else match[1].split(",")
    for part in parts:
        yield from _expand_braces(pattern[: match.start()] + part + pattern[match.end() :])


def index_archives(
    where: str | os.PathLike[str],
    *,
    workers: int = 1,
    allow_missing: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Manifest | None, list[Problem]]:
    """Read every archive once, check it, and write its side index; the manifest last, and only if nothing is wrong.

    Parameters
    ----------
    where
        A folder of archives, or a pattern such as `train-{000000..000009}.tar`.
    workers
        Archives that are read at once.
    allow_missing
        Take items that lack a member which others have; they give None for it.
    progress
        Told the bytes of each archive that is done.
    """
    archives = expand_archives(where)
    _refuse_own(manifest_path(where))
    folders = {archive.parent for archive in archives}
    if len(folders) > 1:
        raise SourceError(f"{where} names archives in {len(folders)} folders; index each folder by itself.")
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = []
        for archive, (layout, problems) in zip(archives, pool.map(_indexed, archives), strict=True):
            progress(archive.stat().st_size)
            done.append((archive, layout, problems))
    problems = [problem for *_, found in done for problem in found]
    layouts = [(archive.name, layout) for archive, layout, _ in done if layout is not None]
    problems += _twice(layouts)
    if not allow_missing:
        problems += _missing(layouts)
    if problems:
        return None, problems
    shards = [_stored(archive, layout) for archive, layout, _ in done if layout is not None]
    fields = _fields([layout for _, layout in layouts])
    manifest = Manifest(archives[0].parent, fields, tuple(shards), None, "as found")
    path = manifest_path(where)
    _keep_other(path)
    write_aside(path, manifest.to_bytes())
    return manifest, []


def _indexed(archive: Path) -> tuple[SideIndex | None, list[Problem]]:
    """Return the layout of an archive, or what is wrong with it."""
    compression, size = detect_compression(archive), archive.stat().st_size
    builder = SideIndexBuilder()
    problems: list[Problem] = []
    with archive.open("rb") as file:
        stream: Readable = (
            file
            if compression == "none"
            else DecompressedStream(file, compression, archive.name, max_decompressed_bytes(size))
        )
        counted = _Counted(stream)
        try:
            for key, suffix, member in _grouped(read_members(counted, archive.name), archive.name, problems):
                if key is not None:
                    builder.begin_item(key.encode(errors="surrogateescape"))
                if builder.has(suffix):
                    problems.append(Problem(archive.name, builder.n_items - 1, f"{member.name!r} is there twice"))
                    continue
                npy = _npy(suffix, member, archive.name, builder.n_items - 1, problems)
                builder.add(suffix, (member.begin, member.offset, member.size), member.check, npy)
        except DamageError as error:
            return None, [*problems, Problem(archive.name, error.item, error.reason)]
    if not builder.n_items:
        return None, [*problems, Problem(archive.name, None, "it holds no items, named KEY.FIELD")]
    return builder.build(counted.position), problems


class _Counted:
    """Counts what is read."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.position = 0

    def read(self, size: int, /) -> bytes:
        piece = self._stream.read(size)
        self.position += len(piece)
        return piece


def _grouped(found: Iterator[Member], shard: str, problems: list[Problem]) -> Iterator[tuple[str | None, str, Member]]:
    """Yield key, suffix and member; the key only where a new item begins."""
    current, seen, n_items = "", set[str](), 0
    for member in found:
        key, suffix = split_name(member.name)
        if not key:
            if not Path(member.name).name.startswith("."):
                problems.append(Problem(shard, None, f"{member.name!r} has no key and extension"))
            continue
        if key != current and key in seen:
            reason = f"members of {key!r} are interleaved with those of others: {member.name!r} comes too late"
            problems.append(Problem(shard, max(0, n_items - 1), reason))
            continue
        if key != current:
            n_items += 1
        yield (key if key != current else None), suffix, member
        seen.add(key)
        current = key


def _npy(suffix: str, member: Member, shard: str, item: int, problems: list[Problem]) -> NpyHeader | None:
    if suffix.rpartition(".")[2].lower() != "npy":
        return None
    try:
        return parse_npy_header(member.head, member.size)
    except ValueError as error:
        problems.append(Problem(shard, item, f"{member.name!r}: {error}"))
        return None


def _missing(layouts: list[tuple[str, SideIndex]]) -> list[Problem]:
    """Return the members that some items lack and others have."""
    suffixes = dict.fromkeys(column.suffix for _, layout in layouts for column in layout.columns)
    problems = []
    for name, layout in layouts:
        columns = {column.suffix: column for column in layout.columns}
        rows = np.arange(layout.n_items)
        for suffix in suffixes:
            lacking = columns[suffix].begins.at(rows) == MISSING if suffix in columns else np.ones(layout.n_items, bool)
            if lacking.any():
                reason = f"{lacking.sum()} of {layout.n_items} items have no .{suffix}"
                problems.append(Problem(name, None, reason))
    return problems


def _twice(layouts: list[tuple[str, SideIndex]]) -> list[Problem]:
    """Return the keys that more than one archive has."""
    seen: dict[int, str] = {}
    problems = []
    for name, layout in layouts:
        for row, key in enumerate(layout.keys.tolist()):
            other = seen.setdefault(key, name)
            if other != name:
                problems.append(Problem(name, row, f"its key is in {other}, too"))
    return problems


def _stored(archive: Path, layout: SideIndex) -> ShardEntry:
    stored = layout.to_bytes()
    write_aside(archive.with_name(index_name(archive.name)), stored)
    digest, size = xxhash.xxh3_128_hexdigest(stored), archive.stat().st_size
    return ShardEntry(archive.name, layout.n_items, layout.tar_bytes, size, digest, detect_compression(archive))


def _fields(layouts: list[SideIndex]) -> dict[str, FieldInfo]:
    infos: dict[str, FieldInfo] = {}
    for layout in layouts:
        for column in layout.columns:
            info = FieldInfo(column.suffix, column.dtype, column.shape)
            infos[column.suffix] = infos[column.suffix].merge(info) if column.suffix in infos else info
    # A column that one archive lacks has no fixed shape either.
    present = Counter(column.suffix for layout in layouts for column in layout.columns)
    for suffix, info in infos.items():
        if present[suffix] < len(layouts):
            infos[suffix] = FieldInfo(suffix, info.dtype, None)
    names = field_names(infos)
    ordered = sorted(infos, key=lambda suffix: names[suffix] == METADATA)
    return {names[suffix]: infos[suffix] for suffix in ordered}


def _refuse_own(path: Path) -> None:
    """Refuse to replace the manifest of a data set that a writer of ours made: it says more than an index knows."""
    try:
        own = Manifest.read(path).shard_size is not None
    except (SourceError, DamageError):
        return
    if own:
        raise SourceError(
            f"{path.parent} was written by Penstock and has an index; `penstock verify` checks it. "
            f"Remove {path.name} to give the archives a new one."
        )


def _keep_other(path: Path) -> None:
    """Move another program's manifest out of the way, without losing it."""
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
