"""The list of bad items: item, shard and reason, one line of JSON each, shared by all reading processes."""

import fcntl
import json
import logging
import os
from typing import Any

from penstock.core.errors import DamageError, OptionError, ReadError, WriteError
from penstock.core.text import cause
from penstock.files.durable import write_all
from penstock.files.kinds import local_path
from penstock.files.regular import open_list, read_regular

__all__ = ["Quarantine"]

_LOG = logging.getLogger("penstock")


class Quarantine:
    """Records each bad item once, and raises DamageError if there are more than `max_items`.

    The list does not decide what is read: an item that is healthy again is delivered again.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str, max_items: int) -> None:
        self.path, self._fingerprint, self._max_items = local_path(path), fingerprint, max_items
        where = self.path if self.path.exists() else self.path.parent
        is_special = os.path.lexists(self.path) and (self.path.is_symlink() or not self.path.is_file())
        if not os.access(where, os.W_OK) or is_special:
            what = ", a link or a special file" if is_special else ""
            raise OptionError(
                f"quarantine must be a writable file for on_error='substitute', got {self.path}{what}. "
                "Choose another file with quarantine=..."
            )

    def items(self) -> set[int]:
        """Return the bad items of this dataset that any process has found."""
        try:
            lines = read_regular(self.path, max_bytes=None).splitlines()
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ReadError(f"Could not read the list of bad items {self.path}: {cause(error)}.") from error
        return {entry["item"] for line in lines if (entry := self._parse_entry(line)) is not None}

    def _parse_entry(self, line: bytes) -> dict[str, Any] | None:
        """Return the entry if it is about this dataset; None if it is about another, or the line is truncated."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        mine = isinstance(entry, dict) and entry.get("fingerprint") == self._fingerprint
        return entry if mine and isinstance(entry.get("item"), int) else None

    def add(self, item: int, shard: str, error: DamageError) -> None:
        """Record a bad item; raise DamageError if there are too many."""
        entry = {"item": item, "shard": shard, "reason": error.reason, "fingerprint": self._fingerprint}
        try:
            handle = open_list(self.path)
        except OSError as failure:
            raise WriteError(f"Could not write the list of bad items {self.path}: {cause(failure)}.") from failure
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # counting and adding must be atomic across processes and threads
            bad = self.items()
            if len(bad | {item}) > self._max_items:
                reason = f"{error.reason}; more than max_bad_items={self._max_items} items are bad, see {self.path}"
                raise DamageError(shard, item, reason) from error
            if item in bad:
                return
            size = os.fstat(handle).st_size
            truncated = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            line = (b"\n" if truncated else b"") + json.dumps(entry).encode() + b"\n"
            try:
                write_all(handle, memoryview(line))
            except OSError as failure:
                os.ftruncate(handle, size)
                raise WriteError(f"Could not write the list of bad items {self.path}: {cause(failure)}.") from failure
        finally:
            os.close(handle)
        _LOG.warning("Item %s in %s is damaged and substituted: %s (see %s).", item, shard, error.reason, self.path)
