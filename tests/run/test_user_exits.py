"""StopIteration, GeneratorExit, SystemExit and KeyboardInterrupt of a user's code never end an epoch in silence."""

from typing import Any

import pytest
from penstock_test_parts import numbered_source, planned_items, run_isolated

from penstock import Loader, LoaderError, Plan, RunOptions, Shuffle, WindowShuffle
from penstock.core.protocols import Order

EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "fork": (2, RunOptions(executor="processes", start_method="fork")),
}
ERRORS = [StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt]
PLACES = ["source", "transform", "collate"]
N_ITEMS = 40


class ExitingSource:
    """An array source that raises when an item is read."""

    def __init__(self, kind: type[BaseException], bad: int) -> None:
        self._source, self._kind, self._bad = numbered_source(N_ITEMS, chunk=4), kind, bad
        self.index, self.fields = self._source.index, self._source.fields

    def read(self, span: Any, out: Any = None) -> Any:
        if span.start <= self._bad < span.stop:
            raise self._kind("enough")
        return self._source.read(span, out)

    def take(self, items: Any, out: Any = None) -> Any:
        if (items == self._bad).any():
            raise self._kind("enough")
        return self._source.take(items, out)

    def close(self) -> None:
        self._source.close()


class ExitingTransform:
    def __init__(self, kind: type[BaseException], bad: int) -> None:
        self.kind, self.bad = kind, bad

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.bad:
            raise self.kind("enough")
        return item


class ExitingCollate:
    def __init__(self, kind: type[BaseException], bad: int) -> None:
        self.kind, self.bad = kind, bad

    def __call__(self, items: list[Any]) -> Any:
        if self.bad in [item["x"] for item in items]:
            raise self.kind("enough")
        return {"x": [int(item["x"]) for item in items]}


def run_epoch(
    executor: tuple[int, RunOptions], place: str, kind: type[BaseException], order: Order, n_before: int
) -> tuple[list[list[int]], str, str, list[str], list[int]]:
    """Return the delivered batches, the error, its notes, and the items of the batch that failed."""
    workers, options = executor
    plan = Plan(numbered_source(N_ITEMS, chunk=4).index, order, batch_size=4, seed=3)
    items = planned_items(plan)[n_before]
    source = ExitingSource(kind, items[1]) if place == "source" else numbered_source(N_ITEMS, chunk=4)
    transform = ExitingTransform(kind, items[1]) if place == "transform" else None
    collate = ExitingCollate(kind, items[1]) if place == "collate" else None
    found: list[list[int]] = []
    with Loader(source, plan, transform=transform, collate=collate, num_workers=workers, options=options) as loader:
        try:
            found.extend([int(x) for x in batch["x"]] for batch in loader)
        except BaseException as error:
            return found, type(error).__name__, str(error), getattr(error, "__notes__", []), items
    return found, "the end", "", [], items


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_ends_loops_and_programs_is_named(executor: str, place: str, kind: type[BaseException]) -> None:
    n_before = 3
    found, name, message, notes, items = run_epoch(EXECUTORS[executor], place, kind, Shuffle(), n_before)
    said = "\n".join([message, *notes])
    if kind in (SystemExit, KeyboardInterrupt):
        assert name == kind.__name__
        assert message == "enough"
    else:
        assert name == LoaderError.__name__
        assert message.startswith(f"{kind.__name__} was raised while ")
    plan = Plan(numbered_source(N_ITEMS, chunk=4).index, Shuffle(), batch_size=4, seed=3)
    if place == "source" and kind in (SystemExit, KeyboardInterrupt):
        # Small batches are read together, and a request to end is not tried again to find out which of them it was.
        assert found == planned_items(plan)[: len(found)]
        assert f"while reading batch {len(found)} of epoch 0 (items " in said
        return
    assert found == planned_items(plan)[:n_before]
    assert f"batch {n_before}" in said
    assert (f"item {items[1]} of batch" if place == "transform" else f"(items {items[0]}, {items[1]}, ") in said


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("executor", ["threads", "fork"])
def test_a_window_that_cannot_be_read_is_named(executor: str, kind: type[BaseException]) -> None:
    _, name, message, notes, _ = run_epoch(EXECUTORS[executor], "source", kind, WindowShuffle(2), 3)
    assert name == (kind if kind in (SystemExit, KeyboardInterrupt) else LoaderError).__name__
    assert "while reading batch" in "\n".join([message, *notes])


def exit_in_init(number: int) -> None:
    raise SystemExit(0)


def fail_to_start() -> tuple[str, str]:
    options = RunOptions(executor="processes", start_method="fork", worker_init=exit_in_init)
    plan = Plan(numbered_source(N_ITEMS).index, Shuffle(), batch_size=4)
    with Loader(numbered_source(N_ITEMS), plan, num_workers=2, options=options) as loader:
        try:
            list(loader)
        except Exception as error:
            return str(error), repr(error.__cause__)
    return "", ""


def test_a_worker_that_exits_while_it_starts_is_not_started_again_and_again() -> None:
    message, reason = run_isolated(fail_to_start)
    assert message.startswith("Worker ")
    assert message.endswith(" could not start.")
    assert reason == "SystemExit(0)"
