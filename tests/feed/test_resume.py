"""Loaders of every kind of plan stop and resume anywhere, with other workers, ranks and batch sizes."""

from collections.abc import Callable
from typing import Any

import pytest
from penstock_loader_suite import LoaderCase, LoaderSuite
from penstock_test_parts import numbered_source, with_noise

from penstock import Loader, Plan, RunOptions, Segments, Sequential, Shuffle, WindowShuffle

WORKERS = (
    {"num_workers": 3, "options": RunOptions(executor="threads", prefetch=3)},
    {"num_workers": 2, "options": RunOptions(executor="processes", start_method="fork", persistent=True)},
)
FOREIGN = {
    "the seed changed from 2 to 1": {"seed": 2},
    "the order changed": {"order": Sequential()},
    "the number of items changed from 26 to": {"items": 26},
}


def loader_of(plan: Callable[..., Any], n_items: int) -> Callable[..., Loader]:
    def make(*, items: int = n_items, seed: int = 1, batch_size: int = 2, order: Any = None, **options: Any) -> Loader:
        source = numbered_source(items, chunk=4)
        orders = {} if order is None else {"order": order}
        return Loader(source, plan(source.index, batch_size, seed, **orders), transform=with_noise, **options)

    return make


def shuffled(index: Any, batch_size: int, seed: int, order: Any = Shuffle()) -> Plan:  # noqa: B008
    return Plan(index, order, batch_size, seed, tail="short")


def lanes(index: Any, batch_size: int, seed: int, order: Any = WindowShuffle(2)) -> Plan:  # noqa: B008
    return Plan(index, order, batch_size, seed, lanes=2, tail="pad")


def cycling(index: Any, batch_size: int, seed: int, order: Any = WindowShuffle(2)) -> Segments:  # noqa: B008
    return Segments(Plan(index, order, batch_size, seed), 12)


def of_a_pass(index: Any, batch_size: int, seed: int, order: Any = Shuffle()) -> Segments:  # noqa: B008
    return Segments(Plan(index, order, batch_size, seed, tail="short"), 12)


CASES: dict[str, tuple[Callable[..., Any], int, dict[str, Any]]] = {
    "a plan": (shuffled, 24, {"batch_size": "any"}),
    "windows and lanes": (lanes, 24, {}),
    "segments of a stream": (cycling, 30, {"batch_size": "refused"}),
    "segments of a pass": (of_a_pass, 72, {"batch_size": "refused"}),
}


class TestLoader(LoaderSuite):
    @pytest.fixture(params=CASES)
    def case(self, request: pytest.FixtureRequest) -> LoaderCase:
        plan, items, options = CASES[request.param]
        return LoaderCase(loader_of(plan, items), FOREIGN, WORKERS, ranks=True, set_epoch=Loader.set_epoch, **options)


def test_an_epoch_that_was_left_is_reported_once_with_the_way_to_resume_it(caplog: pytest.LogCaptureFixture) -> None:
    source = numbered_source(24)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan) as loader:
        for left in (True, False):
            assert next(iter(loader))["x"].tolist() == [0, 1, 2, 3]
            if left:
                loader.load_state_dict(loader.state_dict())
                assert next(iter(loader))["x"].tolist() == [4, 5, 6, 7]
                assert not caplog.records
                loader.set_epoch(0)
        for epoch in (1, 2):
            next(iter(loader))
            assert loader.epoch == epoch
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Epoch 0 was left after 1 of 6 batches: the other 5 are left behind, and epoch 1 begins" in caplog.text
