"""Byte spans of remote objects: the counterpart of `file_ranges` for what lies at a URL."""

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import Span
from penstock.source.file_ranges import FileRanges

__all__ = ["Ranges", "RemoteSpans", "RemoteUse", "join_ranges"]


class RemoteSpans(NamedTuple):
    """Spans of objects, in the order in which they are needed."""

    parts: Sequence[tuple[RemoteFolder, Sequence[Span]]]

    @classmethod
    def of_folder(cls, folder: RemoteFolder, spans: Sequence[Span]) -> "RemoteSpans":
        """Return spans of objects of one folder."""
        return cls([(folder, spans)])

    @classmethod
    def join(cls, parts: Sequence["RemoteSpans"]) -> "RemoteSpans":
        """Return all spans of several; each folder is asked once."""
        by_folder: dict[int, tuple[RemoteFolder, list[Span]]] = {}
        for part in parts:
            for folder, spans in part.parts:
                by_folder.setdefault(id(folder), (folder, []))[1].extend(spans)
        return cls(list(by_folder.values()))

    def read_ahead(self) -> int:
        """Start to fetch the spans, without waiting for them; return the bytes that are not there."""
        return sum(folder.prepare(spans) for folder, spans in self.parts)

    def give_back(self) -> None:
        """Say that the spans were read, and are not needed soon."""
        for folder, spans in self.parts:
            folder.release(spans)


Ranges = FileRanges | RemoteSpans
"""Where bytes lie; `read_ahead` starts reading them, `give_back` says that they are done with."""


def join_ranges(parts: Sequence[Ranges]) -> list[Ranges]:
    """Return the same ranges in as few parts as possible."""
    files = [part for part in parts if isinstance(part, FileRanges)]
    spans = [part for part in parts if isinstance(part, RemoteSpans)]
    return [*([FileRanges.join(files)] if files else []), *([RemoteSpans.join(spans)] if spans else [])]


class _MayBeRemote(Protocol):
    @property
    def remote(self) -> RemoteFolder | None: ...


class RemoteUse:
    """The remote folders that the arrays of a source are read from; they are closed while nobody reads. Picklable.

    Used as `with use:` around a read.
    """

    def __init__(self, arrays: Iterable[_MayBeRemote]) -> None:
        found = (array.remote for array in arrays)
        self.folders = tuple({id(folder): folder for folder in found if folder is not None}.values())
        self._begin()

    def _begin(self) -> None:
        # By process: after a fork, a thread of the parent that reads does not exist.
        self._process, self._lock, self._n_reads, self._is_over = os.getpid(), threading.Lock(), 0, False

    def __getstate__(self) -> dict[str, Any]:
        return {"folders": self.folders}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __bool__(self) -> bool:
        return bool(self.folders)

    def __enter__(self) -> None:
        if not self.folders:
            return
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            self._n_reads += 1

    def __exit__(self, *_: object) -> None:
        if not self.folders:
            return
        with self._lock:
            self._n_reads -= 1
            is_last = self._is_over and not self._n_reads
        if is_last:
            self.close()

    def close(self) -> None:
        """Close the folders, once no read is in progress; the next read opens them again."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            self._is_over = self._n_reads > 0
            if not self._is_over:
                for folder in self.folders:
                    folder.close()
