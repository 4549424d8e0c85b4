"""Strategies for random indexes, orders and plans, and draws as plain values."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.core.types import Draw
from penstock.plan.balanced import Balanced, BalancedSpans
from penstock.plan.epoch import Epoch
from penstock.plan.lengths.near import Bucketed, TokenBudget
from penstock.plan.lengths.packed import Packed
from penstock.plan.mixed.order import Mixed, MixedPart
from penstock.plan.orders import Listed, RandomChunks, Sequential, Shuffle, Subset, WindowShuffle
from penstock.plan.plan import Plan, Segments
from penstock.plan.window_batches import PartitionChunks, WindowBatches

__all__ = [
    "all_items",
    "any_order",
    "batches",
    "delivered",
    "draws",
    "every_plan",
    "facts",
    "indices",
    "length_plans",
    "partitioning_order",
    "plans",
    "window_shuffles",
    "windowed_order",
]

TAILS = ("drop", "short", "pad")


@st.composite
def indices(draw: st.DrawFn, min_items: int = 0, max_items: int = 60) -> Index:
    """Regular and irregular chunks, whole or with a selection."""
    if draw(st.booleans()):
        index = Index.uniform(draw(st.integers(min_items, max_items)), draw(st.integers(1, 9)))
    else:
        sizes = draw(st.lists(st.integers(0, 9), max_size=10))
        index = Index.from_sizes([*sizes, max(0, min_items - sum(sizes))])
    if draw(st.booleans()):
        mask = np.array(draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
        if mask.sum() < min_items:
            mask[:] = True
        index = index.select(mask)
    return index


def partitioning_order(index: Index) -> st.SearchStrategy[Order]:
    """Orders that visit every item exactly once."""
    kinds = [st.just(Sequential()), st.just(Shuffle()), window_shuffles(index), window_shuffles(index, held=False)]
    return st.one_of(*kinds)


def window_shuffles(index: Index, *, held: bool = True) -> st.SearchStrategy[Order]:
    """Windows of any size, with and without each of their permutations."""
    return st.builds(
        WindowShuffle,
        st.integers(1, max(1, index.n_chunks)),
        permute_chunks=st.booleans(),
        permute_items=st.booleans(),
        held=st.just(held),
    )


def windowed_order(index: Index) -> st.SearchStrategy[Order]:
    """Orders whose draws are rows of windows."""
    windows = window_shuffles(index)
    runs = st.builds(
        RandomChunks,
        size=st.integers(1, 12),
        count=st.none() | st.integers(1, 6),
        align=st.integers(1, 4),
        shuffle=st.booleans(),
    )
    return windows | runs


def any_order(index: Index) -> st.SearchStrategy[Order]:
    """Every kind of order there is."""
    kinds = [partitioning_order(index), windowed_order(index)]
    if len(index):
        near, window = st.integers(1, 5), st.integers(1, 3)
        kinds.append(st.builds(Subset, st.integers(1, len(index)), near=near, window=window))
        labels = st.lists(st.integers(0, 3), min_size=len(index), max_size=len(index))
        kinds.append(st.builds(Balanced, labels, length=st.none() | st.integers(1, 80)))
        if index.selected is None:
            kinds.append(_mixed_orders(len(index)))
            kinds.append(st.builds(Listed, st.lists(st.integers(0, len(index) - 1), min_size=1, max_size=40)))
            spans = ((0, len(index) // 2), (0.25, 0.75)) if len(index) > 1 else ((0,), (1.0,))
            kinds.append(st.builds(BalancedSpans, *map(st.just, spans), st.integers(1, 80)))
    return st.one_of(*kinds)


@st.composite
def _mixed_orders(draw: st.DrawFn, n_items: int) -> Order:
    """Mixtures of one or two sources, some with weights that change with a step."""
    first = draw(st.integers(1, n_items))
    sizes = [first, n_items - first] if first < n_items else [first]
    parts = tuple(MixedPart(f"s{n}", Index.uniform(size, 3), Shuffle()) for n, size in enumerate(sizes))
    weights = st.tuples(*(st.integers(1, 5) for _ in sizes))
    if draw(st.booleans()):
        return Mixed(parts, ((0, draw(weights)),), "all")
    # Steps of a size of their own: those of a batch, as batches of one source, are refused with another batch size.
    phases = ((0, draw(weights)), (draw(st.integers(1, 9)), draw(weights)))
    return Mixed(parts, phases, draw(st.integers(1, 80)), items_per_step=draw(st.integers(1, 9)))


@st.composite
def plans(
    draw: st.DrawFn,
    orders: Callable[[Index], st.SearchStrategy[Order]] = partitioning_order,
    *,
    tails: tuple[str, ...] = TAILS,
    max_lanes: int = 4,
    min_items: int = 0,
    max_items: int = 60,
) -> Plan:
    """Plans over random indices."""
    index = draw(indices(min_items, max_items))
    return Plan(
        index,
        draw(orders(index)),
        batch_size=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**40)),
        lanes=draw(st.integers(1, max_lanes)),
        tail=draw(st.sampled_from(tails)),
    )


@st.composite
def every_plan(draw: st.DrawFn, max_items: int = 60) -> Any:
    """Plans of every kind, with every tail: of positions, of segments, of lengths and of windows."""
    plan = draw(plans(any_order, max_items=max_items))
    kind = draw(st.sampled_from(["plan", "segments", "lengths", "windows"]))
    if kind == "segments":
        return Segments(plan, draw(st.integers(1, 6)))
    if kind == "lengths":
        lengths = draw(length_plans())
        return lengths if draw(st.booleans()) else replace(lengths, tail=draw(st.sampled_from(TAILS)))
    if kind == "windows" and len(plan.index):
        random = st.builds(RandomChunks, st.integers(1, 9), count=st.integers(1, 6))
        return WindowBatches(plan.index, draw(random | st.builds(PartitionChunks, st.integers(1, 9))), plan.seed)
    return plan


@st.composite
def length_plans(draw: st.DrawFn) -> Any:
    """Plans over random lengths with tail='short', whose items are whole."""
    index = draw(indices(1, 40))
    lengths = draw(st.lists(st.integers(0, 9), min_size=index.n_stored, max_size=index.n_stored))
    seed = draw(st.integers(0, 2**40))
    kinds = [
        Bucketed(index, lengths, draw(st.integers(1, 9)), seed),
        TokenBudget(index, lengths, draw(st.integers(9, 40)), draw(st.none() | st.integers(1, 3)), seed),
        Packed(index, lengths, draw(st.integers(9, 20)), draw(st.integers(1, 4)), seed),
    ]
    return draw(st.sampled_from(kinds))


def all_items(index: Index) -> list[int]:
    """Return the source's numbers of all items, ascending."""
    return list(range(index.n_items)) if index.selected is None else index.selected.tolist()


def draws(epoch: Epoch, start: int = 0) -> list[Draw]:
    """Return the draws of an epoch from batch `start` on."""
    return list(epoch.draws(range(start, epoch.n_batches)))


def batches(epoch: Epoch) -> list[list[int]]:
    """Return the items of every batch, padding included."""
    return [draw.items.tolist() for draw in draws(epoch)]


def delivered(some_draws: Iterable[Draw]) -> list[int]:
    """Return the items of all draws, end to end, without padding."""
    return [item for draw in some_draws for item in _real(draw).tolist()]


def facts(draw: Draw) -> tuple[Any, ...]:
    """Return all that a draw says, as values that can be compared."""
    parts = [(part.window.key, part.window.spans.tolist(), part.at, part.rows.tolist()) for part in draw.parts]
    optional = (None if array is None else array.tolist() for array in (draw.mask, draw.epochs, draw.visits))
    return (draw.epoch, draw.batch, draw.items.tolist(), parts, *optional)


def _real(draw: Draw) -> np.ndarray:
    return draw.items if draw.mask is None else draw.items[draw.mask]
