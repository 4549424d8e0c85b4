"""The list of bad items: what, where and why, one line of JSON each, shared by all processes that read the data set."""

import json
import logging
import os
from pathlib import Path

from penstock.core.errors import DamageError, OptionError

__all__ = ["Quarantine"]

_LOG = logging.getLogger("penstock")


class Quarantine:
    """Notes each bad item once, and raises when there are more than `most`.

    What is in the list does not decide what is read: an item that is healthy again is delivered again.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str, most: int) -> None:
        self.path, self._fingerprint, self._most = Path(path), fingerprint, most
        try:
            self.path.open("a").close()
        except OSError as error:
            raise OptionError(
                f"on_error='substitute' lists bad items in {self.path}, which cannot be written: {error}. "
                "Name another file with quarantine=..."
            ) from error
        if not self.path.stat().st_size:
            self.path.unlink()

    def items(self) -> set[int]:
        """Return the bad items of this data set, as all processes have found them."""
        if not self.path.exists():
            return set()
        entries = [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
        return {entry["item"] for entry in entries if entry["fingerprint"] == self._fingerprint}

    def add(self, item: int, shard: str, error: DamageError) -> None:
        """Note a bad item."""
        bad = self.items()
        reason = error.reason
        if len(bad | {item}) > self._most:
            over = f"{reason}; with it, more than max_bad_items={self._most} items are bad, see {self.path}"
            raise DamageError(shard, item, over) from error
        if item in bad:
            return
        entry = {"item": item, "shard": shard, "reason": reason, "fingerprint": self._fingerprint}
        # One write of one line: appended whole, whoever else appends.
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(handle, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(handle)
        _LOG.warning("Item %s in %s is replaced by another one: %s (listed in %s).", item, shard, reason, self.path)
