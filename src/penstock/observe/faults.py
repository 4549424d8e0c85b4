"""Faults that a run survived: logged warnings, and items in quarantine."""

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

from penstock.files.regular import read_regular

__all__ = ["QuarantineCount", "WarningNotes", "read_quarantine"]

_MAX_KEPT = 100  # warnings, and entries of a quarantine, that are kept; all are counted
_MAX_LETTERS = 500


class WarningNotes(logging.Filter):
    """Keeps the warnings that Penstock logs in this process between `begin` and `end`.

    A filter that passes everything, not a handler: if a program has no handlers, Python prints warnings by itself, and
    a handler would stop that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.lines: list[str] = []
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start listening."""
        logging.getLogger("penstock").addFilter(self)

    def end(self) -> None:
        """Stop listening. Idempotent."""
        logging.getLogger("penstock").removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a warning, and let every record pass."""
        if record.levelno >= logging.WARNING:
            with self._lock:
                self.count += 1
                if len(self.lines) < _MAX_KEPT:
                    self.lines.append(record.getMessage()[:_MAX_LETTERS])
        return True


class QuarantineCount:
    """How many items of a source are in its quarantine; the file is read when it has changed.

    Parameters
    ----------
    source
        What has a quarantine and a manifest; None: nothing has.
    """

    def __init__(self, source: Any) -> None:
        manifest = getattr(source, "manifest", None)
        self._path: Path | None = None if manifest is None else source.quarantine
        self._fingerprint = "" if manifest is None else str(manifest.fingerprint)
        self._seen: tuple[int, int] | None = None
        self._count = 0

    def update(self) -> float:
        """Return the count up to now; NaN without a quarantine."""
        if self._path is None:
            return math.nan
        try:
            facts = self._path.stat()
        except OSError:  # nothing is damaged so far
            return 0.0
        if self._seen != (facts.st_size, facts.st_mtime_ns):
            self._seen = facts.st_size, facts.st_mtime_ns
            self._count = read_quarantine(self._path, self._fingerprint)["count"]
        return float(self._count)


def read_quarantine(path: Path, fingerprint: str) -> dict[str, Any]:
    """Return the damaged items of one dataset in a quarantine file: how many, and the first of them.

    Parameters
    ----------
    path
        The file, one line of JSON per item. A missing file lists none.
    fingerprint
        Fingerprint of the dataset; lines about another one, and truncated lines, do not count.
    """
    entries: dict[int, dict[str, Any]] = {}
    try:
        lines = read_regular(path).splitlines()
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
        {"item": item, "shard": str(entry.get("shard", "")), "reason": str(entry.get("reason", ""))[:_MAX_LETTERS]}
        for item, entry in sorted(entries.items())[:_MAX_KEPT]
    ]
    return {"path": str(path), "count": len(entries), "entries": first}
