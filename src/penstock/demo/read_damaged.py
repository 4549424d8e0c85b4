"""The reading task of the demo: reads the damaged copy with both settings of `on_error`."""

import json
import logging
from typing import Any

import xxhash

from penstock.core.errors import DamageError
from penstock.demo.task import ALL_FIELDS, Task, plan_over
from penstock.feed.loader import Loader
from penstock.files.regular import read_regular
from penstock.run.options import RunOptions
from penstock.source.tar.source import TarSource

__all__ = ["read_damaged"]


class _Lines(logging.Handler):
    """Collects log messages, instead of printing them into the story."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def read_damaged(task: Task) -> None:
    """Read the damaged copy twice: until the error, and with a healthy item in place of the bad one."""
    log, error = _Lines(), None
    logging.getLogger("penstock").addHandler(log)
    try:
        _read(TarSource(task.damaged, fields=ALL_FIELDS), task)
    except DamageError as raised:
        error = {"shard": raised.shard, "item": raised.item, "message": str(raised)}
    replaced = _read(TarSource(task.damaged, fields=ALL_FIELDS, on_error="substitute"), task)
    healthy = _read(TarSource(task.shards("train"), fields=ALL_FIELDS), task)
    quarantine = task.damaged / "quarantine.jsonl"
    listed = [json.loads(line) for line in read_regular(quarantine).splitlines()] if quarantine.exists() else []
    task.write_report(
        {"error": error, "log": log.lines, "quarantine": listed, "replaced": replaced, "healthy": healthy}
    )


def _read(source: TarSource, task: Task) -> list[dict[str, Any]]:
    """Return the shapes of each batch of an epoch, and a digest of all fields of each of its items."""
    found = []
    with Loader(source, plan_over(source, task), num_workers=task.workers, options=RunOptions("threads")) as loader:
        for batch in loader:
            arrays = [batch[name].numpy() for name in ALL_FIELDS]
            items = [
                xxhash.xxh3_64_hexdigest(b"".join(row.tobytes() for row in rows)) for rows in zip(*arrays, strict=True)
            ]
            found.append({"shapes": [list(array.shape) for array in arrays], "items": items})
    return found
