"""Descriptions of an order: in words, as a hash, and by how well it mixes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.core.types import Arrangement
from penstock.plan.balanced import Balanced
from penstock.plan.inspect import Mixing
from penstock.plan.lengths.near import Bucketed
from penstock.plan.orders import RandomChunks, Sequential, Shuffle, Subset, WindowShuffle
from penstock.plan.plan import Plan, Segments

CHUNKED = Index.uniform(20_000, 50)


def test_a_batch_of_items_taken_directly_is_explained() -> None:
    plan = Plan(Index.uniform(50, 5), Sequential(), batch_size=10, tail="drop")
    assert plan.explain(1, epoch=3) == (
        "Batch 1 of 5 in epoch 3: 10 items, 10, 11, 12, 13, 14, 15, 16, 17, …. They are taken directly from the source."
    )


def test_all_items_are_listed_with_their_keys_if_that_is_asked_for() -> None:
    index = Index.uniform(50, 5)
    keys = [f"trial {number}" for number in range(50)]
    for plan in (Plan(index, Shuffle(), batch_size=10, seed=3), Bucketed(index, np.arange(50) + 1, 10, seed=3)):
        items = plan.epoch(1).draw(2).items.tolist()
        assert len(items) == 10
        listed = ", ".join(f"{item} (trial {item})" for item in items)
        assert f": 10 items, {listed}. " in plan.explain(2, epoch=1, most_items=None, keys=keys)
        assert f": 10 items, {', '.join(map(str, items[:3]))}, …. " in plan.explain(2, epoch=1, most_items=3)


@pytest.mark.parametrize("batch", range(7))
def test_a_batch_of_rows_of_windows_is_explained_with_its_items_windows_and_padding(batch: int) -> None:
    plan = Plan(Index.uniform(50, 5), WindowShuffle(2), batch_size=8, tail="pad")
    draw = plan.epoch(3).draw(batch)
    words = plan.explain(batch, epoch=3)
    assert f"Batch {batch} of 7 in epoch 3: 8 items, {', '.join(map(str, draw.items.tolist()))}." in words
    for part in draw.parts:
        spans = ", ".join(f"{start}–{stop - 1}" for start, stop in part.window.spans.tolist())
        assert (
            f"{len(part.rows)} of them are rows of window {part.window.number} of pass 3, which holds items {spans}."
        ) in words
    assert ("6 of them pad the batch (mask False)." in words) == (batch == 6)
    assert ("pad the batch" in words) == (batch == 6)


def test_a_window_of_many_spans_is_cut_short_in_words() -> None:
    words = Plan(Index.uniform(400, 1), WindowShuffle(100), batch_size=8, tail="drop").explain(0)
    spans = (
        Plan(Index.uniform(400, 1), WindowShuffle(100), batch_size=8, tail="drop")
        .epoch(0)
        .draw(0)
        .parts[0]
        .window.spans
    )
    assert f"and {len(spans) - 4} more spans." in words


def test_four_spans_and_eight_items_are_shown_in_full_and_more_are_cut_short() -> None:
    index = Index.uniform(16, 4).select([0, 4, 8, 12])  # selected items of four chunks do not touch
    words = Plan(index, WindowShuffle(4), batch_size=4, tail="drop").explain(0)
    assert "which holds items 0–0, 4–4, 8–8, 12–12." in words
    index = Index.uniform(20, 4).select([0, 4, 8, 12, 16])
    words = Plan(index, WindowShuffle(5), batch_size=4, tail="drop").explain(0)
    assert "which holds items 0–0, 4–4, 8–8, 12–12 and 1 more spans." in words
    plan = Plan(Index.uniform(20), Sequential(), batch_size=8, tail="drop")
    assert plan.explain(0).startswith("Batch 0 of 2 in epoch 0: 8 items, 0, 1, 2, 3, 4, 5, 6, 7. They")
    assert (
        replace(plan, batch_size=9)
        .explain(0)
        .startswith("Batch 0 of 2 in epoch 0: 9 items, 0, 1, 2, 3, 4, 5, 6, 7, …. They")
    )


def test_a_batch_over_the_end_of_a_pass_is_explained() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), length=2)
    assert stream.explain(0, epoch=1).endswith(
        "4 items, 8, 9, 0, 1. They are taken directly from the source. The batch crosses the end of pass 0."
    )
    assert "reaches over" not in stream.explain(1, epoch=1)


@pytest.mark.parametrize(
    "order",
    [Sequential(), Shuffle(), WindowShuffle(2), Subset(20), RandomChunks(4), Balanced([0, 1, 1] * 10)],
    ids=lambda order: type(order).__name__,
)
def test_equal_plans_have_equal_hashes_and_other_epochs_seeds_and_batch_sizes_others(order: Any) -> None:
    plan = Plan(Index.uniform(30, 5), order, batch_size=4, seed=7, tail="pad")
    assert plan.order_hash(1) == replace(plan, index=Index.uniform(30, 5)).order_hash(1)
    assert plan.order_hash(1) != replace(plan, batch_size=5).order_hash(1)
    if order != Sequential():
        assert plan.order_hash(1) != plan.order_hash(2)
        assert plan.order_hash(1) != replace(plan, seed=8).order_hash(1)


def test_the_hash_changes_with_the_tail_and_the_lanes() -> None:
    plan = Plan(Index.uniform(30, 5), Sequential(), batch_size=4, tail="drop")
    plans = [
        plan,
        replace(plan, tail="short"),
        replace(plan, tail="pad"),
        replace(plan, lanes=2),
        replace(plan, lanes=3),
    ]
    assert len({other.order_hash() for other in plans}) == len(plans)


def test_the_hash_sees_only_what_is_delivered() -> None:
    # The same order out of differently chunked data, and out of a selection that leaves the head.
    plan = Plan(Index.uniform(30, 5), Shuffle(), batch_size=4, tail="drop")
    assert plan.order_hash() == replace(plan, index=Index.from_sizes([10, 20])).order_hash()
    assert plan.order_hash() == replace(plan, index=Index.uniform(90).select(range(30))).order_hash()


@dataclass(frozen=True)
class Listed:
    """A user-defined order of these items."""

    items: tuple[int, ...]

    def check(self, index: Index) -> None:
        assert max(self.items) < len(index)

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        return Arrangement(len(self.items), items=lambda positions: np.array(self.items)[positions])


def test_the_hash_tells_padding_from_items() -> None:
    padded = Plan(Index.uniform(3), Listed((0, 1, 2)), batch_size=4, tail="pad")
    full = Plan(Index.uniform(3), Listed((0, 1, 2, 0)), batch_size=4, tail="pad")
    assert padded.epoch(0).draw(0).items.tolist() == full.epoch(0).draw(0).items.tolist() == [0, 1, 2, 0]
    assert padded.order_hash() != full.order_hash()


def test_the_hash_tells_where_batches_end() -> None:
    hashes = {Plan(Index.uniform(12), Sequential(), size, tail="drop").order_hash() for size in (1, 2, 3, 4, 6, 12)}
    assert len(hashes) == 6


def test_segments_have_hashes_of_their_own() -> None:
    plan = Plan(Index.uniform(30), Shuffle(), batch_size=4, tail="drop")
    stream = Segments(plan, length=3)
    assert len({stream.order_hash(number) for number in range(8)}) == 8
    assert stream.order_hash(5) == Segments(plan, 3).order_hash(5)


@pytest.mark.parametrize("batch_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_storage_order_scores_near_zero_and_an_exact_shuffle_near_one(batch_size: int, seed: int) -> None:
    assert Plan(CHUNKED, Sequential(), batch_size, seed=seed, tail="drop").mixing().score < 0.05
    assert Plan(CHUNKED, Shuffle(), batch_size, seed=seed, tail="drop").mixing().score > 0.9


@pytest.mark.parametrize("batch_size", [16, 64, 256])
def test_a_larger_window_mixes_better_up_to_an_exact_shuffle(batch_size: int) -> None:
    scores = [
        Plan(CHUNKED, WindowShuffle(window), batch_size, tail="drop").mixing().score for window in (1, 4, 16, 64, 400)
    ]
    assert scores == sorted(set(scores))
    assert scores[0] < 0.05
    assert scores[-1] > 0.9


def test_window_shuffle_reads_every_chunk_once_and_a_shuffle_reads_many_for_each_batch() -> None:
    assert Plan(CHUNKED, WindowShuffle(4), batch_size=16, tail="drop").mixing().read_amplification == 1.0
    assert Plan(CHUNKED, Shuffle(), batch_size=16, tail="drop").mixing().read_amplification > 40
    assert Plan(Index.uniform(2000, 1), Shuffle(), batch_size=16, tail="drop").mixing().read_amplification == 1.0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 9), st.data())
def test_one_lane_reads_every_chunk_once_whatever_the_chunks(
    sizes: list[int], batch_size: int, seed: int, data: st.DataObject
) -> None:
    window = data.draw(st.integers(1, len(sizes)))
    plan = Plan(Index.from_sizes(sizes), WindowShuffle(window), batch_size, seed=seed, tail="short")
    assert plan.mixing(max_batches=10**6).read_amplification == 1.0


def test_windows_that_lanes_share_are_counted_for_each() -> None:
    # One window of 100 items, read by each of four lanes.
    plan = Plan(Index.uniform(100, 10), WindowShuffle(10), batch_size=5, lanes=4, tail="drop")
    assert plan.mixing().read_amplification == 4.0
    # Four windows, each the run of one lane.
    plan = Plan(Index.uniform(400, 10), WindowShuffle(10), batch_size=5, lanes=4, tail="drop")
    assert plan.mixing().read_amplification == 1.0


def test_items_that_a_selection_skips_within_a_chunk_are_read_too() -> None:
    # Of every chunk of ten, the first and the sixth: six items are read for two.
    index = Index.uniform(200, 10).select(range(0, 200, 5))
    assert Plan(index, WindowShuffle(2), batch_size=4, tail="drop").mixing().read_amplification == 3.0


def test_mixing_measures_at_most_max_batches() -> None:
    assert Plan(CHUNKED, Shuffle(), batch_size=16, tail="drop").mixing(max_batches=7).batches_measured == 7
    assert Plan(Index.uniform(40), Shuffle(), batch_size=16, tail="drop").mixing().batches_measured == 2


def test_mixing_is_measured_for_segments_too() -> None:
    assert Segments(Plan(CHUNKED, Shuffle(), batch_size=64, tail="drop"), length=200).mixing(epoch=3).score > 0.9
    assert Segments(Plan(CHUNKED, Sequential(), batch_size=64, tail="drop"), length=200).mixing(epoch=3).score < 0.05


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(2), RandomChunks(4)], ids=repr)
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_plan_of_no_batches_has_nothing_to_measure(order: Any, tail: str) -> None:
    plan = Plan(Index.uniform(0), order, batch_size=4, tail=tail)
    assert plan.mixing() == Mixing(0.0, 0.0, 0)
    assert plan.order_hash(0) == plan.order_hash(1)


@pytest.mark.parametrize("items", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_very_little_data_can_be_measured(items: int, batch_size: int) -> None:
    for order in (Sequential(), Shuffle(), WindowShuffle(1)):
        mixing = Plan(Index.uniform(items), order, batch_size, tail="short").mixing()
        assert 0 <= mixing.score <= 1
        assert mixing.read_amplification == 1.0
        assert mixing.batches_measured == -(-items // batch_size)


SCORES = {
    # A batch of one item is judged by its neighbours: from four items on.
    (3, 1, "Shuffle()"): 0.0,
    (4, 1, "Shuffle()"): 1.0,
    (5, 1, "Shuffle()"): 0.25,
    (50, 1, "Shuffle()"): 0.9795918367346939,
    (50, 1, "WindowShuffle(window=2)"): 0.5369897959183674,
    # So is one of more than half of the items.
    (31, 16, "WindowShuffle(window=2)"): 1.0,
    # From two batches on, by one wave over the storage; the more batches, the more waves, up to 16.
    (4, 2, "Shuffle()"): 0.0,
    (33, 16, "WindowShuffle(window=2)"): 0.03109202665611898,
    (40, 16, "WindowShuffle(window=2)"): 0.0539192860759384,
    (400, 16, "WindowShuffle(window=2)"): 0.09446486286718597,
    (1023, 16, "WindowShuffle(window=2)"): 0.17230841582441386,
    (1024, 16, "WindowShuffle(window=2)"): 0.23428164346708075,
    (1024, 16, "Shuffle()"): 0.9611761099828783,
    (20_000, 64, "WindowShuffle(window=2)"): 0.07004307888680096,
    (10, 2, "Shuffle()"): 0.49041754014777866,
    (128, 2, "Shuffle()"): 0.991301428523413,
    (1000, 2, "WindowShuffle(window=2)"): 0.7094965379089131,
}


@pytest.mark.parametrize(("items", "batch_size", "name"), SCORES)
def test_scores_are_what_they_were(items: int, batch_size: int, name: str) -> None:
    order = {"Shuffle()": Shuffle(), "WindowShuffle(window=2)": WindowShuffle(2)}[name]
    plan = Plan(Index.uniform(items, max(1, items // 8)), order, batch_size, tail="drop")
    assert plan.mixing().score == pytest.approx(SCORES[items, batch_size, name], rel=1e-9)


def test_costs_are_what_they_were() -> None:
    index = Index.uniform(300, 7)
    shared = Plan(index, WindowShuffle(5), 4, lanes=3, tail="drop")
    assert shared.mixing().read_amplification == pytest.approx(1.2333333333333334)
    # Four of nine windows, evenly spaced.
    assert replace(shared, lanes=5).mixing(max_batches=4).read_amplification == pytest.approx(1.2777777777777777)
    selected = Plan(index.select(range(0, 300, 3)), WindowShuffle(5), 4, lanes=2, tail="drop")
    assert selected.mixing().read_amplification == pytest.approx(2.14)
    assert replace(selected, order=Shuffle(), lanes=1).mixing().read_amplification == pytest.approx(2.37)
    uneven = Plan(Index.from_sizes([3, 50, 1, 20, 9] * 4), Shuffle(), 10, tail="short")
    assert uneven.mixing().read_amplification == pytest.approx(22.05421686746988)


def test_a_thousand_and_24_batches_of_the_first_epoch_are_measured_by_default() -> None:
    plan = Plan(Index.uniform(2050), Shuffle(), batch_size=2, tail="drop")
    assert plan.mixing() == plan.mixing(0, 1024)
    assert plan.mixing().batches_measured == 1024
    stream = Segments(plan, 1025)
    assert stream.mixing() == stream.mixing(0, 1024)
    assert stream.mixing().batches_measured == 1024
    for one in (plan, stream):
        assert one.order_hash() == one.order_hash(0)
        assert one.explain(3) == one.explain(3, epoch=0)


def test_mixing_prints_its_numbers() -> None:
    assert str(Mixing(0.5, 1.25, 80)) == (
        "mixing 0.50 (0 = storage order, 1 = uniform), reads 1.25x the items it delivers if only whole chunks can "
        "be read; 80 batches measured"
    )
