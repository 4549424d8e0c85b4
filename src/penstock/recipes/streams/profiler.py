"""A timeline of the pipeline stages, in the trace format of chrome://tracing and Perfetto."""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from penstock.core.checks import check_integer
from penstock.files.durable import write_aside

__all__ = ["PipelineProfiler"]

_NAMES = {"read": "disk_load", "wait": "gpu_queue_wait", "device": "gpu_transfer"}


class PipelineProfiler:
    """An observer that keeps each stage with its time and thread; drops the oldest events when there are too many.

    It records nothing until `start()`.

    The stages of a loader are `disk_load` (the background thread reads), `gpu_transfer` (a copy starts) and
    `gpu_queue_wait` (the training waits for a chunk). Add your own with `event`.

    Parameters
    ----------
    max_events
        Events to keep.

    Examples
    --------
    >>> profiler = PipelineProfiler()
    >>> profiler.start()
    >>> with profiler.event("train", step=3):
    ...     pass
    >>> [(event["name"], event["args"]) for event in profiler.events]
    [('train', {'step': 3})]
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=check_integer("max_events", max_events, at_least=1))
        self._threads: dict[str, int] = {}
        self._enabled = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start recording."""
        self._enabled = True

    def stop(self) -> None:
        """Stop recording; recorded events are kept."""
        self._enabled = False

    def is_enabled(self) -> bool:
        """Return whether events are recorded."""
        return self._enabled

    @property
    def events(self) -> list[dict[str, Any]]:
        """The recorded events, oldest first: `name`, `cat`, `ts` and `dur` in microseconds, `tid`, `args`."""
        with self._lock:
            return list(self._events)

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Record a stage that has just ended; called by a loader."""
        self._add(_NAMES.get(stage, stage), "pipeline", time.perf_counter() - seconds, seconds, None, {"bytes": nbytes})

    @contextmanager
    def event(self, name: str, category: str = "pipeline", thread: str | None = None, **args: Any) -> Iterator[None]:
        """Record a `with` block as an event of this thread, or of the thread named `thread`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, category, began, time.perf_counter() - began, thread, args)

    def _add(
        self, name: str, category: str, began: float, seconds: float, thread: str | None, args: dict[str, Any]
    ) -> None:
        if not self._enabled:
            return
        # By name: each epoch has a new thread, and all of them are one row of the trace.
        who = thread or threading.current_thread().name
        with self._lock:
            number = self._threads.setdefault(who, len(self._threads))
            times = {"ts": began * 1e6, "dur": seconds * 1e6}
            self._events.append({"name": name, "cat": category, "ph": "X", **times, "tid": number, "args": args})

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the trace as plain JSON: threads by name, times in microseconds."""
        with self._lock:
            events, threads = list(self._events), dict(self._threads)
        meta = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": number, "args": {"name": name}}
            for name, number in threads.items()
        ]
        return {"traceEvents": [*meta, *({**event, "pid": os.getpid()} for event in events)]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, for https://ui.perfetto.dev or chrome://tracing; it is complete or missing."""
        write_aside(Path(path), json.dumps(self.to_chrome_trace(), default=str).encode(), lasting=False)

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return count, total, mean and maximum of each event name; times are in milliseconds."""
        found: dict[str, dict[str, float]] = {}
        for event in self.events:
            entry = found.setdefault(event["name"], {"count": 0.0, "total_ms": 0.0, "mean_ms": 0.0, "max_ms": 0.0})
            entry["count"] += 1
            entry["total_ms"] += event["dur"] / 1000
            entry["max_ms"] = max(entry["max_ms"], event["dur"] / 1000)
            entry["mean_ms"] = entry["total_ms"] / entry["count"]
        return found

    def print_stats(self, out: TextIO | None = None) -> None:
        """Print the statistics, one line per event name."""
        for name, entry in self.get_stats().items():
            (out or sys.stdout).write(
                f"{name}: {entry['count']:.0f} times, total {entry['total_ms']:.1f} ms, mean {entry['mean_ms']:.2f} ms"
                f", max {entry['max_ms']:.2f} ms\n"
            )
