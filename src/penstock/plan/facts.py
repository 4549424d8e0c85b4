"""What a plan looks like from outside: in words, how well it mixes, and which item comes when."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments

__all__ = ["access_map", "plan_facts", "plan_of"]

_BATCHES, _POINTS = 400, 2400  # of an access map
_MOST_BORDERS = 200  # that can be told apart in a chart
_MOST_HASHED = 4_000_000  # items: about a second
_MOST_LETTERS = 400
_DEPTH = 4  # of loaders around loaders


def plan_of(loader: Any) -> Plan | Segments | None:
    """Return the plan that a loader of ours runs, also where something is around it; None where there is none."""
    for _ in range(_DEPTH):
        for name in ("plan", "segments"):
            found = getattr(loader, name, None)
            if isinstance(found, Plan | Segments):
                return found
            # A WebDatasetLoader gives samples one by one, and its plan in batches.
            if name == "plan" and callable(found) and hasattr(loader, "get_state"):
                made = found(1)
                return made if isinstance(made, Plan | Segments) else None
        loader = getattr(loader, "loader", None)
        if loader is None:
            return None
    return None


def plan_facts(plan: Plan | Segments, source: Any = None) -> dict[str, Any]:
    """Return a plan as plain JSON: what it depends on, how well epoch 0 mixes, its hash, and its access map.

    Parameters
    ----------
    source
        Where the items are, for the borders of its shards; None: those of the plan's chunks.
    """
    mixing = plan.mixing()
    identity = plan.identity()
    return {
        "description": _described(plan)[:_MOST_LETTERS],
        "identity": {name: str(value)[:_MOST_LETTERS] for name, value in identity.items()},
        "seed": int(plan.seed),
        "batch_size": int(plan.batch_size),
        "n_batches": int(plan.epoch(0).n_batches),
        # A hash of the whole order takes a walk through it.
        "order_hash": plan.order_hash() if len(plan.index) <= _MOST_HASHED else None,
        "mixing": {
            "score": mixing.score,
            "read_amplification": mixing.read_amplification,
            "batches_measured": mixing.batches_measured,
        },
        "access": access_map(plan, source),
    }


def access_map(plan: Plan | Segments, source: Any = None) -> dict[str, Any]:
    """Return positions of epoch 0 and the items that come there: all of them, or some thousand, evenly spread.

    Items are numbered as the source has them. `borders` are the first items of all shards (or chunks) but the first;
    None where there are too many to draw.
    """
    epoch, size = plan.epoch(0), plan.batch_size
    n_batches = epoch.n_batches
    batches = np.unique(np.linspace(0, max(0, n_batches - 1), min(n_batches, _BATCHES)).astype(np.int64))
    of_each = max(1, _POINTS // max(1, len(batches)))
    positions: list[int] = []
    items: list[int] = []
    for batch in batches.tolist():
        draw = epoch.draw(batch)
        valid = np.flatnonzero(draw.mask) if draw.mask is not None else np.arange(len(draw))
        rows = valid[np.unique(np.linspace(0, len(valid) - 1, min(len(valid), of_each)).astype(np.int64))]
        positions += (batch * size + rows).tolist()
        items += draw.items[rows].tolist()
    what, n_borders, borders = _borders(plan.index, source)
    return {
        "positions": positions,
        "items": items,
        "n_positions": int(n_batches * size),
        "n_items": int(plan.index.n_stored),
        "borders_of": what,
        "n_parts": n_borders + 1,
        "borders": borders,
    }


def _borders(index: Index, source: Any) -> tuple[str, int, list[int] | None]:
    """Return what the parts of the storage are, how many borders they have, and where."""
    shards = getattr(getattr(source, "manifest", None), "shards", None)
    if shards is not None:
        what, count = "shards", len(shards)
        starts: Callable[[], NDArray[np.int64]] = lambda: np.cumsum([shard.n_items for shard in shards])[:-1]  # noqa: E731
    else:
        whole = getattr(source, "index", index)
        what, count = "chunks", whole.n_chunks
        # Of a selection, chunks are numbered by what was selected: the storage's own numbers begin them.
        starts = lambda: whole.stored(whole.chunk_starts(np.arange(1, whole.n_chunks)))  # noqa: E731
    few = 0 < count <= _MOST_BORDERS
    return what, max(0, count - 1), [int(start) for start in starts()] if few else None


def _described(plan: Plan | Segments) -> str:
    if isinstance(plan, Segments):
        return f"{_described(plan.plan)}, in segments of {plan.length:,} batches"
    lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
    return f"{plan.order!r} over {len(plan.index):,} items, batches of {plan.batch_size:,}, seed {plan.seed}{lanes}"
