"""What lies at a path, and what is wrong with it: a dataset, several of them, a zarr store, run files, or others."""

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.text import cause, count
from penstock.files.kinds import local_path
from penstock.files.staging import WRITING
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, is_url, parse_place
from penstock.observe.check.dataset import examine_dataset, examine_permissions, list_some
from penstock.observe.check.leftovers import examine_leftovers, has_unfinished
from penstock.observe.check.listing import Listing, list_folder
from penstock.observe.check.store import examine_store, is_store
from penstock.observe.check.url import examine_url
from penstock.observe.finding import Finding, Progress
from penstock.observe.run_file import is_run_file, read_run
from penstock.shard.manifest import MANIFEST, manifest_path
from penstock.shard.places.archives import ARCHIVE
from penstock.source.find_source import open_source

__all__ = ["examine_data"]

_MOST_DATASETS = 20
_MOST_RUNS = 20
_MOST_LOOKED_AT = 200  # JSON files of which the first bytes are read


def examine_data(where: str, progress: Progress, store: StoreOptions | None = None) -> Iterator[Finding]:
    """Yield findings on a folder, a pattern of archives, a file, or what is at a URL."""
    if is_url(where):
        url = parse_place(where)
        assert isinstance(url, Url), "as was checked"
        yield from examine_url(url, store, progress)
        return
    try:
        yield from _examine_path(where, progress)
    except (PenstockError, OSError) as error:
        found = f"{where} cannot be examined further: {cause(error)}."
        yield Finding("data.kind", "problem", found, "See whether the folder can be used.")


def _examine_path(where: str, progress: Progress) -> Iterator[Finding]:
    path = local_path(where)
    manifest = manifest_path(where)
    if not path.is_dir() and os.path.lexists(manifest):
        yield from _examine_folder(manifest.parent, str(path), manifest, progress)
    elif path.is_dir():
        yield from _examine_folder(path, str(path), manifest, progress)
    elif not os.path.lexists(path):
        found, command = f"No index of the archives {where}.", f"penstock index {shlex.quote(where)}"
        yield Finding("data.kind", "problem", found, "Index them.", command)
    else:
        yield _examine_file(path)


def _examine_folder(folder: Path, where: str, manifest: Path, progress: Progress) -> Iterator[Finding]:
    progress(f"Listing {folder.name}", "entries", 0, 0, "")
    try:
        listing = list_folder(folder)
    except OSError as error:
        yield _make_unreadable_finding(folder, error)
        return
    if not listing.is_complete:
        yield Finding(
            "data.entries",
            "note",
            f"{folder} has very many entries: {listing.n_entries:,} were looked at, and the rest were not.",
            "Nothing, for training. What is said about files that do not belong there is about those looked at.",
            facts={"listed": listing.n_entries},
        )
    yield from _examine_special(listing)
    if os.path.lexists(manifest):
        if not stat.S_ISREG(_mode(manifest)):
            yield _make_kind_finding(manifest)
        else:
            yield from examine_dataset(manifest, where, listing, progress)
    elif is_store(listing):
        yield from examine_store(listing, progress)
    else:
        yield from _examine_plain(listing, progress)
    yield from examine_leftovers(listing)
    yield from examine_permissions(listing, listing.files)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:  # a link that leads nowhere
        return 0


def _make_kind_finding(path: Path) -> Finding:
    found = f"{path} must be a regular file, and is a folder, a special file or a link that leads nowhere."
    command = f"ls -ld -- {shlex.quote(str(path))}"
    return Finding("data.manifest", "problem", found, "See what it is, then remove it.", command)


def _make_unreadable_finding(folder: Path, error: OSError) -> Finding:
    try:
        own = folder.stat().st_uid == os.geteuid()
    except OSError:
        own = False
    return Finding(
        "data.permissions",
        "problem",
        f"{folder} cannot be listed: {error.strerror}.",
        "Allow yourself to read it." if own else "Ask its owner to let you read it (chmod go+rx).",
        f"chmod u+rx -- {shlex.quote(str(folder))}" if own else f"ls -ld -- {shlex.quote(str(folder))}",
    )


def _examine_special(listing: Listing) -> Iterator[Finding]:
    if listing.special:
        named = [f"{name} ({kind})" for name, kind in sorted(listing.special.items())]
        yield Finding(
            "data.special_files",
            "warning",
            f"{count(len(named), 'special file')} in {listing.folder}: {list_some(named)}.",
            "Penstock refuses to open them. See who has put them there, then remove them.",
            "ls -l -- " + " ".join(shlex.quote(str(listing.folder / name)) for name in sorted(listing.special)[:20]),
            facts={"special": dict(sorted(listing.special.items())[:100])},
        )


def _examine_plain(listing: Listing, progress: Progress) -> Iterator[Finding]:
    """Yield findings on a folder without a manifest: datasets in it, archives, runs, or whatever else there is."""
    folder, quoted = listing.folder, shlex.quote(str(listing.folder))
    patterns = [name.removesuffix(".metadata.json") for name in listing.files if name.endswith(".metadata.json")]
    below = [name for name in listing.folders if os.path.lexists(folder / name / MANIFEST)]
    unfinished = [name for name in listing.folders if name not in below and (folder / name / WRITING).is_dir()]
    archives = [name for name in listing.files if ARCHIVE.search(name) and not name.startswith(".")]
    if patterns or below or unfinished:
        names = [*patterns, *below, *unfinished]
        found = f"{count(len(names), 'dataset')} in {folder}: {list_some(names)}."
        facts = {"datasets": names[:100]}
        if len(names) > _MOST_DATASETS:
            found += f" The first {_MOST_DATASETS} are examined."
        yield Finding("data.kind", "ok", found, facts=facts)
        for name in names[:_MOST_DATASETS]:
            if name in patterns:
                path = folder / f"{name}.metadata.json"
                yield from examine_dataset(path, str(folder / name), listing, progress)
            else:
                yield from _examine_folder(folder / name, str(folder / name), folder / name / MANIFEST, progress)
    elif archives and WRITING not in listing.folders:
        found = f"{count(len(archives), 'archive')} in {folder}, without an index: {list_some(archives)}."
        command = f"penstock index {quoted}"
        advice = "Index them, to read them at random."
        if f"{archives[0]}.index" in listing.files:
            advice = f"If they are a dataset, copy its {MANIFEST} again, too. If it is lost, index them."
        yield Finding("data.kind", "problem", found, advice, command)
    else:
        yield from _examine_runs(listing)


def _examine_runs(listing: Listing) -> Iterator[Finding]:
    """Yield findings on the run files in a folder; on nothing, if there are none."""
    folder = listing.folder
    names = [name for name in listing.files if name.endswith(".json")][:_MOST_LOOKED_AT]
    runs = [name for name in names if is_run_file(folder / name)][:_MOST_RUNS]
    if not runs:
        source = None if has_unfinished(listing) else _examine_source(folder)
        if source is not None:
            yield source
        elif not has_unfinished(listing):
            found = (
                f"{folder} is no dataset, no zarr store and no folder of a run: {count(listing.n_entries, 'entry')}."
            )
            yield Finding("data.kind", "note", found, facts={"entries": listing.n_entries})
        return
    yield Finding("data.kind", "ok", f"{count(len(runs), 'run file')} in {folder}: {list_some(runs)}.")
    for name in runs:
        try:
            read_run(folder / name)
        except (PenstockError, OSError) as error:
            command = f"mv -- {shlex.quote(str(folder / name))} {shlex.quote(str(folder / f'{name}.damaged'))}"
            advice = "Save the run again if its training still lives; otherwise move the file away."
            yield Finding("data.run", "problem", str(error), advice, command)
        else:
            found = f"{name} is whole."
            advice, command = (
                "See it as a page.",
                f"penstock inspect {shlex.quote(str(folder / name))} --page report.html",
            )
            yield Finding("data.run", "ok", found, advice, command)


def _examine_file(path: Path) -> Finding:
    mode = _mode(path)
    if not stat.S_ISREG(mode):
        found = f"{path} is neither a folder nor a regular file, and Penstock does not open it."
        advice, command = "Give the folder of a dataset.", f"ls -ld -- {shlex.quote(str(path))}"
        return Finding("data.kind", "problem", found, advice, command)
    if not os.access(path, os.R_OK):
        found = f"{path} cannot be read."
        command = f"chmod u+r -- {shlex.quote(str(path))}"
        return Finding("data.permissions", "problem", found, "Allow yourself to read it.", command)
    if is_run_file(path):
        try:
            read_run(path)
        except (PenstockError, OSError) as error:
            return Finding("data.run", "problem", str(error), "Save the run again.")
        command = f"penstock inspect {shlex.quote(str(path))} --page report.html"
        return Finding("data.run", "ok", f"{path} is a run file, and whole.", "See it as a page.", command)
    return _examine_source(path) or Finding(
        "data.kind",
        "note",
        f"{path} is a file of {path.stat().st_size:,} bytes, from which no items are read.",
        "To see what is in a recording, inspect it.",
        f"penstock inspect {shlex.quote(str(path))}",
    )


def _examine_source(path: Path) -> Finding | None:
    """Return the finding on anything else that `penstock.open` reads: whether its first and last items can be read."""
    try:
        source = open_source(str(path))
    except PenstockError:
        return None
    facts = {"items": len(source.index), "fields": list(source.fields)}
    try:
        source.take(np.unique([0, len(source.index) - 1]) if len(source.index) else np.arange(0))
    except PenstockError as error:
        text, advice = f"Items of {path} cannot be read: {cause(error)}.", "Copy it again from where it came from."
        return Finding("data.source", "problem", text, advice, facts=facts)
    text = f"{count(len(source.index), 'item')} of {path} are read where they are: {', '.join(source.fields)}."
    return Finding("data.source", "ok", text, facts=facts)
