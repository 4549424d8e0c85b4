"""Facts about a plan for run files and reports: description, mixing and access map."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.plan.epoch import Epoch
from penstock.plan.plan import Plan

__all__ = ["access_map", "find_plan", "plan_facts"]

_MAX_BATCHES, _MAX_POINTS = 400, 2400  # in an access map
_MAX_BORDERS = 200  # more cannot be told apart in a chart
_MAX_HASHED_ITEMS = 4_000_000  # takes about a second
_MAX_CHARACTERS = 400
_MAX_DEPTH = 4  # of loaders that wrap loaders


def find_plan(loader: Any) -> Plan | None:
    """Return the plan of a Penstock loader, also if other loaders wrap it; None if there is none."""
    for _ in range(_MAX_DEPTH):
        for name in ("plan", "segments"):
            found = getattr(loader, name, None)
            if isinstance(found, Plan):
                return found
            # WebDatasetLoader.plan is a method: it takes a batch size, because the loader yields single samples.
            if name == "plan" and callable(found) and hasattr(loader, "get_state"):
                plan = found(1)
                return plan if isinstance(plan, Plan) else None
        loader = getattr(loader, "loader", None)
        if loader is None:
            return None
    return None


def plan_facts(plan: Plan, source: Any = None) -> dict[str, Any]:
    """Return facts about a plan as plain JSON: its identity, order hash, and the mixing and access map of epoch 0.

    Parameters
    ----------
    source
        Source of the items, for its shard borders; None: use the chunk borders of the plan.
    """
    mixing = plan.mixing()
    identity = plan.identity()
    return {
        "description": _describe_plan(identity)[:_MAX_CHARACTERS],
        "identity": {name: str(value)[:_MAX_CHARACTERS] for name, value in identity.items()},
        "seed": int(plan.seed),
        "batch_size": int(plan.passes.batch_size),
        "n_batches": int(plan.epoch(0).n_batches),
        # The hash visits every item.
        "order_hash": plan.order_hash() if len(plan.index) <= _MAX_HASHED_ITEMS else None,
        "mixing": {
            "score": mixing.score,
            "read_amplification": mixing.read_amplification,
            "batches_measured": mixing.batches_measured,
            **({} if mixing.padding is None else {"padding": mixing.padding}),
        },
        "access": access_map(plan, source),
    }


def access_map(plan: Plan, source: Any = None) -> dict[str, Any]:
    """Return positions of epoch 0 and the items there: all of them, or a few thousand, evenly spaced.

    Items are numbered as in the source. `borders` are the first items of all shards (or chunks) but the first; None if
    there are too many to plot.
    """
    epoch, size = plan.epoch(0), plan.passes.batch_size
    n_batches = epoch.n_batches
    batches = np.unique(np.linspace(0, max(0, n_batches - 1), min(n_batches, _MAX_BATCHES)).astype(np.int64))
    points_per_batch = max(1, _MAX_POINTS // max(1, len(batches)))
    positions: list[int] = []
    items: list[int] = []
    for batch in batches.tolist():
        draw = epoch.draw(batch)
        valid = np.flatnonzero(draw.mask) if draw.mask is not None else np.arange(len(draw))
        rows = valid[np.unique(np.linspace(0, len(valid) - 1, min(len(valid), points_per_batch)).astype(np.int64))]
        # A packed batch has more items than rows, which are what its positions count.
        positions += (batch * size + (rows if len(draw) <= size else rows * size // len(draw))).tolist()
        items += draw.items[rows].tolist()
    unit, n_borders, borders = _find_borders(plan.index, source)
    return {
        "positions": positions,
        "items": items,
        "n_positions": n_batches * size - _n_padded(epoch),
        "n_items": int(plan.index.n_stored),
        "borders_of": unit,
        "n_parts": n_borders + 1,
        "borders": borders,
    }


def _n_padded(epoch: Epoch) -> int:
    """Return how many places of batches have no item: those after the last item, in the last batches."""
    last = np.arange(max(0, epoch.n_batches - _MAX_BATCHES), epoch.n_batches)
    starts, stops, _ = epoch.borders(last)
    return int((epoch.passes.batch_size - (stops - starts)).sum())


def _find_borders(index: Index, source: Any) -> tuple[str, int, list[int] | None]:
    """Return the unit of storage ("shards" or "chunks"), the number of borders, and the borders."""
    shards = getattr(getattr(source, "manifest", None), "shards", None)
    if shards is not None:
        unit, count = "shards", len(shards)
        starts: Callable[[], NDArray[np.int64]] = lambda: np.cumsum([shard.n_items for shard in shards])[:-1]  # noqa: E731
    else:
        whole = getattr(source, "index", index)
        unit, count = "chunks", whole.n_chunks
        # In a selection, items are renumbered; `stored` gives the numbers in the source.
        starts = lambda: whole.stored(whole.chunk_starts(np.arange(1, whole.n_chunks)))  # noqa: E731
    few = 0 < count <= _MAX_BORDERS
    return unit, max(0, count - 1), [int(start) for start in starts()] if few else None


def _describe_plan(identity: Mapping[str, str | int]) -> str:
    lanes = f", {identity['lanes']} lanes" if int(identity["lanes"]) > 1 else ""
    segments = f", in segments of {identity['segment']:,} batches" if identity["segment"] else ""
    return (
        f"{identity['order']} over {identity['items']:,} items, batches of {identity['batch_size']:,}, "
        f"seed {identity['seed']}{lanes}{segments}"
    )
