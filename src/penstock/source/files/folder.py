"""Items from a folder of files, with a class for each folder below it."""

import copy
import glob
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.index import Index
from penstock.core.text import cause, count
from penstock.core.types import Block, Field, Span
from penstock.files.kinds import local_path
from penstock.source.checks import check_items, check_span
from penstock.source.files.reader import EXTENSIONS, Decode, FileReader
from penstock.source.select.selectable import Selectable, check_fields

__all__ = ["FolderSource"]

_Int64s = NDArray[np.int64]

_LABEL, _PATH = "label", "path"
_MOST_NAMED = 3  # files in a message


class FolderSource(Selectable):
    """Items are the files of a folder; the folder that a file lies in is its class, as in torchvision's ImageFolder.

    Fields are what a file holds (see `FilesSource`), `label` (int64, the number of its class) and `path`. Classes are
    sorted, and files within a class.

    The list of files is made once. A file that was removed or changed since is a ReadError when it is read. Files that
    were added or removed are a ReadError, which names them, at the first read of each process and by `check()`.

    Parameters
    ----------
    where
        A pattern, such as `"root/*/*.png"`: the class of a file is the name of its folder. Or a folder: the classes are
        the folders in it, with all files below them that `decode` is for.
    decode, name, shape, chunk_items
        As in `FilesSource`.

    Examples
    --------
    >>> source = FolderSource("photos/*/*.jpg")  # doctest: +SKIP
    >>> source.classes, source.take(np.array([0]))["label"].tolist()  # doctest: +SKIP
    (['cat', 'dog'], [0])
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        decode: Decode = "image",
        name: str | None = None,
        shape: tuple[int, ...] | None = None,
        chunk_items: int | None = None,
    ) -> None:
        self._reader = FileReader.make(decode, name, shape)
        self.path = str(local_path(where))
        """What was given, absolute."""
        self._folders = _list_folders(self.path)
        found = self._list_files()
        if not found:
            kinds = EXTENSIONS.get(decode) if isinstance(decode, str) else None
            hint = f" It must have a folder for each class, with files of {', '.join(kinds)}." if kinds else ""
            raise SourceError(f"No file matches {self.path}.{hint if Path(self.path).is_dir() else ''}")
        names = {path: _find_class(path, self.path) for path in found}
        self.classes = sorted(set(names.values()))
        """Names of the classes."""
        self.class_to_idx = {each: number for number, each in enumerate(self.classes)}
        """Class to its number."""
        self._paths = sorted(found, key=lambda path: (names[path], path))
        self.labels = np.array([self.class_to_idx[names[path]] for path in self._paths], np.int64)
        """Number of the class of each item."""
        self._stamps = np.array([found[path] for path in self._paths], np.int64)
        self._checked_by: int | None = os.getpid()
        first = self._reader.read(self._paths[0], 0, "item 0")
        of_files = self._reader.find_fields(first)
        clash = [field for field in of_files if field in (_LABEL, _PATH)]
        if clash:
            raise OptionError(f"name must be another one than {_LABEL!r} and {_PATH!r}, got {clash[0]!r}.")
        self._decoded = tuple(of_files)
        mean_bytes = sum(map(len, self._paths)) // len(self._paths)
        self.fields: Mapping[str, Field] = {
            **of_files,
            _LABEL: Field(np.dtype(np.int64), ()),
            _PATH: Field(np.dtype(object), None, typical_bytes=mean_bytes),
        }
        n_items = len(self._paths)
        chunk = self._reader.chunk_items(self.fields, n_items) if chunk_items is None else chunk_items
        check_integer("chunk_items", chunk, at_least=1)
        self.index = Index.uniform(n_items, chunk, self._identity())

    def __repr__(self) -> str:
        classes = count(len(self.classes), "class")
        return f"FolderSource({self.path!r}, {len(self.index)} items of {classes})"

    def with_fields(self, fields: Sequence[str]) -> "FolderSource":
        """Return a source of the same items with these fields; without those of the files, none is read."""
        check_fields(self, fields)
        other = copy.copy(self)
        other.fields = {name: self.fields[name] for name in fields}
        return other

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        items = check_items(items, self)
        if self._checked_by != os.getpid():
            self.check()
            self._checked_by = os.getpid()
        given = out or {}
        block = {
            name: given[name] if name in given else np.empty((len(items), *(field.shape or ())), field.dtype)
            for name, field in self.fields.items()
        }
        if _LABEL in block:
            block[_LABEL][...] = self.labels[items]
        numbers = items.tolist()
        if _PATH in block:
            block[_PATH][...] = [self._paths[number] for number in numbers]
        names = [name for name in self._decoded if name in block]
        if names:
            found = ((self._read(number), f"{self._paths[number]}, item {number}") for number in numbers)
            self._reader.fill(block, (({name: values[name] for name in names}, where) for values, where in found))
        return block

    def _read(self, number: int) -> dict[str, Any]:
        return self._reader.read(self._paths[number], number, f"item {number}", self._check_file)

    def _check_file(self, number: int, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != tuple(self._stamps[number].tolist()):
            raise ReadError(f"{self._paths[number]} (item {number}) has changed since the source was made.")

    def check(self) -> None:
        """Raise ReadError, which names them, if files were added or removed since the source was made.

        Folders whose date has not changed are not listed again.
        """
        if _list_folders(self.path) == self._folders:
            return
        now, then = self._list_files().keys(), set(self._paths)
        added, removed = sorted(now - then), sorted(then - now)
        changes = [
            f"{count(len(paths), 'file')} {word} ({', '.join(paths[:_MOST_NAMED])}{', …' if len(paths) > 3 else ''})"
            for word, paths in (("added", added), ("removed", removed))
            if paths
        ]
        if changes:
            raise ReadError(f"{self.path} has changed since the source was made: {', '.join(changes)}. Make it again.")

    def _list_files(self) -> dict[str, tuple[int, int]]:
        """Return the files that match, with their sizes and dates."""
        pattern, decode = self.path, self._reader.decode
        extensions: tuple[str, ...] | None = None
        if Path(pattern).is_dir():
            extensions = EXTENSIONS.get(decode) if isinstance(decode, str) else None
            pattern = str(Path(glob.escape(pattern), "*", "**", "*"))
        found: dict[str, tuple[int, int]] = {}
        for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207  # an absolute pattern
            if extensions is not None and path.rpartition(".")[2].lower() not in extensions:
                continue
            try:
                status = os.stat(path)  # noqa: PTH116
            except OSError as error:  # a link to nothing
                raise ReadError(f"Could not read {path}: {cause(error)}.") from error
            if stat.S_ISREG(status.st_mode):
                found[path] = (status.st_size, status.st_mtime_ns)
        return found

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._stamps[:, 0].sum())

    def close(self) -> None:
        """Do nothing but check the folder again at the next read: no file stays open."""
        self._checked_by = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked_by": None}

    def _identity(self) -> str:
        """Return a hash of the names and sizes of all files, and of how they are read."""
        digest = hashlib.blake2b(self._reader.describe().encode(), digest_size=8)
        for path, label, n_bytes in zip(self._paths, self.labels.tolist(), self._stamps[:, 0].tolist(), strict=True):
            digest.update(repr((Path(path).name, self.classes[label], n_bytes)).encode())
        return digest.hexdigest()


def _find_class(path: str, where: str) -> str:
    """Return the name of the class of a file: of the folder that it lies in, or of the one below a given folder."""
    parts = Path(path).parts
    return parts[len(Path(where).parts)] if Path(where).is_dir() else parts[-2]


def _list_folders(where: str) -> dict[str, int]:
    """Return the folders in which a file could match, with their dates."""
    parts = Path(where).parts
    if Path(where).is_dir():
        patterns = [glob.escape(where), str(Path(glob.escape(where), "**"))]
    else:
        first = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        patterns = [str(Path(*parts[:n])) for n in range(first, len(parts))]
    found: dict[str, int] = {}
    for pattern in patterns:
        for folder in glob.iglob(os.path.join(pattern, ""), recursive=True):  # noqa: PTH118, PTH207
            found[folder] = os.stat(folder).st_mtime_ns  # noqa: PTH116
    return found
