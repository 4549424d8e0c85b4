"""Loaders over the measured data, and a consumer that does with batches what a training does."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import penstock as ps

__all__ = ["RUN_ITEMS", "Way", "consume"]

RUN_ITEMS, WINDOW_RUNS = 64, 16
_NO_LIMIT = 1 << 62
_ORDERS: dict[str, Any] = {
    "Shuffle": ps.Shuffle(),
    "windows": ps.WindowShuffle(WINDOW_RUNS, held=False),
    "held windows": ps.WindowShuffle(WINDOW_RUNS),
    "windows of 4 chunks": ps.WindowShuffle(4),
}
_EXECUTORS: dict[str, tuple[int, Literal["auto", "threads", "processes"]]] = {
    "inline": (0, "auto"),
    "2 threads": (2, "threads"),
    "2 processes": (2, "processes"),
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to load: in which order, by whom, and with or without read-ahead."""

    order: str
    executor: str = "inline"
    epoch: int = 0
    """Which one counts: the first one verifies."""

    ahead: bool = True
    give_back: bool = True
    """What does not fit in memory; False: it is left to the kernel which pages go."""

    def __str__(self) -> str:
        marks = [*(["later epoch"] if self.epoch else []), *([] if self.ahead else ["no read-ahead"])]
        marks += [] if self.give_back else ["nothing given back"]
        return ", ".join([self.order, self.executor, *marks])

    def loader(self, source: Any, batch_size: int) -> ps.Loader:
        """Return a loader that goes this way."""
        workers, kind = _EXECUTORS[self.executor]
        options: dict[str, Any] = {} if self.ahead else {"read_ahead_bytes": 0}
        options |= {} if self.give_back else {"page_cache_bytes": _NO_LIMIT}
        plan = ps.Plan(source.index, _ORDERS[self.order], batch_size=batch_size, seed=1, tail="drop")
        return ps.Loader(source, plan, num_workers=workers, options=ps.RunOptions(executor=kind, **options))


def consume(batches: Iterable[Any], kept: str, payload_bytes: int) -> float:
    """Take all batches, keep their labels and look at their metadata; return MB per second of the payload."""
    began, count, labels, seen = time.perf_counter(), 0, [], 0
    for batch in batches:
        labels.append(batch[kept])
        count += len(batch[kept])
        if "metadata" in batch:
            seen += sum(len(about) for about in batch["metadata"])
    return count * payload_bytes / 1e6 / (time.perf_counter() - began)
