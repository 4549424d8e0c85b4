"""What every loader does: stops anywhere, resumes with others, refuses what is not its own, ends. See `loaders`."""

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import own_threads, worlds

from penstock import LoaderError, ResumeError
from tests.suites.loaders import LOADERS, Batch, LoaderCase

EPOCHS = 2  # of which every position is resumed
ODD_COUNTS = (-1, "1", 1.5, None, True, 10**30, 1 << 62, 10**5000, float("nan"), [1], np.arange(2), torch.arange(2))


def state_of(loader: Any) -> Any:
    return loader.state_dict() if hasattr(loader, "state_dict") else loader.get_state()


def load(loader: Any, state: Any) -> None:
    (loader.load_state_dict if hasattr(loader, "load_state_dict") else loader.set_state)(state)


def _close(case: LoaderCase, loader: Any) -> None:
    if case.ends is not None:
        getattr(loader, case.ends)()


def _take(case: LoaderCase, loader: Any, count: int) -> list[Batch]:
    """Return the next `count` batches, through ends of epochs."""
    found: list[Batch] = []
    empty = 0
    while len(found) < count and empty < 2:  # the rest of an epoch may be empty, the next one is not
        before = len(found)
        found += islice(case.epoch(loader), count - len(found))
        empty = empty + 1 if len(found) == before else 0
    return found


def _walk(case: LoaderCase, loader: Any) -> tuple[list[Batch], list[tuple[int, Any]]]:
    """Return the batches of some epochs, and the state after each batch and each epoch."""
    batches: list[Batch] = []
    states = [(0, state_of(loader))]
    for _ in range(EPOCHS):
        for batch in case.epoch(loader):
            batches.append(batch)
            states.append((len(batches), state_of(loader)))
        states.append((len(batches), state_of(loader)))
    return batches, states


@pytest.fixture(params=LOADERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoaderCase:
    return LOADERS[request.param](tmp_path_factory.getbasetemp())


@pytest.fixture
def make(case: LoaderCase) -> Iterator[Callable[..., Any]]:
    """Return a function that makes loaders, which are closed after the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Any:
            loader = case.make(**options)
            stack.callback(_close, case, loader)
            return loader

        yield make


@pytest.fixture
def epochs(case: LoaderCase, make: Callable[..., Any]) -> list[list[Batch]]:
    """Return epochs that were never stopped: those of which every position is resumed, and one more."""
    loader = make()
    found = [list(case.epoch(loader)) for _ in range(EPOCHS + 1)]
    assert all(found)
    assert not any(one == other for one, other in pairwise(found))
    return found


# -- the same loader -----------------------------------------------------------------------------------------------


def test_stopping_after_any_batch_and_resuming_gives_the_rest(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    whole = list(chain(*epochs))
    batches, states = _walk(case, make())
    assert batches == list(chain(*epochs[:EPOCHS]))
    for done, state in states:
        resumed = make()
        load(resumed, json.loads(json.dumps(state)))
        assert state_of(resumed) == state
        assert _take(case, resumed, len(whole) - done) == whole[done:], f"after {done} batches"
        _close(case, resumed)


def test_a_state_is_small_plain_json(case: LoaderCase, make: Callable[..., Any]) -> None:
    for _, state in _walk(case, make())[1]:
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 1000


def test_a_state_can_be_loaded_twice_also_in_a_used_loader(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    if not case.rewinds:
        pytest.skip("its sampler cannot return to an earlier epoch")
    whole = list(chain(*epochs))
    states = _walk(case, make())[1]
    used = make()
    _take(case, used, len(epochs[0]) + 1)
    for done, state in (states[len(epochs[0]) // 2], states[-2], states[1]):
        for _ in range(2):
            load(used, state)
            load(used, state)
            assert _take(case, used, len(whole) - done) == whole[done:]


def test_after_a_break_comes_the_rest_or_the_next_epoch(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    for options in ({}, *case.workers):
        loader, stop = make(**options), len(epochs[0]) // 2
        assert list(islice(case.epoch(loader), stop)) == epochs[0][:stop]
        rest = case.resumes_after_break or not stop
        assert list(case.epoch(loader)) == (epochs[0][stop:] if rest else epochs[1])
        assert list(case.epoch(loader)) == epochs[1 if rest else 2]


def test_an_epoch_that_is_set_is_yielded_from_its_start(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    if case.set_epoch is None:
        pytest.skip("its epoch cannot be set")
    loader = make()
    for epoch in (2, 0, 1):
        case.set_epoch(loader, epoch)
        assert list(case.epoch(loader)) == epochs[epoch]


def test_the_length_is_that_of_an_epoch_and_what_remains_is_counted_down(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    if not case.counts_batches:
        pytest.skip("it has no length in batches")
    loader = make()
    lengths = []
    for left, _ in zip(reversed(range(len(epochs[0]))), case.epoch(loader), strict=True):
        lengths.append(len(loader))
        assert getattr(loader, "remaining", left) == left
    assert lengths == [len(epochs[0])] * len(epochs[0])
    for _, state in _walk(case, make())[1]:
        resumed = make()
        load(resumed, state)
        left = getattr(resumed, "remaining", None)
        # Without a rest, an iteration that resumes after a break begins the next epoch.
        assert left is None or left == len(list(case.epoch(resumed))) or (left == 0 and case.resumes_after_break)
        _close(case, resumed)


# -- another loader of the same data -------------------------------------------------------------------------------


def test_other_workers_deliver_and_resume_the_same(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    whole, (batches, states) = list(chain(*epochs)), _walk(case, make())
    n = len(epochs[0])
    for options in case.workers:
        # States count what was delivered, however far workers are ahead.
        assert _walk(case, make(**options)) == (batches, states)
        resumed = make(**options)
        for done, state in (states[n // 2], states[n], states[n + 2]):
            if case.rewinds or done == n // 2:
                load(resumed, state)
                assert _take(case, resumed, len(whole) - done) == whole[done:]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_other_ranks_resume_the_same(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]], before: int, after: int
) -> None:
    if not case.ranks:
        pytest.skip("it has one rank")
    done = 6
    first = [make(world=world) for world in worlds(before)]
    found = [list(islice(case.epoch(loader), done // before)) for loader in first]
    states = [state_of(loader) for loader in first]
    assert states == states[:1] * before
    second = [make(world=world) for world in worlds(after)]
    for loader in second:
        load(loader, json.loads(json.dumps(states[0])))
    rest = [list(case.epoch(loader)) for loader in second]
    assert list(chain(*zip(*found, strict=True))) == epochs[0][:done]
    assert list(chain(*zip(*rest, strict=True))) == epochs[0][done:]


def test_another_batch_size_resumes_at_the_next_item_or_is_refused(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    if case.batch_size is None:
        pytest.skip("it has one batch size")
    items = list(chain(*chain(*epochs[:EPOCHS])))
    for done, state in _walk(case, make())[1][: len(epochs[0]) + 2]:
        resumed = make(batch_size=3)
        if done and case.batch_size == "refused":
            with pytest.raises(ResumeError, match="batch_size changed from 2 to 3"):
                load(resumed, state)
            continue
        load(resumed, state)
        found = items[: 2 * done]
        while len(found) < len(items):
            found += chain(*case.epoch(resumed))
        if case.batch_size == "any":
            assert found == items, f"after {done} batches"
        _close(case, resumed)


# -- states of others ----------------------------------------------------------------------------------------------


def test_a_state_of_another_loader_is_refused_and_changes_nothing(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    for words, options in case.foreign.items():
        other, loader = make(**options), make()
        next(case.epoch(other))
        batches = case.epoch(loader)
        found = [next(batches)]
        state = state_of(loader)
        with pytest.raises(ResumeError, match=words):
            load(loader, state_of(other))
        assert state_of(loader) == state
        assert found + list(batches) == epochs[0]


def test_a_damaged_state_is_refused_and_changes_nothing(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    loader = make()
    batches = case.epoch(loader)
    found = [next(batches)]
    state = state_of(loader)
    keys = case.damageable or list(state)
    damaged: list[Any] = [{}, [], None, "state", {**state, "version": 99}]
    damaged += [{name: value for name, value in state.items() if name != key} for key in keys]
    counts = [key for key in keys if isinstance(state[key], int)]
    damaged += [{**state, key: value} for key in counts for value in ODD_COUNTS]
    damaged += [10**5000, {name: np.arange(2) for name in state}, dict.fromkeys(state, "\ud800")]
    damaged += [{**state, key: value} for key in keys if key not in counts for value in ODD_COUNTS]
    for wrong in damaged:
        with pytest.raises(ResumeError):
            load(loader, wrong)
    assert state_of(loader) == state
    assert found + list(batches) == epochs[0]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_it_is_ended_twice_in_the_middle_leaves_no_thread_and_keeps_its_state(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    threads = own_threads()
    for options in ({}, *case.workers):
        loader = make(**options)
        stop = len(epochs[0]) // 2
        batches = case.epoch(loader)
        assert list(islice(batches, stop)) == epochs[0][:stop]
        state = state_of(loader)
        for _ in range(2):
            _close(case, loader)
        assert case.ends is None or own_threads() == threads
        assert state_of(loader) == state or case.reopens
        if case.reopens or case.ends is None:
            load(loader, state)
            assert _take(case, loader, 1) == list(chain(*epochs))[stop : stop + 1]
            _close(case, loader)
        else:
            with pytest.raises(LoaderError, match="closed"):
                next(batches)
            with pytest.raises(LoaderError, match=r"closed\. To resume, make a new one and load this one's state"):
                next(case.epoch(loader))
        before_the_start = make(**options)
        _close(case, before_the_start)


def test_a_pickled_one_goes_on_where_it_stood_or_pickling_is_refused(
    case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
) -> None:
    for stop in (0, len(epochs[0]) // 2):
        loader = make()
        assert list(islice(case.epoch(loader), stop)) == epochs[0][:stop]
        if not case.pickles:
            with pytest.raises((LoaderError, TypeError, AttributeError), match="pickle"):
                pickle.dumps(loader)
            continue
        copied = pickle.loads(pickle.dumps(loader))
        assert state_of(copied) == state_of(loader)
        assert _take(case, copied, 3) == list(chain(*epochs))[stop : stop + 3]
        _close(case, copied)
