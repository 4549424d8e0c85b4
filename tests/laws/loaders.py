"""Loaders for the laws of resuming: their items, plans and executors, and all their batches."""

from typing import Any

import torch
from penstock_test_parts import numbered_source, to_plain, with_noise

from penstock import (
    Bucketed,
    Index,
    Loader,
    Packed,
    Plan,
    RunOptions,
    Segments,
    Shuffle,
    Source,
    TokenBudget,
    WindowShuffle,
)
from penstock.core.types import Draw
from penstock.feed.collate import Collator
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
_ONE_EACH = Mixed(_PARTS, ((0, (1, 2)), (3, (1, 1))), 49, homogeneous=True)
_LENGTHS = [1 + item * 7 % 13 for item in range(46)]
PLANS: dict[str, Any] = {
    "shuffle, short": Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1),
    "shuffle, drop": Plan(SOURCE.index, Shuffle(), batch_size=7, seed=2, tail="drop"),
    "windows, pad, lanes": Plan(SOURCE.index, WindowShuffle(3), batch_size=8, lanes=3, tail="pad", seed=3),
    "cycling segments": Segments(Plan(SOURCE.index, WindowShuffle(2), batch_size=5, lanes=2, seed=4, tail="drop"), 4),
    "mixture": Plan(SOURCE.index, Mixed(_PARTS, ((0, (2, 1)),), "all"), batch_size=7, tail="short", seed=6),
    "mixture, a source each, by step": Plan(SOURCE.index, _ONE_EACH, batch_size=7, tail="short", seed=7),
    "buckets": Bucketed(SOURCE.index, _LENGTHS, 7, seed=8),
    "token budget": TokenBudget(SOURCE.index, _LENGTHS, 50, seed=9),
    "packed": Packed(SOURCE.index, _LENGTHS, 24, 2, seed=10),
    "segments of a pass": Segments(Plan(SOURCE.index, Shuffle(), batch_size=5, tail="short", seed=5), 4),
}
MOVES = Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1)  # 7 batches
EPOCHS = 3


class _CollateRows:
    """Collates items with the rows that a plan packs them into."""

    def collate_draw(self, items: list[Any], draw: Draw, fields: Any) -> Any:
        return {**Collator(None, fields)(items, draw), "rows": torch.from_numpy(draw.rows.numbers)}


def make_loader(plan: Any, executor: str = "inline", source: Source = SOURCE, **others: Any) -> Loader:
    workers, options = EXECUTORS[executor]
    if plan.passes.needs_rows:
        others["collate"] = _CollateRows()
    return Loader(source, plan, transform=with_noise, num_workers=workers, **{"options": options, **others})


def epochs_of(loader: Loader, until: int = EPOCHS) -> list[Any]:
    """Return every batch from where the loader stands to the end of epoch `until` - 1, with its random bits."""
    found = []
    while loader.epoch < until:
        found += [to_plain(batch) for batch in loader]
    return found
