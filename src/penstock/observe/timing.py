"""Time of each stage: totals and bounded traces, so that a month takes no more memory than a minute."""

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock.observe.durations import Trace

__all__ = ["StageTime", "Timings"]


@dataclass(slots=True)
class StageTime:
    """Totals of all calls of one stage."""

    calls: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0
    nbytes: int = 0


class Timings:
    """An observer that keeps totals and traces of each stage.

    Stages: `read`, `transform` and `collate`, wherever they run; `wait`, the time that the consumer waited for a batch;
    `device`, the time to start the copy of a batch to the device.

    Examples
    --------
    >>> timings = Timings()
    >>> timings.record("read", 0.5, 1000)
    >>> timings.stages["read"].nbytes
    1000
    """

    def __init__(self) -> None:
        self.stages: dict[str, StageTime] = {}
        self._lock = threading.Lock()
        self._traces: dict[str, Trace] = {}
        self._began = time.perf_counter()

    @classmethod
    def of(cls, loader: Any) -> "Timings | None":
        """Return the `Timings` that observes `loader`, or None."""
        found = getattr(loader, "observer", None)
        return found if isinstance(found, cls) else None

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Add one call of `stage`."""
        with self._lock:
            entry = self.stages.setdefault(stage, StageTime())
            entry.calls += 1
            entry.seconds += seconds
            entry.max_seconds = max(entry.max_seconds, seconds)
            entry.nbytes += nbytes
            if stage not in self._traces:
                self._traces[stage] = Trace()
            # The clock is read under the lock, so that the times of a trace never decrease.
            self._traces[stage].add(time.perf_counter() - self._began, seconds)

    @property
    def began(self) -> float:
        """Creation time as given by `time.perf_counter`: time 0 of the traces."""
        return self._began

    def traces(self) -> dict[str, Trace]:
        """Return a copy of the traces: for each stage, the seconds of its calls over the time at which they ended."""
        with self._lock:
            return copy.deepcopy(self._traces)

    @property
    def wait_fraction(self) -> float:
        """Fraction of the time since creation that the consumer waited for data."""
        waited = self.stages["wait"].seconds if "wait" in self.stages else 0.0
        return waited / max(time.perf_counter() - self._began, 1e-9)

    def __str__(self) -> str:
        rows = [
            f"{name}: {entry.calls} calls, {entry.seconds:.3f} s, at most {1000 * entry.max_seconds:.1f} ms"
            + (f", {entry.nbytes / 1e6:.1f} MB" if entry.nbytes else "")
            for name, entry in self.stages.items()
        ]
        return "\n".join([*rows, f"waiting for data: {100 * self.wait_fraction:.1f} % of the time"])
