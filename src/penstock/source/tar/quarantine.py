"""The list of bad items: what, where and why, one line of JSON each, shared by all processes that read the data set."""

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

from penstock.core.errors import DamageError, OptionError

__all__ = ["Quarantine"]

_LOG = logging.getLogger("penstock")


class Quarantine:
    """Notes each bad item once, and raises when there are more than `most`.

    What is in the list does not decide what is read: an item that is healthy again is delivered again.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str, most: int) -> None:
        self.path, self._fingerprint, self._most = Path(path).absolute(), fingerprint, most
        where = self.path if self.path.exists() else self.path.parent
        if not os.access(where, os.W_OK) or self.path.is_dir():
            raise OptionError(
                f"on_error='substitute' lists bad items in {self.path}, which cannot be written. "
                "Name another file with quarantine=..."
            )

    def items(self) -> set[int]:
        """Return the bad items of this data set, as all processes have found them."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return set()
        return {entry["item"] for line in lines if (entry := self._entry(line)) is not None}

    def _entry(self, line: bytes) -> dict[str, Any] | None:
        """Return a line about this data set; None for one about another, and for one that was cut off."""
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        mine = isinstance(entry, dict) and entry.get("fingerprint") == self._fingerprint
        return entry if mine and isinstance(entry.get("item"), int) else None

    def add(self, item: int, shard: str, error: DamageError) -> None:
        """Note a bad item; raise where there are too many."""
        entry = {"item": item, "shard": shard, "reason": error.reason, "fingerprint": self._fingerprint}
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # counting and adding are one thing for all processes and threads
            bad = self.items()
            if len(bad | {item}) > self._most:
                over = f"{error.reason}; with it, more than max_bad_items={self._most} items are bad, see {self.path}"
                raise DamageError(shard, item, over) from error
            if item in bad:
                return
            size = os.fstat(handle).st_size
            cut_off = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (b"\n" if cut_off else b"") + json.dumps(entry).encode() + b"\n")
        finally:
            os.close(handle)
        _LOG.warning("Item %s in %s is replaced by another one: %s (see %s).", item, shard, error.reason, self.path)
