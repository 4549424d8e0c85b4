"""The one protocol of publication: files are written into a staging folder, and appear at their place all at once.

FOLDER/options.json   a write has begun, with these options
FOLDER/NAME           a file or folder that is finished
FOLDER/COMMIT         a finished file or folder whose rename to its place, the last one, publishes all files
FOLDER/replaced       the previous commit, with the suffix of COMMIT
FOLDER/finished.json  the options, from just before the commit on
REMOVED               the same folder, while it is being removed
"""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from penstock.core.errors import WriteError
from penstock.core.text import cause
from penstock.files.durable import ASIDE_SUFFIXES, remove_asides, sync, write_aside
from penstock.files.regular import read_regular

__all__ = [
    "STARTS_OVER",
    "UNFINISHED",
    "WRITING",
    "Staging",
    "describe_unfinished",
    "is_half_published",
    "refuse_links",
    "remove_staging",
]

WRITING = ".writing"
"""Name of the staging folder of what is published inside a folder: a dataset, a simulation."""

UNFINISHED = (
    "a writer has not finished there. Run it again with resume=True to continue, or with resume=False to start over."
)
"""What to do about an unfinished write."""

STARTS_OVER = "a writer has not finished there. Run it again: it starts over."
"""The options of a writer that cannot resume, and what to do about it."""

_OPTIONS, _FINISHED = "options.json", "finished.json"
_SYNCS = 8  # concurrent syncs: a journal commits them together, and waiting for a disk takes no CPU


class Staging:
    """A staging folder. Its writer holds a `FolderLock` meanwhile.

    1. Killed before `publish`: what is at the place stays as it is. A writer with the same options continues.
    2. Killed in `publish`: the previous commit, none or the new one is in place. `publish` again completes it.
    3. Killed after the commit: `clean_up` removes the folder.
    4. Killed in `clear`: what is left has its options, and is never published.
    5. The file system fails: WriteError that names the place; the next writer goes on as after a kill.
    6. The folder, or anything in it, is a symbolic link: WriteError; nothing behind it is read or changed.

    Parameters
    ----------
    folder
        The staging folder, whose name ends in `writing`; on the file system of its target.
    target
        The place of the commit. Other files are moved to the same folder.
    commit
        Name of the commit in the staging folder.
    """

    def __init__(self, folder: Path, target: Path, commit: str) -> None:
        self.folder, self.target, self.commit = folder, target, folder / commit
        self.replaced = folder / f"replaced{self.commit.suffix}"
        self._removed = folder.with_name(f"{folder.name.removesuffix('writing')}written")
        self._refuse_links()

    @property
    def options(self) -> str | None:
        """The options of an unfinished write; None if there is none."""
        for name in (_OPTIONS, _FINISHED):
            try:
                return read_regular(self.folder / name).decode()
            except FileNotFoundError:
                continue
            except (OSError, UnicodeError) as error:
                raise WriteError(
                    f"Could not read {self.folder / name}: {cause(error)}. Remove {self.folder}."
                ) from error
        return None

    @property
    def progress(self) -> Literal["none", "begun", "publishing", "published"]:
        """How far a write came. While it is publishing, the folder may hold the only copy of the previous commit."""
        if not self.folder.exists():
            return "none"
        has_finished = (self.folder / _FINISHED).exists()
        if has_finished and not self.commit.exists():
            return "published"
        is_prepared = self.commit.is_file() or self.replaced.exists()
        return "publishing" if has_finished or is_prepared else "begun"

    def begin(self, options: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Begin or resume a write: remove temporary files of killed writers, then store notes and options."""
        with self._name_place_in_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_links()  # again: now the lock is held
            remove_asides(self.folder)
            for name, content in {**(notes or {}), _OPTIONS: options.encode()}.items():
                write_aside(self.folder / name, content)

    def prepare(self, paths: Iterable[Path], commit: bytes | None = None) -> None:
        """Make files durable, then write the commit, if it is given: from here on, only renames are left."""
        with self._name_place_in_errors():
            with ThreadPoolExecutor(_SYNCS) as pool:
                list(pool.map(sync, paths))
            if commit is not None:
                write_aside(self.commit, commit)

    def publish(self, names: Iterable[str] = (), stale: Iterable[str] = ()) -> None:
        """Move files and folders to their place, remove stale files there, then move the commit.

        Idempotent: after a kill in between, it completes the publication.
        """
        place, names = self.target.parent, list(names)
        is_begun = not os.path.lexists(self.target)  # only then can files of this write be at their place
        for name in names:
            if not (os.path.lexists(self.folder / name) or (is_begun and os.path.lexists(place / name))):
                raise WriteError(
                    f"{self.folder / name} was removed by somebody before it was published. Start over with "
                    "resume=False."
                )
        with self._name_place_in_errors(" Continue with resume=True."):
            if not is_begun:
                _remove(self.replaced)
                self.target.replace(self.replaced)  # from here on, nothing is published until the commit is in place
                sync(place)
            for name in names:
                with suppress(FileNotFoundError):  # it was moved before the kill
                    _move(self.folder / name, place / name)
            for name in stale:
                (place / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                (self.folder / _OPTIONS).replace(self.folder / _FINISHED)
            sync(place)
            self.commit.replace(self.target)
            sync(place)
            self.remove()

    def clean_up(self) -> None:
        """Remove what a published write left behind if it was killed after the commit."""
        with self._name_place_in_errors():
            if (self.folder / _FINISHED).exists() and not self.commit.exists():
                self.remove()
            shutil.rmtree(self._removed, ignore_errors=True)

    def clear(self, keep: Collection[str] = ()) -> None:
        """Discard an unfinished write, except files named in `keep`."""
        with self._name_place_in_errors():
            shutil.rmtree(self._removed, ignore_errors=True)
            with suppress(FileNotFoundError):
                (self.folder / _FINISHED).replace(self.folder / _OPTIONS)
            # The commit first, or half a write could be published; the options last, or others could resume it.
            found = [path for path in self.folder.iterdir() if path.name not in keep] if self.folder.exists() else []
            for path in sorted(found, key=lambda path: (path.name == _OPTIONS, path != self.commit)):
                _remove(path)

    def remove(self) -> None:
        """Remove the folder at once."""
        remove_staging(self.folder, self._removed)

    def _refuse_links(self) -> None:
        refuse_links(self.folder, self._removed)
        for path in _find_links(self.folder):
            # Temporary files are removed unread, and what is replaced may have been a link of the user.
            if path != self.replaced and path.suffix not in ASIDE_SUFFIXES:
                raise WriteError(f"{path} must be a file or folder of Penstock, got a symbolic link. Remove the link.")

    @contextmanager
    def _name_place_in_errors(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except WriteError:
            raise
        except OSError as error:
            raise WriteError(f"Could not write {self.target}: {error}.{advice}") from error


def refuse_links(*paths: Path) -> None:
    """Raise WriteError if a staging folder is a symbolic link: it would lead the writer elsewhere."""
    for path in paths:
        try:
            is_link = path.is_symlink()
        except OSError as error:
            raise WriteError(f"Could not open the folder {path.parent}: {cause(error)}.") from error
        if is_link:
            raise WriteError(f"{path} must be a folder of Penstock, got a symbolic link. Remove the link.")


def describe_unfinished(folder: Path) -> str:
    """Return what to do about an unfinished write in `folder`; empty if there is none."""
    staging = folder / WRITING
    if not staging.is_dir():
        return ""
    with suppress(OSError):
        if read_regular(staging / _OPTIONS) == STARTS_OVER.encode():
            return STARTS_OVER
    return UNFINISHED


def is_half_published(folder: Path) -> bool:
    """Return whether a folder that is staged in `folder` is not at its place."""
    try:
        staged = list((folder / WRITING).iterdir())
    except OSError:
        return False
    return any(path.is_dir() and path.stem != "replaced" and not (folder / path.name).exists() for path in staged)


def _find_links(folder: Path) -> Iterator[Path]:
    """Yield the symbolic links in a folder, at any depth."""
    left = [folder]
    while left:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir():
                    left.append(Path(entry.path))


def remove_staging(staging: Path, aside: Path) -> None:
    """Remove a staging folder. It is renamed to `aside` first, so that half of it is never taken for all of it."""
    shutil.rmtree(aside, ignore_errors=True)
    staging.replace(aside)
    shutil.rmtree(aside)


def _move(path: Path, target: Path) -> None:
    if path.is_dir():
        _remove(target)  # a folder cannot be renamed over one that is not empty
    path.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
