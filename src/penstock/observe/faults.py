"""What went wrong and was survived: items in quarantine, workers that were started again."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

__all__ = ["Notes", "read_quarantine"]

_MOST = 100  # notes, and entries of a quarantine, that are kept; all are counted
_MOST_LETTERS = 500


class Notes(logging.Filter):
    """The warnings that Penstock logs in this process while it is asked to listen.

    A filter that lets everything pass, not a handler: where a program has no handlers, Python prints warnings by
    itself, and would no longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.lines: list[str] = []
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Listen."""
        logging.getLogger("penstock").addFilter(self)

    def end(self) -> None:
        """Listen no longer; twice is fine."""
        logging.getLogger("penstock").removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Take note, and let it pass."""
        if record.levelno >= logging.WARNING:
            with self._lock:
                self.count += 1
                if len(self.lines) < _MOST:
                    self.lines.append(record.getMessage()[:_MOST_LETTERS])
        return True


def read_quarantine(path: Path, fingerprint: str) -> dict[str, Any]:
    """Return the bad items that a quarantine lists of one data set: how many, and the first of them.

    Parameters
    ----------
    path
        The file, a line of JSON for each item. One that is not there lists none.
    fingerprint
        Of the data set; lines about another one do not count, nor do lines that were cut off.
    """
    entries: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        lines = []
    except OSError as error:
        return {"path": str(path), "count": 0, "entries": [], "unreadable": str(error)}
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint and isinstance(entry.get("item"), int):
            entries.setdefault(entry["item"], entry)
    first = [
        {"item": item, "shard": str(entry.get("shard", "")), "reason": str(entry.get("reason", ""))[:_MOST_LETTERS]}
        for item, entry in sorted(entries.items())[:_MOST]
    ]
    return {"path": str(path), "count": len(entries), "entries": first}
