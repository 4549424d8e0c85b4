"""Atomic writes that survive a power cut."""

import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from penstock.core.errors import WriteError

__all__ = [
    "ASIDE_SUFFIXES",
    "create_aside",
    "create_mark",
    "remove_asides",
    "sync",
    "write_all",
    "write_aside",
]

ASIDE_SUFFIXES = (".aside", ".part")  # `.part` was the suffix of shards that earlier versions wrote
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{16}\.aside", re.S)
_NAME_BYTES = 200  # with the rest, a file name stays below the 255 bytes that file systems allow


def create_aside(path: Path, folder: Path | None = None) -> tuple[int, Path]:
    """Create a temporary file for what is to become `path`; return its handle and its path.

    Its name cannot be guessed, and nothing that exists is opened: a link that somebody planted is never followed.

    Parameters
    ----------
    folder
        Where the temporary file is; None: beside `path`. Must be on the same file system.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])
    aside = (folder or path.parent) / f".{name}.{secrets.token_hex(8)}.aside"
    return os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), aside


def create_mark(path: str) -> None:
    """Create an empty file; FileExistsError if there is anything, such as the one that somebody else has created."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def write_aside(path: Path, content: bytes, *, lasting: bool = True, folder: Path | None = None) -> None:
    """Write a file atomically; with `lasting`, it also survives a power cut. `folder` is that of `create_aside`."""
    try:
        handle, aside = create_aside(path, folder)
        try:
            with os.fdopen(handle, "wb"):
                write_all(handle, memoryview(content))
                if lasting:
                    os.fsync(handle)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)  # if it was not renamed, also after Ctrl-C
        if lasting:
            sync(path.parent)
    except OSError as error:
        raise WriteError(f"Could not write {path}: {error}") from error


def write_all(handle: int, content: memoryview) -> None:
    """Write all bytes; a single call may write fewer."""
    while content:
        written = os.write(handle, content)
        if not written:
            raise OSError("the file accepts no more bytes")
        content = content[written:]


def remove_asides(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove the temporary files that killed writers left in a folder; no writer may be at work there.

    Parameters
    ----------
    names
        Remove those of the files with these names; None: all, in a folder that holds nothing of others.
    """
    for path in folder.iterdir():
        found = _ASIDE.fullmatch(path.name)
        if path.suffix in ASIDE_SUFFIXES if names is None else found is not None and found[1] in names:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to storage."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: a FIFO would block forever
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
