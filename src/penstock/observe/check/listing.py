"""What lies in a folder, without reading it: names and kinds, bounded in number and in time."""

import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Listing", "list_folder"]

_MOST_ENTRIES = 200_000
_MOST_SECONDS = 5.0
_SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class Listing:
    """The names in a folder, by kind, each kind in order."""

    folder: Path
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    special: dict[str, str] = field(default_factory=dict)
    """FIFOs, sockets and devices: what each is, by name."""

    is_complete: bool = True
    """Whether this is all of the folder; one with very many entries is listed in part."""

    @property
    def names(self) -> set[str]:
        """All names."""
        return {*self.files, *self.folders, *self.links, *self.special}

    @property
    def n_entries(self) -> int:
        """Number of entries that were listed."""
        return len(self.files) + len(self.folders) + len(self.links) + len(self.special)


def list_folder(folder: Path, most: int = _MOST_ENTRIES, seconds: float = _MOST_SECONDS) -> Listing:
    """List a folder; raise OSError if that is not allowed. Nothing in it is opened."""
    kinds: dict[str, list[str]] = {"files": [], "folders": [], "links": []}
    special: dict[str, str] = {}
    began, is_complete = time.monotonic(), True
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == most or (number % 1000 == 999 and time.monotonic() - began > seconds):
                is_complete = False
                break
            if entry.is_symlink():
                kinds["links"].append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                kinds["folders"].append(entry.name)
            elif entry.is_file(follow_symlinks=False):
                kinds["files"].append(entry.name)
            else:
                special[entry.name] = _name_kind(entry)
    names = {kind: tuple(sorted(found)) for kind, found in kinds.items()}
    return Listing(folder, special=special, is_complete=is_complete, **names)


def _name_kind(entry: "os.DirEntry[str]") -> str:
    try:
        return _SPECIAL.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), "a special file")
    except OSError:  # it has just gone
        return "a special file"
