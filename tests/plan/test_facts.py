"""Facts about a plan for run files and reports: what they say, and how much of it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.index import Index
from penstock.core.types import Arrangement
from penstock.plan.facts import access_map, find_plan, plan_facts
from penstock.plan.orders import Sequential, Shuffle, Subset, WindowShuffle
from penstock.plan.plan import Plan, Segments

PLAN = Plan(Index.uniform(12, 4), Sequential(), batch_size=5, seed=3, tail="short")


def wrap(loader: Any, times: int) -> Any:
    for _ in range(times):
        loader = SimpleNamespace(loader=loader)
    return loader


def test_the_plan_of_a_loader_is_found_through_three_others() -> None:
    assert find_plan(SimpleNamespace(plan=PLAN)) is PLAN
    segments = Segments(PLAN, 2)
    assert find_plan(SimpleNamespace(segments=segments)) is segments
    assert find_plan(wrap(SimpleNamespace(plan=PLAN), 3)) is PLAN
    assert find_plan(wrap(SimpleNamespace(plan=PLAN), 4)) is None
    assert find_plan(SimpleNamespace(plan="plan", loader=None)) is None


def test_a_loader_of_single_samples_is_asked_for_its_plan_of_batches_of_one() -> None:
    asked = []

    def plan(batch_size: int) -> Any:
        asked.append(batch_size)
        return PLAN

    assert find_plan(SimpleNamespace(plan=plan, get_state=None)) is PLAN
    assert asked == [1]
    assert find_plan(SimpleNamespace(plan=plan)) is None
    assert find_plan(SimpleNamespace(plan=lambda batch_size: "no plan", get_state=None)) is None


def test_facts_are_those_of_the_plan() -> None:
    facts = plan_facts(PLAN)
    mixing = PLAN.mixing()
    assert facts == {
        "description": "Sequential() over 12 items, batches of 5, seed 3",
        "identity": {name: str(value) for name, value in PLAN.identity().items()},
        "seed": 3,
        "batch_size": 5,
        "n_batches": 3,
        "order_hash": PLAN.order_hash(),
        "mixing": {
            "score": mixing.score,
            "read_amplification": mixing.read_amplification,
            "batches_measured": mixing.batches_measured,
        },
        "access": {
            "positions": list(range(12)),
            "items": list(range(12)),
            "n_positions": 12,
            "n_items": 12,
            "borders_of": "chunks",
            "n_parts": 3,
            "borders": [4, 8],
        },
    }


def test_the_description_names_segments_and_lanes_if_there_are_several() -> None:
    plan = Plan(Index.uniform(1200, 4), Shuffle(), batch_size=5, lanes=2)
    assert plan_facts(Segments(plan, 1500))["description"] == (
        "Shuffle() over 1,200 items, batches of 5, seed 0, 2 lanes, in segments of 1,500 batches"
    )


@dataclass(frozen=True)
class Wordy:
    """An order whose repr has many letters."""

    n_letters: int

    def __repr__(self) -> str:
        return "w" * self.n_letters

    def check(self, index: Index) -> None: ...

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        return Arrangement(len(index), items=lambda positions: positions)


def test_a_description_has_at_most_400_letters() -> None:
    facts = plan_facts(Plan(Index.uniform(12), Wordy(401), batch_size=5))
    assert facts["description"] == facts["identity"]["order"] == "w" * 400


def test_orders_of_up_to_four_million_items_are_hashed() -> None:
    # A subset, so that the hash visits few of them.
    plan, larger = (Plan(Index.uniform(n, 1000), Subset(4), batch_size=2) for n in (4_000_000, 4_000_001))
    assert plan_facts(plan)["order_hash"] == plan.order_hash()
    assert plan_facts(larger)["order_hash"] is None


def test_of_many_batches_four_hundred_are_mapped_evenly_spaced_with_six_items_each() -> None:
    plan = Plan(Index.uniform(401 * 50), Sequential(), batch_size=50)
    found = access_map(plan)
    batches = np.unique(np.array(found["positions"]) // 50)
    assert len(batches) == 400
    assert (batches[0], batches[-1]) == (0, 400)
    assert found["positions"][:12] == [0, 9, 19, 29, 39, 49, 50, 59, 69, 79, 89, 99]
    assert len(found["positions"]) == 2400
    assert found["items"] == found["positions"]
    assert found["n_positions"] == 401 * 50


@pytest.mark.parametrize(("lanes", "tail"), [(1, "short"), (4, "short"), (1, "pad"), (4, "pad"), (1, "drop")])
def test_positions_are_as_many_as_items_are_delivered(lanes: int, tail: Any) -> None:
    plan = Plan(Index.uniform(3832, 100), Shuffle(), batch_size=32, lanes=lanes, tail=tail)
    draws = list(plan.epoch(0).draws(range(plan.epoch(0).n_batches)))
    delivered = sum(len(draw) if draw.mask is None else int(draw.mask.sum()) for draw in draws)
    assert access_map(plan)["n_positions"] == delivered
    assert delivered == (3808 if tail == "drop" else 3832)


def test_a_batch_of_padding_alone_has_no_place_on_the_map() -> None:
    found = access_map(Plan(Index.uniform(4), Sequential(), batch_size=3, tail="pad"))
    assert (found["positions"], found["items"], found["n_positions"]) == ([0, 1, 2, 3], [0, 1, 2, 3], 4)
    nothing = access_map(Plan(Index.uniform(0), Sequential(), batch_size=3))
    assert (nothing["positions"], nothing["n_positions"], nothing["n_parts"], nothing["borders"]) == ([], 0, 1, None)


@pytest.mark.parametrize(("n_chunks", "plotted"), [(1, True), (2, True), (200, True), (201, False)])
def test_up_to_two_hundred_parts_have_borders(n_chunks: int, plotted: bool) -> None:
    found = access_map(Plan(Index.uniform(3 * n_chunks, 3), Sequential(), batch_size=3))
    assert found["n_parts"] == n_chunks
    assert found["borders"] == (list(range(3, 3 * n_chunks, 3)) if plotted else None)


def test_borders_are_those_of_shards_if_the_source_has_shards_and_of_its_chunks_otherwise() -> None:
    shards = SimpleNamespace(manifest=SimpleNamespace(shards=[SimpleNamespace(n_items=n) for n in (5, 4, 3)]))
    found = access_map(PLAN, shards)
    assert (found["borders_of"], found["n_parts"], found["borders"]) == ("shards", 3, [5, 9])
    whole = SimpleNamespace(index=Index.uniform(12, 6))
    found = access_map(Plan(Index.uniform(12, 4).select(range(0, 12, 2)), WindowShuffle(1), 2), whole)
    assert (found["borders_of"], found["n_parts"], found["borders"], found["n_items"]) == ("chunks", 2, [6], 12)
    found = access_map(Plan(Index.uniform(12, 4).select([1, 5, 6, 11]), WindowShuffle(1), 2))
    assert found["borders"] == [5, 11]
