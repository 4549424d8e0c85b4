"""Archives of a folder or of a URL: found by name or pattern, and read from front to back."""

import fnmatch
import io
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause
from penstock.files.kinds import local_path
from penstock.files.read_ahead import open_once
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import Span
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ARCHIVE", "Archive", "expand_archives", "find_archives", "open_object"]

ARCHIVE = re.compile(r"\.(tar|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
"""The file name extensions of archives."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_BRACES, _MAX_ARCHIVES = 16, 250_000  # the largest public dataset of tar archives has 231,350
_SPAN_BYTES, _SPANS_AHEAD = 4 << 20, 4
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive: a file, or an object of a remote folder."""

    name: str
    n_bytes: int
    place: Path | RemoteFolder
    """The file, or the folder of the object."""

    def open(self, *, give_back: bool = False) -> io.BufferedReader:
        """Return its bytes, to be read once from front to back; `give_back`: leave no pages of a file in memory."""
        if isinstance(self.place, Path):
            return open_once(self.place, give_back=give_back)
        return open_object(self.place, self.name, self.n_bytes)


def find_archives(where: str | os.PathLike[str] | Url, store: StoreOptions | None = None) -> list[Archive]:
    """Return the archives of a folder, brace pattern, glob or path, or of a URL of one, in order."""
    place = parse_place(where)
    if isinstance(place, Path):
        return [Archive(path.name, path.stat().st_size, path) for path in expand_archives(place)]
    return _find_objects(place, RemoteOptions(store))


def _find_objects(where: Url, remote: RemoteOptions) -> list[Archive]:
    is_folder = not ARCHIVE.search(where.name) and not any(letter in where.name for letter in "{*?[")
    folder = RemoteFolder(where if is_folder else where.parent, remote)
    if is_folder or any(letter in where.name for letter in "*?["):
        pattern = "*" if is_folder else where.name
        try:
            listed = {info.key: info for info in folder.list_folder()}
        except ReadError as error:
            raise SourceError(
                f"{where} lists no files: {error} Name the archives: {folder.url}/NAME-{{000000..000009}}.tar."
            ) from error
        names = [name for name in sorted(listed) if ARCHIVE.search(name) and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise SourceError(f"No shards found: there are no tar archives at {where}.")
        return [Archive(name, folder.pin(listed[name]).n_bytes, folder) for name in names]
    try:
        return [Archive(name, folder.describe(name).n_bytes, folder) for name in _expand_pattern(where.name)]
    except MissingObjectError as error:
        raise SourceError(f"All archives of {where} must exist: {error}") from error


def expand_archives(where: str | os.PathLike[str]) -> list[Path]:
    """Return the archives of a folder, brace pattern, glob or path, in order.

    Examples
    --------
    >>> list(_expand_braces("train-{000008..000010}.tar", itertools.count()))
    ['train-000008.tar', 'train-000009.tar', 'train-000010.tar']
    """
    path = local_path(where)
    try:
        found = _list_files(path)
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


def _list_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(
            entry for entry in path.iterdir() if ARCHIVE.search(entry.name) and not entry.name.startswith(".")
        )
    if "{" in path.name:
        return [Path(name) for name in _expand_pattern(str(path))]
    if any(letter in path.name for letter in "*?["):
        if "**" in path.name:  # versions of Python disagree about what it matches
            raise ValueError("Invalid pattern: '**' cannot be in the name of an archive")
        return sorted(path.parent.glob(path.name))
    return [path]


def _expand_pattern(pattern: str) -> list[str]:
    names = list(itertools.islice(_expand_braces(pattern, itertools.count()), _MAX_ARCHIVES + 1))
    if len(names) > _MAX_ARCHIVES:
        raise SourceError(
            f"A pattern must name at most {_MAX_ARCHIVES:,} archives, but {Path(pattern).name} names more."
        )
    return names


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


def open_object(folder: RemoteFolder, name: str, n_bytes: int) -> io.BufferedReader:
    """Return an object of a remote folder, to be read once from front to back; what comes next is fetched meanwhile."""
    return io.BufferedReader(_OnceObject(folder, name, n_bytes), _BUFFER_BYTES)


class _OnceObject(io.RawIOBase):
    def __init__(self, folder: RemoteFolder, name: str, n_bytes: int) -> None:
        self._folder, self._at, self._end = folder, 0, n_bytes
        begins = range(0, n_bytes, _SPAN_BYTES)
        self._spans = [Span(name, begin, min(begin + _SPAN_BYTES, n_bytes)) for begin in begins]
        self._number, self._content = -1, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        if self._at >= self._end:
            return 0
        number, first = divmod(self._at, _SPAN_BYTES)
        if number != self._number:
            self._folder.prepare(self._spans[number : number + 1 + _SPANS_AHEAD])
            self._content = self._folder.get(self._spans[number : number + 1])[0].data
            self._folder.release(self._spans[max(0, number - 1) : number])
            self._number = number
        out = memoryview(buffer).cast("B")
        n_bytes = min(len(out), len(self._content) - first)
        out[:n_bytes] = self._content[first : first + n_bytes]
        self._at += n_bytes
        return n_bytes

    def close(self) -> None:
        if not self.closed and self._number >= 0:
            self._folder.release(self._spans[self._number :])
        super().close()
