"""The layout of shards changes nothing but the bytes on disk: order, batches, resuming, workers and ranks."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_test_parts import planned_items

from penstock import Loader, Plan, ResumeError, RunOptions, Shuffle
from tests.laws.shards import LAYOUTS, Stored, make_source, sample_of
from tests.laws.strategies import partitioning_order
from tests.suites.loaders import split_items

PACKED: tuple[Stored, ...] = ("columns", "mixed")
THREADS = RunOptions(executor="threads", prefetch=3)


def item_of(number: int) -> list[Any]:
    """Return an item as it must be delivered, without what metadata say of its place."""
    sample = sample_of(number)
    return [number, sample["tokens"].tolist(), sample["note"], number, f"rat {number % 3}"]


def items_of(batch: Any) -> list[list[Any]]:
    return [[*fields, about["trial"], about["file"]] for *fields, about in split_items(batch)]


# -- the general laws of loaders ---------------------------------------------------------------------------------------


def loader_of(stored: Stored, order: Any) -> Callable[..., Loader]:
    def make(
        *,
        items: int = 24,
        seed: int = 1,
        batch_size: int = 2,
        changed: Any = None,
        layout: Stored = stored,
        **more: Any,
    ) -> Loader:
        source = make_source(layout, items, 9)
        return Loader(source, Plan(source.index, changed or order, batch_size, seed, tail="short"), **more)

    return make


# -- both layouts ------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    index = make_source("samples", 46, 9).index
    return {
        "order": draw(partitioning_order(index)),
        "batch_size": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 99)),
        "lanes": draw(st.integers(1, 3)),
        "tail": draw(st.sampled_from(["drop", "short", "pad"])),
    }


@few_cases
@given(plans(), st.sampled_from(LAYOUTS), st.integers(0, 2), st.booleans())
def test_every_layout_delivers_the_items_of_the_plan(
    how: dict[str, Any], stored: Stored, workers: int, with_fixed_alone: bool
) -> None:
    source = make_source(stored, 46, 9, ["x"] if with_fixed_alone else None)
    plan = Plan(source.index, **how)
    options = THREADS if workers else RunOptions()
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        for epoch in range(2):
            wanted = planned_items(plan, epoch)
            batches = list(loader)
            assert [batch["x"].tolist() for batch in batches] == wanted
            if not with_fixed_alone:
                for batch in batches:
                    real = batch["x"][batch["mask"]] if "mask" in batch else batch["x"]
                    assert items_of(batch) == [item_of(number) for number in real.tolist()]


@pytest.mark.parametrize("stored", PACKED)
def test_a_state_of_another_layout_is_refused_and_its_place_is_reached_by_skipping(stored: Stored) -> None:
    """The fingerprint stands for the stored bytes, and these differ; the order does not depend on it."""
    make = loader_of("samples", Shuffle())
    with make() as loader:
        whole = [[items_of(batch) for batch in loader] for _ in range(2)]
    with make() as before:
        assert [items_of(batch) for batch in islice(before, 5)] == whole[0][:5]
        state = before.state_dict()
    with make(layout=stored) as loader:
        with pytest.raises(ResumeError, match="the data"):
            loader.load_state_dict(state)
        loader.set_epoch(state["epoch"])
        loader.skip(state["batch"])
        assert [items_of(batch) for batch in loader] == whole[0][5:]
        assert [items_of(batch) for batch in loader] == whole[1]
