"""What a plan, an order and an epoch refuse: the call, and what the error says."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.plan.balanced import Balanced
from penstock.plan.orders import RandomChunks, Shuffle, Subset, WindowShuffle
from penstock.plan.plan import Plan, Segments
from penstock.plan.window_batches import PartitionChunks, WindowBatches

INDEX = Index.uniform(10, 5)
NO_INTEGERS: tuple[Any, ...] = (0, -1, True, 2.5, "4", None, np.float64(4.0))


def plan(**changes: Any) -> Plan:
    return Plan(**{"index": INDEX, "order": Shuffle(), "batch_size": 4, **changes})


def balanced(**arguments: Any) -> Balanced:
    return Balanced(**{"groups": ["a", "b", "b"], **arguments})


def segments(length: Any = 2, tail: Any = "drop") -> Plan:
    return Segments(plan(tail=tail), length)


NOT_FINITE = "weights must be finite numbers >= 0, .*, got "
NAMES = r"weights must name the groups \['a', 'b'\], got "
PER_GROUP = r"one value per group \(2: \['a', 'b'\]\), got "
REFUSED: list[tuple[Callable[[], object], str]] = [
    # -- plans ---------------------------------------------------------------------------------------------------------
    *(
        (
            lambda name=name, value=value: plan(**{name: value}),
            re.escape(f"{name} must be an integer >= 1, got {value!r}"),
        )
        for name in ("batch_size", "lanes")
        for value in NO_INTEGERS
    ),
    *((lambda seed=seed: plan(seed=seed), f"seed must be an integer >= 0, got {seed}") for seed in (-1, 1.5, None)),
    *(
        (lambda tail=tail: plan(tail=tail), f"tail must be one of 'drop', 'short', 'pad', got {tail!r}")
        for tail in ("wrap", None)
    ),
    (lambda: plan(order=Shuffle), r"order must be an order such as Shuffle\(\) or .*, got <class .*Shuffle'>"),
    (lambda: plan(order="shuffle"), "order must be an order such as .*, got 'shuffle'"),
    (lambda: plan(index=10), r"must be an Index \(source.index\), got int"),
    (lambda: plan(index=[1, 2, 3]), r"must be an Index \(source.index\), got list"),
    (lambda: plan(order=WindowShuffle(3)), "window must be <= 2, the number of chunks, got 3"),
    (lambda: plan(order=Subset(11)), "count must be <= 10, the number of items, got 11: .*without replacement"),
    *(
        (lambda n=n: plan(index=Index.uniform(n), order=balanced()), rf"one label per item \({n}\), got 3")
        for n in (0, 2, 4)
    ),
    (lambda: WindowBatches(INDEX, RandomChunks(4), -1), "seed must be an integer >= 0, got -1"),
    # -- epochs and batches --------------------------------------------------------------------------------------------
    (lambda: plan().epoch(-1), "epoch must be >= 0 and origin must be in 0 … 10, got epoch -1, origin 0"),
    (lambda: plan().epoch(0, 11), "origin must be in 0 … 10, got epoch 0, origin 11"),
    (lambda: plan().epoch(0, -1), "origin must be in 0 … 10, got epoch 0, origin -1"),
    *(
        (
            lambda tail=tail, batch=batch: plan(batch_size=2, tail=tail).epoch(2).draw(batch),
            f"batch must be >= 0 and < 5, the batches of epoch 2, got {batch}",
        )
        for tail in ("drop", "pad")
        for batch in (-1, 5, 10**12)
    ),
    (lambda: plan(batch_size=2).explain(5), "batch must be >= 0 and < 5, the batches of epoch 0, got 5"),
    *(
        (lambda length=length: segments(length), f"length must be an integer >= 1, got {length!r}")
        for length in (0, -1, True, 2.5, "2", None)
    ),
    *(
        (
            lambda tail=tail, number=number, origin=origin: segments(tail=tail).epoch(number, origin),
            f"epoch must be >= 0 .*, got epoch {number}, origin {origin}",
        )
        for tail in ("drop", "short")
        for number, origin in ((-1, 0), (0, 3))
    ),
    (lambda: segments().epoch(5).draw(2), "batch must be >= 0 and < 2, the batches of epoch 5, got 2"),
    # -- orders --------------------------------------------------------------------------------------------------------
    *(
        (lambda make=make, value=value: make(value), f"{name} must be an integer >= 1, got {value!r}")
        for name, make, values in (
            ("window", WindowShuffle, (0, -3, 2.5, "2.5")),
            ("count", Subset, (0, 2.5)),
            ("size", RandomChunks, (0, 2.5)),
            ("count", lambda count: RandomChunks(4, count=count), (0, 2.5)),
            ("align", lambda align: RandomChunks(4, align=align), (-1, 2.5)),
            ("length", lambda length: balanced(length=length), (0, -5, 2.5)),
        )
        for value in values
    ),
    (
        lambda: WindowBatches(INDEX, PartitionChunks(10, 12)),
        r"chunk_size must be >= the alignment of its borders \(12 rows\), got 10",
    ),
    # -- balanced orders -----------------------------------------------------------------------------------------------
    (lambda: balanced(groups=range(8), weights=range(-1, 7)), r"got \(-1, 0, 1, 2, 3, 4, 5, 6\)\."),
    (lambda: balanced(groups=range(9), weights=range(-1, 8)), r"got \(-1, 0, 1, 2, 3, 4, 5, 6, …\)\."),
    (lambda: balanced(weights=[0, 0.0]), r"finite numbers >= 0, and one of them > 0, got \(0, 0\)"),
    (lambda: balanced(weights=[1.5, -0.5]), rf"{NOT_FINITE}\(1.5, -0.5\)"),
    (lambda: balanced(weights=[float("nan"), 1.0]), rf"{NOT_FINITE}\(nan, 1\)"),
    (lambda: balanced(weights=[float("inf"), 1.0]), rf"{NOT_FINITE}\(inf, 1\)"),
    (lambda: balanced(weights=[1e308, 1e308]), rf"{NOT_FINITE}\(1e\+308, 1e\+308\)"),
    (lambda: balanced(weights={"a": 1.0}), rf"{NAMES}\['a'\]"),
    (lambda: balanced(weights={"a": 0.5, "c": 0.5}), rf"{NAMES}\['a', 'c'\]"),
    (lambda: balanced(weights={"a": 0.5, "b": 0.5, "c": 0.0}), rf"{NAMES}\['a', 'b', 'c'\]"),
    (lambda: balanced(weights=[1.0]), f"{PER_GROUP}1"),
    (lambda: balanced(weights=[0.2, 0.3, 0.5]), f"{PER_GROUP}3"),
    (lambda: balanced(weights=[[0.5, 0.5]]), f"{PER_GROUP}2"),
    (lambda: balanced(groups=[]), "A balanced order needs at least one item, but groups is empty"),
    (lambda: balanced(groups=[["a"], ["b"]]), r"one label per item, got shape \(2, 1\)"),
    (lambda: balanced(groups="ab"), r"one label per item, got shape \(\)"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_refused_with_what_can(call: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call()
