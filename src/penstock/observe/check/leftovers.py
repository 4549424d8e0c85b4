"""What writers that were killed left in a folder, who is writing there now, and the command that cleans up.

A command that removes is given only if nobody holds the lock and nothing that is published depends on what it removes.
"""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import WriteError
from penstock.core.text import count
from penstock.files.locks import lock_holder
from penstock.files.machine import is_running
from penstock.files.regular import read_regular
from penstock.files.staging import WRITING, Staging
from penstock.observe.check.listing import Listing
from penstock.observe.finding import Finding, Level
from penstock.shard.outputs.local import stage

__all__ = ["examine_leftovers", "has_unfinished"]

_STAGING = re.compile(r"\.(?:.+\.)?writing$")
_REMOVED = re.compile(r"\.(?:.+\.)?written$")
_SERIES = "timeseries.zarr"  # the commit of a simulation
_ASIDE = re.compile(r"\..*\.[0-9a-f]{16}\.aside$|\..*\.part$")
_MOST_NAMED = 20  # files in one command
_MOST_WALKED = 100_000


class _Size(NamedTuple):
    n_files: int
    n_bytes: int

    def __str__(self) -> str:
        return f"{count(self.n_files, 'file')}, {self.n_bytes / 1e6:,.1f} MB"


def examine_leftovers(listing: Listing) -> Iterator[Finding]:
    """Yield findings on unfinished writes, temporary files and locks in a folder."""
    folder = listing.folder
    holder = lock_holder(folder)
    if holder is not None:
        yield _make_lock_finding(folder, holder)
    for name in (*listing.folders, *listing.links):
        if _STAGING.fullmatch(name):
            yield from _examine_staging(folder / name, holder)
        elif _REMOVED.fullmatch(name) and holder is None:
            yield _make_rest_finding(folder / name)
    yield from _examine_asides(listing, holder)


def has_unfinished(listing: Listing) -> bool:
    """Return whether a folder has an unfinished write."""
    return any(_STAGING.fullmatch(name) for name in (*listing.folders, *listing.links))


def _make_lock_finding(folder: Path, holder: int) -> Finding:
    facts = {"process": holder or None}
    keepers = _list_open_files().get(str(folder), []) if holder and not is_running(holder) else []
    if keepers:
        named = ", ".join(f"{pid} ({_command_line(pid)})" for pid in keepers)
        found = f"Process {holder} has locked {folder} for writing and ended; what it started keeps the lock: {named}."
        advice = "Wait for it, or end it if nothing else needs it; until then, writers are refused."
        command = f"kill {' '.join(map(str, keepers))}"
        return Finding("data.lock", "warning", found, advice, command, facts=facts)
    who = f"Process {holder}" if holder else "A process that cannot be seen from here (another machine or container)"
    found = f"{who} is writing in {folder} now."
    return Finding("data.lock", "note", found, "Wait for it to finish.", facts=facts)


def _examine_staging(path: Path, holder: int | None) -> Iterator[Finding]:
    """Yield the finding on one unfinished write, unless its writer is at work."""
    holder = lock_holder(path) if holder is None else holder
    if holder is not None:
        if lock_holder(path.parent) is None:  # otherwise it was named before
            yield _make_lock_finding(path, holder)
        return
    try:
        staging = _find_staging(path)
    except WriteError as error:
        advice = "Remove the link; what it leads to stays. Writers refuse to follow it."
        place = shlex.quote(str(path))
        command = f"rm -- {place}" if path.is_symlink() else f"find {place} -type l -delete"
        yield Finding("data.unfinished", "problem", str(error), advice, command)
        return
    size, progress = _measure(path), staging.progress
    facts = {"progress": progress, "files": size.n_files, "bytes": size.n_bytes, "target": str(staging.target)}
    remove = f"rm -r -- {shlex.quote(str(path))}"
    is_simulation = staging.commit.name == _SERIES
    how = "overwrite=True" if is_simulation else "resume=True (`penstock convert` with --resume)"
    again = f"run the same writer again with {how}"
    if progress == "published":
        found = f"A writer of {staging.target} was stopped after it had published; {path} is not needed ({size})."
        yield Finding("data.unfinished", "warning", found, "Remove it.", remove, facts=facts)
    elif progress == "publishing":
        found = f"A writer was stopped while it moved finished files to their place: {path} ({size})."
        advice = f"All is written, and only renames are left: {again}. Do not remove the folder: it may hold what was "
        advice += f"at {staging.target} before."
        yield Finding("data.unfinished", "problem", found, advice, facts=facts)
    else:
        is_alone = not os.path.lexists(staging.target)
        level: Level = "problem" if is_alone else "warning"
        rest = "nothing has been published" if is_alone else "the previous version is still there"
        found = f"A writer of {staging.target} has not finished, and nobody is writing now; {rest}: {path} ({size})."
        advice = f"To {'start over' if is_simulation else 'continue'}, {again}. To discard what it has written, "
        advice += "remove the folder."
        yield Finding("data.unfinished", level, found, advice, remove, facts=facts)


def _find_staging(path: Path) -> Staging:
    """Return the staging folder at a path: of a dataset, of a simulation, or of an image, whose name is in its own."""
    if path.name != WRITING:
        return Staging(path, path.with_name(path.name.removeprefix(".").removesuffix(".writing")), "image")
    series = path.with_name(_SERIES)
    is_simulation = os.path.lexists(series) or (path / _SERIES).exists()
    return Staging(path, series, _SERIES) if is_simulation else stage(path.parent)


def _make_rest_finding(path: Path) -> Finding:
    size = _measure(path)
    found = f"A writer was stopped while it cleaned up: {path} is not needed ({size})."
    command = f"rm -r -- {shlex.quote(str(path))}"
    facts = {"files": size.n_files, "bytes": size.n_bytes}
    return Finding("data.leftover", "warning", found, "Remove it.", command, facts=facts)


def _examine_asides(listing: Listing, holder: int | None) -> Iterator[Finding]:
    """Yield the finding on temporary files that no process of this machine has open."""
    names = [name for name in listing.files if _ASIDE.fullmatch(name)]
    if not names or holder is not None:
        return
    opened = _list_open_files()
    left = [name for name in names if str(listing.folder / name) not in opened]
    if not left:
        return
    n_bytes = sum(_file_bytes(listing.folder / name) for name in left)
    command = "rm -f -- " + " ".join(shlex.quote(str(listing.folder / name)) for name in left[:_MOST_NAMED])
    more = f" The command names the first {_MOST_NAMED}." if len(left) > _MOST_NAMED else ""
    yield Finding(
        "data.temporary",
        "warning",
        f"{count(len(left), 'temporary file')} of programs that were stopped: {left[0]}"
        f"{', …' if left[1:] else ''} ({n_bytes / 1e6:,.1f} MB).",
        f"Remove them, unless a program on another machine is writing here now.{more}",
        command,
        facts={"files": left[:_MOST_NAMED], "count": len(left), "bytes": n_bytes},
    )


def _list_open_files() -> dict[str, list[int]]:
    """Return the processes of this user, or of all if it is root, by the files and folders that they have open."""
    found: dict[str, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # it has just been closed
                    found.setdefault(str(link.readlink()), []).append(int(process.name))
    return {path: sorted(set(processes)) for path, processes in found.items()}


def _command_line(pid: int) -> str:
    try:
        words = read_regular(f"/proc/{pid}/cmdline").split(b"\0")
    except OSError:  # it has just ended
        return "ended"
    return os.fsdecode(b" ".join(words)).strip()[:80]


def _measure(path: Path) -> _Size:
    """Return the number and size of the files below a folder, of the first 100,000 of them."""
    n_files = n_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            n_bytes += _file_bytes(Path(folder) / name)
        n_files += len(names)
        if n_files > _MOST_WALKED:
            break
    return _Size(n_files, n_bytes)


def _file_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
