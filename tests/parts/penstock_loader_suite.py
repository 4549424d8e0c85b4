"""Tests that everything with a position in the data must pass: subclass LoaderSuite and define the cases."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from penstock_test_parts import to_plain, worlds

from penstock import ResumeError

__all__ = ["LoaderCase", "LoaderSuite", "split_items"]

EPOCHS = 2  # of which every position is resumed
Batch = list[Any]


def split_items(batch: Any) -> Batch:
    """Return the items of a batch with all their fields, bit for bit, without padding."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    fields = to_plain(batch)
    kept = fields.pop("mask", None)
    items = [list(values) for values in zip(*fields.values(), strict=True)]
    return items if kept is None else [item for item, keep in zip(items, kept, strict=True) if keep]


def _iterate(loader: Any) -> Iterator[Batch]:
    return (split_items(batch) for batch in loader)


@dataclass(frozen=True)
class LoaderCase:
    """A loader whose epochs have 12 full batches of 2 items, or as many as it can."""

    make: Callable[..., Any]
    """Makes it, at its beginning, with the options of the fields below."""

    foreign: Mapping[str, Mapping[str, Any]]
    """Options of loaders whose states must be refused, by the words of the error."""

    workers: Sequence[Mapping[str, Any]] = ()
    """Options that must not change what is delivered: workers, executors, batches read ahead."""

    ranks: bool = False
    """Whether it takes `world`."""

    batch_size: Literal["any", "refused"] | None = None
    """Whether a state can be resumed with batches of 3; None: it takes no `batch_size`."""

    epoch: Callable[[Any], Iterator[Batch]] = field(default=_iterate)
    """Yields the rest of the current epoch, or the next one."""

    set_epoch: Callable[[Any, int], None] | None = None
    resumes_after_break: bool = False
    """Whether the iteration after a break yields the rest of the epoch; False: the next one."""

    rewinds: bool = True
    """Whether a loader that is further on can return to an earlier state."""

    counts_batches: bool = True
    """Whether `len()` is the number of batches in an epoch."""

    damageable: Sequence[str] = ()
    """Keys without which a state is refused; all if empty."""


ODD_COUNTS = (-1, "1", 1.5, None, True, 10**30, 1 << 62, 10**5000, float("nan"), [1], np.arange(2), torch.arange(2))


def state_of(loader: Any) -> Any:
    return loader.state_dict() if hasattr(loader, "state_dict") else loader.get_state()


def load(loader: Any, state: Any) -> None:
    (loader.load_state_dict if hasattr(loader, "load_state_dict") else loader.set_state)(state)


def _close(loader: Any) -> None:
    for name in ("close", "cleanup", "end_workers"):
        if hasattr(loader, name):
            getattr(loader, name)()


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


class LoaderSuite:
    """Subclasses define the fixture `case`."""

    @pytest.fixture
    def make(self, case: LoaderCase) -> Iterator[Callable[..., Any]]:
        """Return a function that makes loaders, which are closed after the test."""
        with ExitStack() as stack:

            def make(**options: Any) -> Any:
                loader = case.make(**options)
                stack.callback(_close, loader)
                return loader

            yield make

    @pytest.fixture
    def epochs(self, case: LoaderCase, make: Callable[..., Any]) -> list[list[Batch]]:
        """Return epochs that were never stopped: those of which every position is resumed, and one more."""
        loader = make()
        found = [list(case.epoch(loader)) for _ in range(EPOCHS + 1)]
        assert all(found)
        assert not any(one == other for one, other in pairwise(found))
        return found

    # -- the same loader -----------------------------------------------------------------------------------------------

    def test_stopping_after_any_batch_and_resuming_gives_the_rest(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
    ) -> None:
        whole = list(chain(*epochs))
        batches, states = _walk(case, make())
        assert batches == list(chain(*epochs[:EPOCHS]))
        for done, state in states:
            resumed = make()
            load(resumed, json.loads(json.dumps(state)))
            assert state_of(resumed) == state
            assert _take(case, resumed, len(whole) - done) == whole[done:], f"after {done} batches"
            _close(resumed)

    def test_a_state_is_small_plain_json(self, case: LoaderCase, make: Callable[..., Any]) -> None:
        for _, state in _walk(case, make())[1]:
            assert json.loads(json.dumps(state)) == state
            assert len(json.dumps(state)) < 1000

    def test_a_state_can_be_loaded_twice_also_in_a_used_loader(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
    ) -> None:
        loader, stop = make(), len(epochs[0]) // 2
        assert list(islice(case.epoch(loader), stop)) == epochs[0][:stop]
        rest = case.resumes_after_break or not stop
        assert list(case.epoch(loader)) == (epochs[0][stop:] if rest else epochs[1])
        assert list(case.epoch(loader)) == epochs[1 if rest else 2]

    def test_an_epoch_that_is_set_is_yielded_from_its_start(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
    ) -> None:
        if case.set_epoch is None:
            pytest.skip("its epoch cannot be set")
        loader = make()
        for epoch in (2, 0, 1):
            case.set_epoch(loader, epoch)
            assert list(case.epoch(loader)) == epochs[epoch]

    def test_the_length_is_that_of_an_epoch_and_what_remains_is_counted_down(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
            _close(resumed)

    # -- another loader of the same data -------------------------------------------------------------------------------

    def test_other_workers_deliver_and_resume_the_same(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]], before: int, after: int
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
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
            _close(resumed)

    # -- states of others ----------------------------------------------------------------------------------------------

    def test_a_state_of_another_loader_is_refused_and_changes_nothing(
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
        self, case: LoaderCase, make: Callable[..., Any], epochs: list[list[Batch]]
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
