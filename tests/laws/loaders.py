"""Loaders for the laws of resuming: their items, plans and executors, and all their batches."""

from typing import Any

from penstock_test_parts import numbered_source, to_plain, with_noise

from penstock import Index, Loader, Plan, RunOptions, Segments, Shuffle, Source, WindowShuffle
from penstock.plan.mixed.order import Mixed, MixedPart

__all__ = ["EPOCHS", "EXECUTORS", "FORK", "MOVES", "PLANS", "SOURCE", "THREADS", "epochs_of", "make_loader"]

SOURCE = numbered_source(46, chunk=4)
THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")
EXECUTORS = {
    "inline": (0, RunOptions()),
    "one thread": (1, RunOptions(executor="threads", prefetch=3)),
    "three threads": (3, THREADS),
}
_PARTS = (MixedPart("a", Index.uniform(16, 4), Shuffle()), MixedPart("b", Index.uniform(30, 4), WindowShuffle(3)))
PLANS: dict[str, Any] = {
    "shuffle, short": Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1),
    "shuffle, drop": Plan(SOURCE.index, Shuffle(), batch_size=7, seed=2, tail="drop"),
    "windows, pad, lanes": Plan(SOURCE.index, WindowShuffle(3), batch_size=8, lanes=3, tail="pad", seed=3),
    "cycling segments": Segments(Plan(SOURCE.index, WindowShuffle(2), batch_size=5, lanes=2, seed=4, tail="drop"), 4),
    "mixture": Plan(SOURCE.index, Mixed(_PARTS, ((0, (2, 1)),), "all"), batch_size=7, tail="short", seed=6),
    "segments of a pass": Segments(Plan(SOURCE.index, Shuffle(), batch_size=5, tail="short", seed=5), 4),
}
MOVES = Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1)  # 7 batches
EPOCHS = 3


def make_loader(plan: Any, executor: str = "inline", source: Source = SOURCE, **others: Any) -> Loader:
    workers, options = EXECUTORS[executor]
    return Loader(source, plan, transform=with_noise, num_workers=workers, **{"options": options, **others})


def epochs_of(loader: Loader, until: int = EPOCHS) -> list[Any]:
    """Return every batch from where the loader stands to the end of epoch `until` - 1, with its random bits."""
    found = []
    while loader.epoch < until:
        found += [to_plain(batch) for batch in loader]
    return found
