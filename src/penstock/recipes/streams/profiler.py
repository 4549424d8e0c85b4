"""Seed 000: what happened when, as a trace that chrome://tracing and Perfetto show."""

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

__all__ = ["PipelineProfiler"]

_NAMES = {"read": "disk_load", "wait": "gpu_queue_wait", "device": "gpu_transfer"}


class PipelineProfiler:
    """An observer that keeps every stage with its time and its thread; the oldest ones go when there are too many.

    Stages of a loader are `disk_load` (the background thread reads), `gpu_transfer` (a copy is begun) and
    `gpu_queue_wait` (the training waits for a chunk). The training adds its own with `event`.

    Parameters
    ----------
    max_events
        Events that are kept.

    Examples
    --------
    >>> profiler = PipelineProfiler()
    >>> with profiler.event("train", step=3):
    ...     pass
    >>> profiler.to_chrome_trace()["traceEvents"][-1]["name"]
    'train'
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=check_integer("max_events", max_events, at_least=1))
        self._threads: dict[str, int] = {}
        self._enabled = True
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take note from here on."""
        self._enabled = True

    def stop(self) -> None:
        """Take no more note; what there is stays."""
        self._enabled = False

    def is_enabled(self) -> bool:
        """Return whether it takes note."""
        return self._enabled

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Take note of a stage that has just ended; called by a loader."""
        self._add(_NAMES.get(stage, stage), "pipeline", time.perf_counter() - seconds, seconds, None, {"bytes": nbytes})

    @contextmanager
    def event(self, name: str, category: str = "pipeline", thread: str | None = None, **args: Any) -> Iterator[None]:
        """Take note of what happens in a `with` block, on this thread or under another name."""
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
        # By name: every epoch has a thread of its own, and they are one line of the trace.
        who = thread or threading.current_thread().name
        with self._lock:
            number = self._threads.setdefault(who, len(self._threads))
            times = {"ts": began * 1e6, "dur": seconds * 1e6}
            self._events.append({"name": name, "cat": category, "ph": "X", **times, "tid": number, "args": args})

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the trace as JSON: threads by name, times in microseconds."""
        with self._lock:
            events, threads = list(self._events), dict(self._threads)
        meta = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": number, "args": {"name": name}}
            for name, number in threads.items()
        ]
        return {"traceEvents": [*meta, *({**event, "pid": os.getpid()} for event in events)]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; open it at https://ui.perfetto.dev, or in chrome://tracing."""
        Path(path).write_text(json.dumps(self.to_chrome_trace(), default=str))

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return, for each name, how often, how long in all, on average and at most, in milliseconds."""
        with self._lock:
            events = list(self._events)
        found: dict[str, dict[str, float]] = {}
        for event in events:
            entry = found.setdefault(event["name"], {"count": 0.0, "total_ms": 0.0, "mean_ms": 0.0, "max_ms": 0.0})
            entry["count"] += 1
            entry["total_ms"] += event["dur"] / 1000
            entry["max_ms"] = max(entry["max_ms"], event["dur"] / 1000)
            entry["mean_ms"] = entry["total_ms"] / entry["count"]
        return found

    def print_stats(self, out: TextIO | None = None) -> None:
        """Print them, for a person."""
        for name, entry in self.get_stats().items():
            (out or sys.stdout).write(
                f"{name}: {entry['count']:.0f} times, {entry['total_ms']:.1f} ms in all, {entry['mean_ms']:.2f} ms on "
                f"average, {entry['max_ms']:.2f} ms at most\n"
            )
