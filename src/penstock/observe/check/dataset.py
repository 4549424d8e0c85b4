"""A dataset of tar shards: manifest, quick verification, files that do not belong to it, caches, permissions."""

import itertools
import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.text import count
from penstock.observe.check.listing import Listing
from penstock.observe.faults import read_quarantine
from penstock.observe.finding import Finding, Progress
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.places.archives import ARCHIVE
from penstock.shard.side_index import index_name
from penstock.shard.summary import find_problem
from penstock.shard.table import read_table, table_path
from penstock.shard.verify import verify_sample

__all__ = ["examine_dataset", "examine_permissions", "list_some"]

_MOST_SHARDS = 20_000  # whose sizes are compared
_MOST_BYTES = 256 << 20  # that are compared with checksums
_MOST_SECONDS = 5.0
_MOST_NAMED = 5
_TABLE_FROM = 1000  # shards; below, the manifest alone is read in some milliseconds


def list_some(names: "list[str] | tuple[str, ...]") -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def examine_dataset(path: Path, where: str, listing: Listing, progress: Progress) -> Iterator[Finding]:
    """Yield findings on the dataset of a manifest.

    Parameters
    ----------
    path
        The manifest.
    where
        The folder or pattern, as other commands accept it.
    """
    try:
        manifest = Manifest.read(path)
    except (PenstockError, OSError) as error:
        yield _make_manifest_problem(path, where, error)
        return
    size = sum(map(int, manifest.table.stored_bytes))
    is_indexed = manifest.shard_size is None
    made = "indexed archives of others" if is_indexed else "written by Penstock"
    items, shards = count(manifest.n_items, "item"), count(len(manifest.shards), "shard")
    found = f"{items} in {shards}, {size / 1e6:,.1f} MB, {made}; the manifest is whole."
    facts = {
        "items": manifest.n_items,
        "shards": len(manifest.shards),
        "bytes": size,
        "fingerprint": manifest.fingerprint,
        "indexed": is_indexed,
    }
    yield Finding("data.manifest", "ok", found, facts=facts)
    if manifest.archives is not None:
        found = f"The shards are at {manifest.archives}, and were not looked at."
        yield Finding("data.shards", "note", found, "Read them all.", f"penstock check {shlex.quote(where)} --all")
    else:
        yield from _examine_content(manifest, where, progress)
    yield from _examine_table(manifest, path, where)
    yield from _examine_orphans(manifest, path, listing)
    if "quarantine.jsonl" in listing.files:
        yield from _examine_quarantine(manifest, where)


def _examine_content(manifest: Manifest, where: str, progress: Progress) -> Iterator[Finding]:
    for finding in _examine_shards(manifest, where, progress):
        yield finding
        if finding.level != "ok":
            return  # a sample of checksums would say the same
    yield _examine_checksums(manifest, where, progress)


def _make_manifest_problem(path: Path, where: str, error: Exception) -> Finding:
    archives = path.name == MANIFEST and "penstock index" in str(error)
    if archives:
        command = f"penstock index {shlex.quote(where)}"
        return Finding("data.manifest", "problem", str(error), "Index the archives.", command)
    advice = "Copy the file again from where the dataset came from, or convert the recordings again."
    return Finding("data.manifest", "problem", str(error), advice)


def _examine_shards(manifest: Manifest, where: str, progress: Progress) -> Iterator[Finding]:
    """Look at all shards and side indexes, or at some if there are very many, or the file system is slow."""
    total = len(manifest.shards)
    numbers = np.unique(np.linspace(0, total - 1, min(total, _MOST_SHARDS)).astype(np.int64)).tolist()
    # If time runs out on a slow file system, what was looked at is spread over the whole dataset.
    numbers = [number for first in range(17) for number in numbers[first::17]]
    until, wrong, unindexed, n_done = time.monotonic() + _MOST_SECONDS, list[str](), list[str](), 0
    for number in numbers:
        shard = manifest.shards[number]
        problem = find_problem(manifest, shard)
        wrong += [problem] if problem else []
        unindexed += [] if (manifest.local_folder / index_name(shard.name)).exists() else [index_name(shard.name)]
        n_done += 1
        progress("Looking at shards", "shards", n_done, len(numbers), "")
        if time.monotonic() > until:
            break
    whole = "all" if n_done == total else f"{n_done:,} of {total:,}"
    verify = f"penstock check {shlex.quote(where)} --all"
    facts = {"checked": n_done, "shards": total, "problems": wrong[:100], "without_index": unindexed[:100]}
    if wrong:
        found = f"{count(len(wrong), 'shard')} of {n_done:,}: {list_some(wrong)}."
        advice = (
            "Copy these shards and their .index files again; `penstock check --all` lists every item that is damaged."
        )
        yield Finding("data.shards", "problem", found, advice, verify, facts=facts)
    if unindexed:
        found = f"Side indexes that are missing: {list_some(unindexed)}."
        if manifest.shard_size is None:
            command = f"penstock index {shlex.quote(where)}"
            yield Finding("data.shards", "problem", found, "Index the archives again.", command, facts=facts)
        else:
            advice = "Copy them again: a dataset is all files of its folder."
            yield Finding("data.shards", "problem", found, advice, verify, facts=facts)
    if not wrong and not unindexed:
        found = f"The shards and their side indexes are there, with the right sizes ({whole} looked at)."
        yield Finding("data.shards", "ok", found, facts=facts)


def _examine_checksums(manifest: Manifest, where: str, progress: Progress) -> Finding:
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress("Comparing checksums", "bytes", done, 0, "")

    sample = verify_sample(manifest, max_bytes=_MOST_BYTES, max_seconds=_MOST_SECONDS, progress=advance)
    command = f"penstock check {shlex.quote(where)} --all"
    facts: dict[str, Any] = {
        "shards": sample.n_shards,
        "items": sample.n_items,
        "bytes": sample.n_bytes,
        "problems": [str(problem) for problem in sample.problems[:100]],
    }
    look = (
        f"{count(sample.n_items, 'item')} of {count(sample.n_shards, 'shard')} ({sample.n_bytes / 1e6:,.1f} MB) were "
        "compared with their checksums"
    )
    if not sample.problems:
        return Finding(
            "data.checksums",
            "ok",
            f"{look}: no difference.",
            "To compare every byte, run `penstock check --all`.",
            command,
            facts=facts,
        )
    advice = "Run `penstock check --all` to find all of them, then copy these shards and their .index files again."
    if manifest.shard_size is None:
        advice = (
            "If the archives were changed on purpose, index them again (`penstock index`); if not, copy them again."
        )
    listed = list_some([str(problem) for problem in sample.problems])
    return Finding("data.checksums", "problem", f"{look}. {listed}.", advice, command, facts=facts)


def _examine_table(manifest: Manifest, path: Path, where: str) -> Iterator[Finding]:
    """Yield the finding on the shard table, a cache of a large manifest."""
    table = table_path(path)
    if not table.exists() and len(manifest.shards) < _TABLE_FROM:
        return
    if read_table(path) is not None:
        yield Finding("data.cache", "ok", f"{table.name} makes opening quick, and is up to date.")
        return
    state = "is of another manifest, or damaged" if table.exists() else "is missing"
    advice = "Nothing: the manifest is read instead, which takes longer. Copy the file with the dataset, or write it "
    advice += "again with the dataset."
    found = f"{table.name}, a cache of the manifest, {state}."
    if manifest.shard_size is None:
        command = f"penstock index {shlex.quote(where)}"
        yield Finding("data.cache", "note", found, "Index the archives again.", command)
    else:
        yield Finding("data.cache", "note", found, advice)


def _examine_orphans(manifest: Manifest, path: Path, listing: Listing) -> Iterator[Finding]:
    """Yield the finding on archives and side indexes that the manifest does not list."""
    if path.name != MANIFEST or any(name.endswith(".metadata.json") for name in listing.files):
        return  # several datasets share the folder
    known = {name for shard in manifest.shards for name in (shard.name, index_name(shard.name))}
    strays = [
        name
        for name in (*listing.files, *listing.links)
        if (ARCHIVE.search(name.removesuffix(".index"))) and name not in known and not name.startswith(".")
    ]
    if not strays:
        yield Finding("data.orphans", "ok", "Every archive in the folder is listed in the manifest.")
        return
    shown = " ".join(shlex.quote(str(listing.folder / name)) for name in strays[:20])
    more = " The command names the first 20." if len(strays) > 20 else ""
    yield Finding(
        "data.orphans",
        "warning",
        f"{count(len(strays), 'file')} in the folder that the manifest does not list: {list_some(strays)}.",
        "They are never read. Move them to another folder, or, if a dataset is to hold them, index them there "
        f"(`penstock index`). To remove them for good, use this command.{more}",
        f"rm -- {shown}",
        facts={"count": len(strays), "files": strays[:100]},
    )


def _examine_quarantine(manifest: Manifest, where: str) -> Iterator[Finding]:
    path = manifest.local_folder / "quarantine.jsonl"
    listed = read_quarantine(path, manifest.fingerprint)
    if not listed["count"]:
        return
    yield Finding(
        "data.quarantine",
        "warning",
        f"Trainings have replaced {count(listed['count'], 'bad item')}, which {path.name} lists.",
        "See whether they are still damaged, copy their shards again, then remove the list.",
        f"penstock check {shlex.quote(where)} --all",
        facts={"count": listed["count"]},
    )


def examine_permissions(listing: Listing, names: "list[str] | tuple[str, ...]") -> Iterator[Finding]:
    """Yield findings on who may read and write a folder, and on files of it that cannot be read."""
    folder = listing.folder
    unreadable = [name for name in itertools.islice(names, _MOST_SHARDS) if not os.access(folder / name, os.R_OK)]
    unreadable = [name for name in unreadable if os.path.lexists(folder / name)]
    if unreadable:
        own = all((folder / name).lstat().st_uid == os.geteuid() for name in unreadable)
        shown = " ".join(shlex.quote(str(folder / name)) for name in unreadable[:20])
        yield Finding(
            "data.permissions",
            "problem",
            f"{count(len(unreadable), 'file')} cannot be read: {list_some(unreadable)}.",
            "Allow yourself to read them." if own else "Ask their owner to let you read them (chmod go+r).",
            f"chmod u+r -- {shown}" if own else f"ls -l -- {shown}",
            facts={"unreadable": unreadable[:100]},
        )
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    facts = {"mode": f"{mode:o}", "uid": status.st_uid, "writable": os.access(folder, os.W_OK)}
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        own = status.st_uid == os.geteuid()
        yield Finding(
            "data.permissions",
            "warning",
            f"Every user of this machine may replace files in {folder} (mode {mode:o}).",
            "Checksums find accidents, not attacks: take the permission away."
            if own
            else "Ask its owner to take the permission away (chmod o-w).",
            f"chmod o-w -- {shlex.quote(str(folder))}" if own else "",
            facts=facts,
        )
    elif not facts["writable"]:
        found = f"{folder} can be read, but not written (mode {mode:o})."
        advice = "Nothing, for training. A list of bad items goes elsewhere with `quarantine=`."
        yield Finding("data.permissions", "note", found, advice, facts=facts)
    elif not unreadable:
        found = f"{folder} can be read and written (mode {mode:o})."
        yield Finding("data.permissions", "ok", found, facts=facts)
