"""Plans over lengths: budgets, coverage, packing, ranks and resume, whatever the lengths."""

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Bucketed, Cursor, Index, Lengths, OptionError, Packed, PlanError, ResumeError, TokenBudget, World
from penstock.core.types import Draw
from penstock.plan.lengths.near import Budget, Near
from penstock.plan.lengths.packed import Packing
from penstock.plan.plan import Plan

LENGTHS = st.one_of(
    st.lists(st.integers(0, 40), max_size=40),
    st.lists(st.sampled_from([0, 1, 7, 7, 30]), max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
)
TAILS: Any = st.sampled_from(["short", "drop", "pad"])
POLICIES: Any = st.sampled_from(["truncate", "drop"])
WIDTHS = st.sampled_from([None, 1, 3, 50])
SOME = [5, 9, 1, 0, 12, 7, 7, 3, 2, 11, 4, 8, 6, 10, 1, 2, 9, 5, 3, 12]


@st.composite
def plans(draw: st.DrawFn, kinds: tuple[str, ...] = ("bucketed", "budget", "packed", "split")) -> Any:
    lengths = np.array(draw(LENGTHS), np.int64)
    index, seed, tail = Index.uniform(len(lengths)), draw(st.integers(0, 2**40)), draw(TAILS)
    kind = draw(st.sampled_from(kinds))
    if kind == "bucketed":
        return Bucketed(index, lengths, draw(st.integers(1, 9)), seed, draw(WIDTHS), tail)
    if kind == "budget":
        multiple, tokens = draw(st.sampled_from([1, 4])), draw(st.integers(4, 99))
        most = draw(st.sampled_from([None, 1, 5]))
        return TokenBudget(index, lengths, tokens, most, seed, draw(WIDTHS), draw(POLICIES), multiple, tail)
    if kind == "packed":
        row = draw(st.sampled_from([1, 13, 50, 5001]))
        return Packed(index, lengths, row, draw(st.integers(1, 4)), seed, too_long=draw(POLICIES), tail=tail)
    few = np.minimum(lengths, 200)
    return Packed(index, few, draw(st.integers(1, 50)), draw(st.integers(1, 4)), seed, split=True, tail=tail)


def draws_of(plan: Any, epoch: int = 0) -> list[Draw]:
    return list(plan.epoch(epoch).draws(range(plan.n_batches)))


def items_of(draw: Draw) -> list[int]:
    """Return the items of a draw, without those that only pad it."""
    found: list[int] = draw.items.tolist() if draw.mask is None else draw.items[draw.mask].tolist()
    return found


def limit_of(plan: Any) -> int:
    if isinstance(plan.batch_size, Packing):
        return plan.batch_size.length
    return (
        plan.batch_size.max_tokens - plan.batch_size.max_tokens % plan.batch_size.pad_to_multiple_of
        if isinstance(plan.batch_size, Budget)
        else 1 << 32
    )


# -- what batches hold -------------------------------------------------------------------------------------------------


@given(plan=plans(), epoch=st.integers(0, 50))
def test_every_item_comes_once_per_epoch_except_those_that_are_dropped(plan: Any, epoch: int) -> None:
    drawn = draws_of(plan, epoch)
    assert len(drawn) == plan.n_batches == plan.epoch(epoch).n_batches
    found = Counter(item for draw in drawn for item in items_of(draw))
    lengths, dropped = plan.batch_size.lengths.values, getattr(plan.batch_size, "too_long", "") == "drop"
    kept = [item for item in range(len(lengths)) if not (dropped and lengths[item] > limit_of(plan))]
    assert plan.n_dropped == len(lengths) - len(kept)
    if getattr(plan.batch_size, "split", False):
        assert plan.tail == "drop" or set(found) == set(kept)
        return
    assert max(found.values(), default=1) == 1
    assert set(found) <= set(kept)
    if plan.tail == "drop" and isinstance(plan.batch_size, Packing):
        full = replace(plan, tail="short")
        assert len(draws_of(full, epoch)) - len(drawn) in (0, 1)
    else:
        assert len(kept) - len(found) == (plan.epoch(epoch).left_out if plan.tail == "drop" else 0)
        assert plan.epoch(epoch).left_out < plan.passes.batch_size


@given(plan=plans(), epoch=st.integers(0, 3))
def test_no_batch_exceeds_its_budget_after_padding_nor_a_row_its_length(plan: Any, epoch: int) -> None:
    lengths = plan.batch_size.lengths.values.astype(np.int64)
    for draw in draws_of(plan, epoch):
        real = np.minimum(lengths[draw.items], limit_of(plan))
        if isinstance(plan.batch_size, Near):
            assert 1 <= len(draw) <= plan.passes.batch_size
            assert draw.rows is None
        elif isinstance(plan.batch_size, Budget):
            longest = -(-int(real.max()) // plan.batch_size.pad_to_multiple_of) * plan.batch_size.pad_to_multiple_of
            assert len(draw) * longest <= plan.batch_size.max_tokens
            assert len(draw) <= (plan.batch_size.max_items or plan.batch_size.max_tokens)
            assert draw.rows is not None
            assert draw.rows.counts.tolist() == real.tolist()
        else:
            assert draw.rows is not None
            filled = np.bincount(draw.rows.numbers, draw.rows.counts)
            assert filled.max() <= plan.batch_size.length
            assert len(filled) <= plan.passes.batch_size


@given(plan=plans(("packed", "split")))
def test_the_tokens_of_split_and_of_whole_items_come_exactly_once(plan: Any) -> None:
    if plan.tail == "drop":
        return
    lengths, seen = plan.batch_size.lengths.values, Counter[tuple[int, int]]()
    for draw in draws_of(plan):
        assert draw.rows is not None
        valid = np.ones(len(draw), np.bool_) if draw.mask is None else draw.mask
        pieces = zip(draw.items, draw.rows.begins, draw.rows.counts, draw.rows.lengths, valid, strict=True)
        for item, begin, count, length, is_valid in pieces:
            assert length == lengths[item]
            if is_valid:
                seen.update((item, token) for token in range(begin, begin + count))
    kept = {
        item
        for item, length in enumerate(lengths)
        if plan.batch_size.too_long != "drop" or length <= plan.batch_size.length
    }
    cut = 1 << 32 if plan.batch_size.split else plan.batch_size.length
    assert seen == {(item, token): 1 for item in kept for token in range(min(int(lengths[item]), cut))}


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), room=st.integers(40, 90))
def test_packed_rows_are_those_of_best_fit_decreasing(lengths: list[int], room: int) -> None:
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [place for place in free if place >= length]
        free.append((min(fits) if fits else room) - length)
        if fits:
            free.remove(min(fits))
    assert Packed(Index.uniform(len(lengths)), lengths, room, 1).length == len(free)


def test_lengths_in_a_batch_are_near_and_batches_are_shuffled_anew_in_every_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    plan = Bucketed(Index.uniform(5000), lengths, batch_size=10, seed=3)
    drawn = draws_of(plan)
    assert all(len(draw) == 10 for draw in drawn)
    assert np.mean([np.ptp(lengths[draw.items]) <= lengths[draw.items].max() / 8 for draw in drawn]) > 0.9
    longest = [int(lengths[draw.items].max()) for draw in drawn]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.2
    partners = [{frozenset(draw.items.tolist()) for draw in draws_of(plan, epoch)} for epoch in (0, 1)]
    assert len(partners[0] & partners[1]) < 50
    mixing = plan.mixing()
    assert mixing.score > 0.9
    assert mixing.padding is not None
    assert 0.01 < mixing.padding < 1 / 16
    assert "of the batches is padding" in str(mixing)
    assert plan.explain(3).endswith("% padding.")


def test_an_item_too_long_is_named_cut_or_dropped_and_bad_arguments_are_refused() -> None:
    index = Index.uniform(20)
    with pytest.raises(PlanError, match=r"at most max_tokens=9 tokens, got 12 for item 4 \(4 of 20 items are longer\)"):
        TokenBudget(index, SOME, 9)
    with pytest.raises(PlanError, match=r"at most length=11 tokens, got 12 for item 4"):
        Packed(index, SOME, 11, 2)
    with pytest.raises(PlanError, match="got 12 for item 4"):
        TokenBudget(index.select([4, 5]), SOME, 9)
    assert TokenBudget(index, SOME, 9, too_long="drop").n_dropped == 4
    assert Packed(index, SOME, 9, 2, too_long="drop").n_dropped == 4
    for wrong, message in (
        (lambda: TokenBudget(index, SOME, 0), "max_tokens must be an integer >= 1, got 0"),
        (lambda: TokenBudget(index, SOME, 20, 0), "max_items must be an integer >= 1, got 0"),
        (lambda: TokenBudget(index, SOME, 20, pad_to_multiple_of=32), "max_tokens must be an integer >= 32, got 20"),
        (lambda: TokenBudget(index, SOME, 20, too_long="cut"), "too_long must be one of 'error', 'truncate', 'drop'"),  # type: ignore[arg-type]
        (lambda: Bucketed(index, SOME, 4, width=0), "width must be an integer >= 1, got 0"),
        (lambda: Bucketed(index, SOME, 4, tail="long"), "tail must be one of"),  # type: ignore[arg-type]
        (lambda: Packed(index, SOME, 8, 2, split=True, too_long="drop"), "With split=True no item is too long"),
        (lambda: Bucketed(index, SOME[:7], 4), "one length for each of the 20 items of the source, got 7"),
        (lambda: Bucketed(index, [-1, *SOME[1:]], 4), "A length must be >= 0 and < 2\\^32, got -1 for item 0"),
        (lambda: Bucketed(index, np.ones(20), 4), "lengths must be a 1-D array of integers, got float64"),
        (lambda: Bucketed(20, SOME, 4), "index must be an Index"),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionError, match=message):
            wrong()


# -- ranks and resume --------------------------------------------------------------------------------------------------


@given(plan=plans(), size=st.integers(1, 5), start=st.integers(0, 9))
def test_all_ranks_have_equal_steps_within_the_budget_and_together_the_rest_of_the_epoch(
    plan: Any, size: int, start: int
) -> None:
    epoch, begin = plan.epoch(1), min(start, plan.n_batches)
    if plan.tail == "short" and is_refused(plan, size):
        return
    lengths = plan.batch_size.lengths.values
    shares = [epoch.share(World(rank, size), begin) for rank in range(size)]
    assert len({share.n_steps for share in shares}) == 1
    drawn = [draw for share in shares for draw in share.draws()]
    assert all(len(draw) for draw in drawn)
    left = epoch.draws(range(begin, plan.n_batches))
    expected = Counter(item for draw in left for item in items_of(draw))
    found = Counter(item for draw in drawn for item in items_of(draw))
    assert found <= expected
    if plan.tail == "pad" or (plan.tail == "short" and not begin):
        assert not shares[0].left_out
    if not shares[0].left_out:
        assert found == expected
    if isinstance(plan.batch_size, Budget):
        tokens = np.minimum(lengths, limit_of(plan)).astype(np.int64)
        padded = [-(-int(tokens[draw.items].max()) // plan.batch_size.pad_to_multiple_of) for draw in drawn]
        sizes = [
            len(draw) * longest * plan.batch_size.pad_to_multiple_of
            for draw, longest in zip(drawn, padded, strict=True)
        ]
        assert max(sizes, default=0) <= plan.batch_size.max_tokens
    for step, whole in enumerate(shares[0].draws()):
        assert shares[0].draw(step).items.tolist() == whole.items.tolist()


def is_refused(plan: Any, size: int) -> bool:
    """Say whether ranks cannot share the epochs of a plan; that is so for all epochs or for none."""
    refused = set()
    for epoch in range(4):
        try:
            plan.epoch(epoch).share(World(0, size))
            refused.add(False)
        except PlanError:
            refused.add(True)
    (found,) = refused
    return found


@pytest.mark.parametrize(
    ("lengths", "size", "refused"),
    [
        ([4] * 5, 2, True),  # the last batch has one item in every epoch
        ([4] * 6, 2, False),
        ([1] * 12 + [4], 3, True),  # of batches of 4, 4, 4 and 1 items, the last one of some epoch has one
        ([1] * 12 + [4], 2, False),
        ([1] * 12, 5, False),
    ],
)
def test_a_budget_that_ranks_cannot_share_is_refused(lengths: list[int], size: int, refused: bool) -> None:
    plan = TokenBudget(Index.uniform(len(lengths)), lengths, max_tokens=4)
    assert is_refused(plan, size) is refused
    if refused:
        with pytest.raises(PlanError, match=r"Use tail='pad' \(masked\), tail='drop', or fewer ranks"):
            plan.epoch(0).share(World(0, size))


@given(plan=plans(), epoch=st.integers(0, 9))
def test_any_batch_is_worked_out_alone_and_a_pickled_plan_is_the_same(plan: Any, epoch: int) -> None:
    assert isinstance(plan, Plan)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.identity() == plan.identity()
    for batch, draw in enumerate(draws_of(plan, epoch)):
        alone = again.epoch(epoch).draw(batch)
        assert alone.items.tolist() == draw.items.tolist()
        assert items_of(alone) == items_of(draw)
        state = Cursor(epoch, batch).state(plan)
        assert Cursor.restore(state, again) == Cursor(epoch, batch)


def test_a_state_of_other_budgets_or_lengths_is_refused() -> None:
    index = Index.uniform(20)
    state = Cursor(1, 2).state(TokenBudget(index, SOME, 24, 4, 7))
    for other in (
        TokenBudget(index, SOME, 25, 4, 7),
        TokenBudget(index, SOME, 24, 5, 7),
        TokenBudget(index, SOME, 24, 4, 7, width=2),
        TokenBudget(index, SOME, 24, 4, 7, tail="drop"),
        TokenBudget(index, SOME[::-1], 24, 4, 7),
        Bucketed(index, SOME, 4, 7),
        Packed(index, SOME, 24, 4, 7),
    ):
        with pytest.raises(
            ResumeError, match=r"the order changed from .TokenBudget\(max_tokens=24, max_items=4, lengths="
        ):
            Cursor.restore(state, other)


@pytest.mark.parametrize("chosen", [[1, 3, 4, 8, 19], range(20)])
def test_lengths_of_a_source_serve_a_selection_of_it(chosen: Any) -> None:
    index = Index.uniform(20).select(chosen)
    plan = TokenBudget(index, SOME, max_tokens=24, seed=5)
    drawn = draws_of(plan)
    assert sorted(item for draw in drawn for item in draw.items.tolist()) == list(chosen)
    assert all(draw.rows is not None and draw.rows.lengths.tolist() == [SOME[i] for i in draw.items] for draw in drawn)
    assert plan.passes.count_tokens(drawn[0])[0] == sum(SOME[item] for item in drawn[0].items)
    bucketed = Bucketed(index, SOME, 2, seed=5)
    first = bucketed.epoch(0).draw(0)
    assert bucketed.passes.count_tokens(first)[0] == sum(SOME[item] for item in first.items)


# -- golden ------------------------------------------------------------------------------------------------------------

_INDEX = Index.uniform(20)
GOLDEN = [
    (Bucketed(_INDEX, SOME, 4, 42), [[15, 7, 10, 18], [6, 16, 11, 1], [4, 13, 9, 19]], "a1c8e15e164483d0"),
    (TokenBudget(_INDEX, SOME, 24, 5, 42, 3), [[1, 16], [8, 18, 17, 14], [4, 13]], "c8061af19e2ee033"),
    (Packed(_INDEX, SOME, 16, 2, 42), [[4, 7, 2, 19, 10], [16, 6, 1, 5], [13, 12, 11, 17, 18]], "e3fba7d4783939e1"),
    (
        Packed(_INDEX, SOME, 16, 2, 42, split=True),
        [[19, 4, 1, 13], [3, 2, 14, 15, 8, 18, 7, 10, 10, 0, 17, 12], [12, 6, 5, 11, 13, 9, 19]],
        "f4536e61e39761fa",
    ),
]


@pytest.mark.parametrize(("plan", "first", "digest"), GOLDEN, ids=lambda value: str(value)[:12])
def test_an_order_is_the_same_for_ever(plan: Any, first: Any, digest: str) -> None:
    assert ([draw.items.tolist() for draw in draws_of(plan)[:3]], plan.order_hash(3)) == (first, digest)


def test_lengths_sort_by_length_then_by_number_at_any_size() -> None:
    for top in (1, 3000, 70_000, 2**32 - 1):
        values = np.random.default_rng(top).integers(0, top, 200_000, np.uint32, endpoint=True)
        lengths = Lengths(values)
        assert (lengths.sort == np.argsort(values, kind="stable")).all()
        found, counts = np.unique(values, return_counts=True)
        assert (lengths.table.values == found).all()
        assert (lengths.table.counts == counts).all()
