"""Atomic writes that survive a power cut."""

import os
from pathlib import Path

from penstock.core.errors import WriteError

__all__ = ["sync", "write_aside"]


def write_aside(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Write a file atomically; with `lasting`, it also survives a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        aside.replace(path)
        if lasting:
            sync(path.parent)
    except OSError as error:
        raise WriteError(f"Could not write {path}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)  # if it was not renamed, also after Ctrl-C


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
