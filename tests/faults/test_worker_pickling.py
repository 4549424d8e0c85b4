"""Objects that cannot be pickled, on the way to a worker process or back, are named; nothing hangs."""

import copyreg
import multiprocessing as mp
import pickle
import traceback
from typing import Any

import pytest
from penstock_test_parts import OnlyAtHome, Pairs, planned_items, run_isolated

from penstock import DatasetSource, Loader, OptionError, Plan, RunOptions, Sequential, WorkerError
from tests.faults.loaders import FORK, PLAN, SOURCE, make_loader, run_epoch, workers


class Unpicklable(Pairs):
    def __reduce__(self) -> Any:
        raise TypeError("it holds an open file")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("name", "source", "others"),
    [
        ("transform", SOURCE, {"transform": lambda item, rng: item}),
        ("collate", SOURCE, {"collate": lambda items: items}),
        ("source", DatasetSource(Unpicklable(80)), {}),
    ],
    ids=["transform", "collate", "source"],
)
def test_what_cannot_be_pickled_is_named_before_any_worker_starts(
    method: Any, name: str, source: Any, others: dict[str, Any]
) -> None:
    options = RunOptions(executor="processes", start_method=method)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with pytest.raises(OptionError, match=rf"(?s){method}.*{name}.*cannot be pickled.*executor='threads'"):
        with Loader(source, plan, num_workers=1, options=options, **others) as loader:
            next(iter(loader))
    assert workers() == []


def test_a_local_transform_works_if_workers_are_forked() -> None:
    secret = 17
    with make_loader(FORK, 1, transform=lambda item, rng: {"x": item["x"] + secret}) as loader:
        assert next(iter(loader))["x"].tolist() == [item + 17 for item in planned_items(PLAN)[0]]


def run_epoch_with_a_forkserver(transform: Any) -> tuple[list[list[int]], str, float]:
    # It unpickles as a spawned process does, by the same function, and imports torch once and not for each attempt.
    mp.set_forkserver_preload(["penstock.feed.loader"])
    return run_epoch(RunOptions(executor="processes", start_method="forkserver"), transform, 1)


def test_a_transform_that_cannot_be_unpickled_in_a_worker_is_an_error_and_not_a_hang() -> None:
    found, end, seconds = run_isolated(run_epoch_with_a_forkserver, OnlyAtHome())
    assert found == []
    assert "WorkerError" in end or "FileNotFoundError" in end
    assert seconds < 90  # torch looks after the children of a server every five seconds


class CannotCross(Exception):  # noqa: N818  # a test looks for this very name
    """An error that cannot be unpickled: it wants two arguments and says one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


def raises_what_cannot_cross(item: Any, rng: Any) -> Any:
    if item["x"] == planned_items(PLAN)[2][0]:
        raise CannotCross("an electrode", "it is loose")
    return item


def test_an_error_that_cannot_be_pickled_arrives_by_name_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dask, where a test before this one has used it, gives every error that there is a way to be pickled.
    monkeypatch.delitem(copyreg.dispatch_table, CannotCross, raising=False)
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(CannotCross("a", "b")))
    with make_loader(FORK, 1, transform=raises_what_cannot_cross) as loader:
        with pytest.raises(WorkerError) as caught:
            list(loader)
    said = "".join(traceback.format_exception(caught.value))
    assert "CannotCross: an electrode" in said
    assert "raises_what_cannot_cross" in said
    assert "batch 2" in said
