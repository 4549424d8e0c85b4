"""Worker processes that die, hang or cannot start; several loaders at once; what a loader must leave alone."""

import copyreg
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import (
    ExitAt,
    HangAt,
    Mishap,
    MishapAt,
    OnlyAtHome,
    Pairs,
    delivered,
    eventually,
    isolated,
    mishap_in_the_users_code,
    numbered,
    plain,
    planned,
    with_noise,
)

from penstock import DatasetSource, Loader, OptionError, Plan, RunOptions, Sequential, Shuffle, WorkerError

SOAK = os.environ.get("PENSTOCK_SOAK") == "1"
SOURCE = numbered(80)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=3)  # 20 batches
THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")
PERSISTENT = RunOptions(executor="processes", start_method="fork", persistent=True)
BOTH = pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])


def made(options: RunOptions, workers: int = 2, **others: Any) -> Loader:
    return Loader(SOURCE, PLAN, num_workers=workers, options=options, **others)


def workers() -> list[Any]:
    return [
        child for child in mp.active_children() if child.name.startswith(("ForkProcess", "Process", "SpawnProcess"))
    ]


def kill_a_worker() -> None:
    """Kill one, and stay in the consumer's own code until it is dead: no error may come up here."""
    victim = workers()[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert eventually(lambda: not victim.is_alive())
    # Python runs signal handlers between two instructions of the main thread: there are plenty here.
    assert sum(range(100_000)) == 4_999_950_000


def what_a_death_keeps() -> bool:
    """Let a worker die while the user's own code handles an error; say whether that error is kept."""
    with made(PERSISTENT) as loader:
        batches = iter(loader)
        next(batches)
        error = Mishap("mine", item=0, when=0.0)
        kept = weakref.ref(error)
        try:
            raise error
        except Mishap:
            kill_a_worker()
        del error
        return kept() is not None


def test_a_death_keeps_nothing_of_what_the_user_was_at() -> None:
    assert not isolated(what_a_death_keeps)


# -- a worker dies -----------------------------------------------------------------------------------------------------


def killed_at(options: RunOptions, when: list[int], epochs: int) -> list[Any]:
    found, count = [], 0
    with made(options, transform=with_noise) as loader:
        while loader.epoch < epochs:
            for batch in loader:
                found.append(plain(batch))
                count += 1
                assert loader.state_dict()["batch"] == count - 20 * loader.epoch
                if count in when:
                    kill_a_worker()
    return found


@BOTH
@pytest.mark.parametrize("when", [[1], [7], [5, 6, 12], [19], [20], [21]], ids=str)
def test_a_worker_killed_between_batches_is_replaced_and_nothing_is_lost(options: RunOptions, when: list[int]) -> None:
    with Loader(SOURCE, PLAN, transform=with_noise) as loader:
        whole = [plain(batch) for _ in range(2) for batch in loader]
    assert isolated(killed_at, options, when, 2) == whole


@dataclass(frozen=True)
class DieOnce:
    """Kills its worker at one item, the first time only: a file remembers."""

    item: int
    memory: str
    signal: int = signal.SIGKILL

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item and not Path(self.memory).exists():
            Path(self.memory).touch()
            os.kill(os.getpid(), self.signal)
        return item


def walked(options: RunOptions, transform: Any, workers: int = 2) -> tuple[list[list[int]], str, float]:
    """Return the batches that came, what came after them, and the seconds that took."""
    began, found = time.monotonic(), []
    with made(options, workers, transform=transform) as loader:
        try:
            found.extend(batch["x"].tolist() for batch in loader)
        except BaseException as error:
            return found, "".join(traceback.format_exception_only(error)), time.monotonic() - began
    return found, "the end", time.monotonic() - began


@BOTH
@pytest.mark.parametrize("item_of_batch", [0, 1, 10, 19])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_once_while_it_is_waited_for_is_replaced(
    tmp_path: Any, options: RunOptions, item_of_batch: int, how: int
) -> None:
    dies = DieOnce(planned(PLAN)[item_of_batch][2], str(tmp_path / "died"), how)
    found, end, seconds = isolated(walked, options, dies)
    assert (found, end) == (planned(PLAN), "the end")
    assert seconds < 15


def kept_while_a_worker_died(folder: str, n_workers: int) -> list[str]:
    """Return what went wrong in epochs of which every batch is kept, so that no shared memory is free."""
    wrong = []
    for turn in range(50 if SOAK else 5):
        dies = DieOnce(planned(PLAN)[14 + turn % 5][0], f"{folder}/{turn}", signal.SIGKILL)
        try:
            with made(FORK, n_workers, transform=dies) as loader:
                kept = list(loader)
            if delivered(kept) != planned(PLAN):
                wrong.append(f"turn {turn}: other batches")
        except BaseException as error:
            wrong.append(f"turn {turn}: {error!r}")
    return wrong


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_worker_that_dies_is_replaced_also_where_all_batches_are_kept(tmp_path: Path, n_workers: int) -> None:
    assert isolated(kept_while_a_worker_died, str(tmp_path), n_workers) == []


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("bad", [0, 6, 19])
def test_a_batch_that_kills_every_worker_is_named_after_those_before_it(n_workers: int, bad: int) -> None:
    item = planned(PLAN)[bad][1]
    found, end, seconds = isolated(walked, FORK, ExitAt(item), n_workers)
    assert "WorkerError" in end
    assert f"batch {bad} of epoch 0" in end
    assert str(item) in end
    assert found == planned(PLAN)[:bad]
    assert seconds < 15


def went_on_after_a_worker_error() -> tuple[str, list[list[int]]]:
    with made(FORK, transform=ExitAt(planned(PLAN)[0][1])) as loader:
        batches = iter(loader)
        with pytest.raises(WorkerError):
            next(batches)
        end = next(batches, "end")
        loader.skip(1)
        return end, delivered(loader)


def test_after_a_worker_error_the_end_stays_the_end_and_the_loader_can_go_on_behind_it() -> None:
    end, rest = isolated(went_on_after_a_worker_error)
    assert end == "end"
    assert rest == planned(PLAN)[1:]


def killed_between_epochs() -> list[Any]:
    found = []
    with made(PERSISTENT) as loader:
        for _ in range(3):
            found += delivered(loader)
            kill_a_worker()
    return found


def test_a_persistent_worker_killed_between_epochs_does_not_disturb_the_consumer() -> None:
    assert isolated(killed_between_epochs) == [batch for epoch in range(3) for batch in planned(PLAN, epoch)]


def another_child_dies() -> list[list[int]]:
    found = []
    with made(FORK) as loader:
        for batch in loader:
            found.append(batch["x"].tolist())
            child = mp.get_context("fork").Process(target=os._exit, args=(1,))
            child.start()
            child.join()
    return found


def test_a_child_of_the_users_own_may_die() -> None:
    assert isolated(another_child_dies) == planned(PLAN)


def handlers_around(order: list[int]) -> tuple[bool, bool]:
    list(islice(made(FORK, 1), 1))  # torch puts in its handler once, and for good
    before = signal.getsignal(signal.SIGCHLD)
    loaders = [made(PERSISTENT, 1), made(FORK, 1)]
    walks = [iter(loader) for loader in loaders]
    for walk in walks:
        next(walk)
    for n in order:
        loaders[n].close()
    return signal.getsignal(signal.SIGCHLD) is before, True


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first first", "last first"])
def test_signal_handlers_are_put_back(order: list[int]) -> None:
    assert isolated(handlers_around, order) == (True, True)


# -- a worker hangs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_hanging_transform_is_a_worker_error_that_names_the_items(executor: Any) -> None:
    bad = 5
    method = "fork" if executor == "processes" else None
    options = RunOptions(executor=executor, start_method=method, timeout_seconds=0.4)
    item = planned(PLAN)[bad][1]
    found, end, seconds = isolated(walked, options, HangAt(item, seconds=2))
    assert "WorkerError" in end
    assert f"batch {bad} of epoch 0" in end
    assert str(planned(PLAN)[bad]) in end
    assert found == planned(PLAN)[:bad]
    assert seconds < 12


def slow_consumer(options: RunOptions) -> list[list[int]]:
    found, pause = [], threading.Event()
    with made(options) as loader:
        for batch in islice(loader, 3):
            found.append(batch["x"].tolist())
            pause.wait(0.4)
    return found


def test_a_slow_consumer_is_not_a_hanging_worker() -> None:
    options = RunOptions(executor="processes", start_method="fork", timeout_seconds=0.3)
    assert isolated(slow_consumer, options) == planned(PLAN)[:3]


@dataclass(frozen=True)
class MishapThenHang:
    """Fails at one item while another worker is in the middle of a later one."""

    bad: int
    slow: int
    memory: str

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.slow and not Path(self.memory).exists():
            Path(self.memory).touch()
            threading.Event().wait(1.6)
        if item["x"] == self.bad:
            assert eventually(Path(self.memory).exists), "the other worker is at its item"
            mishap_in_the_users_code("transform", self.bad)
        return item


def seconds_until_it_arrived(options: RunOptions, transform: MishapThenHang) -> tuple[int, float]:
    loader, count = made(options, transform=transform), 0
    try:
        for _ in loader:
            count += 1
    except Mishap as error:
        return count, time.monotonic() - error.when
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_an_error_does_not_wait_for_what_the_other_workers_are_at(tmp_path: Path, options: RunOptions) -> None:
    batches = planned(PLAN)
    transform = MishapThenHang(batches[2][0], batches[3][0], str(tmp_path / "begun"))
    count, seconds = isolated(seconds_until_it_arrived, options, transform)
    assert count == 2
    assert seconds < 1


def went_on_while_an_old_worker_was_writing(options: RunOptions, transform: MishapThenHang) -> list[list[int]]:
    with made(options, transform=transform) as loader:
        try:
            list(loader)
        except Mishap as error:
            held = error
        loader.skip(2)  # behind the bad batch and the slow one
        kept = list(islice(loader, 8))
        threading.Event().wait(1.6)  # until the worker from before has written its batch, wherever that is
        assert held
        return delivered(kept)


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_batches_are_not_written_over_by_workers_from_before_an_error(tmp_path: Path, options: RunOptions) -> None:
    batches = planned(PLAN)
    transform = MishapThenHang(batches[2][0], batches[3][0], str(tmp_path / "begun"))
    assert isolated(went_on_while_an_old_worker_was_writing, options, transform) == batches[4:12]


# -- a worker cannot start ---------------------------------------------------------------------------------------------


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
    with pytest.raises(OptionError, match=rf"(?s){name}.*cannot be pickled.*{method}.*executor='threads'"):
        with Loader(source, plan, num_workers=1, options=options, **others) as loader:
            next(iter(loader))
    assert workers() == []


def test_a_local_transform_is_fine_where_workers_are_forked() -> None:
    secret = 17
    with made(FORK, 1, transform=lambda item, rng: {"x": item["x"] + secret}) as loader:
        assert next(iter(loader))["x"].tolist() == [item + 17 for item in planned(PLAN)[0]]


def walked_by_a_forkserver(transform: Any) -> tuple[list[list[int]], str, float]:
    # It unpickles as a spawned process does, by the same function, and imports torch once and not for each attempt.
    mp.set_forkserver_preload(["penstock.feed.loader"])
    return walked(RunOptions(executor="processes", start_method="forkserver"), transform, 1)


def test_a_transform_that_cannot_be_unpickled_in_a_worker_is_an_error_and_not_a_hang() -> None:
    found, end, seconds = isolated(walked_by_a_forkserver, OnlyAtHome())
    assert found == []
    assert "WorkerError" in end or "FileNotFoundError" in end
    assert seconds < 30


class CannotCross(Exception):  # noqa: N818  # a test looks for this very name
    """An error that cannot be unpickled: it wants two arguments and says one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


def raises_what_cannot_cross(item: Any, rng: Any) -> Any:
    if item["x"] == planned(PLAN)[2][0]:
        raise CannotCross("an electrode", "it is loose")
    return item


def test_an_error_that_cannot_be_pickled_arrives_by_name_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dask, where a test before this one has used it, gives every error that there is a way to be pickled.
    monkeypatch.delitem(copyreg.dispatch_table, CannotCross, raising=False)
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(CannotCross("a", "b")))
    with made(FORK, 1, transform=raises_what_cannot_cross) as loader:
        with pytest.raises(WorkerError) as caught:
            list(loader)
    said = "".join(traceback.format_exception(caught.value))
    assert "CannotCross: an electrode" in said
    assert "raises_what_cannot_cross" in said
    assert "batch 2" in said


# -- several loaders, threads, and what is not a loader's --------------------------------------------------------------


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_two_loaders_side_by_side_do_not_mix(options: RunOptions) -> None:
    other = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=4)
    with made(options) as first, Loader(SOURCE, other, num_workers=2, options=options) as second:
        for epoch in range(2):
            pairs = [(a["x"].tolist(), b["x"].tolist()) for a, b in zip(first, second, strict=True)]
            assert pairs == list(zip(planned(PLAN, epoch), planned(other, epoch), strict=True))


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_a_loader_inside_the_loop_of_another(options: RunOptions) -> None:
    small = Plan(SOURCE.index, Sequential(), batch_size=40)
    with made(options) as outer, Loader(SOURCE, small, num_workers=1, options=options) as inner:
        for n, batch in enumerate(outer):
            assert batch["x"].tolist() == planned(PLAN)[n]
            if n % 7 == 0:
                assert delivered(inner) == planned(small)


def nested_kill(options: RunOptions) -> tuple[list[Any], list[Any]]:
    """Kill a worker of the outer loader while the inner one is waited for."""
    small = Plan(SOURCE.index, Sequential(), batch_size=8)
    outside, inside = [], []
    with made(options) as outer, Loader(SOURCE, small, num_workers=1, options=options) as inner:
        for n, batch in enumerate(outer):
            outside.append(batch["x"].tolist())
            if n == 2:
                victim = workers()[0]
                for other in inner:
                    inside.append(other["x"].tolist())
                    if len(inside) == 3:
                        os.kill(victim.pid, signal.SIGKILL)
    return outside, inside


@BOTH
def test_a_worker_that_dies_is_the_trouble_of_its_own_loader(options: RunOptions) -> None:
    outside, inside = isolated(nested_kill, options)
    assert outside == planned(PLAN)
    assert inside == planned(Plan(SOURCE.index, Sequential(), batch_size=8))


@pytest.mark.parametrize("options", [RunOptions(), THREADS, FORK], ids=["inline", "threads", "fork"])
def test_a_loader_works_inside_a_thread(options: RunOptions) -> None:
    found: list[Any] = []

    def consume() -> None:
        try:
            with made(options, 0 if options.executor == "auto" else 2) as loader:
                for _ in range(2):
                    found.extend(delivered(loader))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert found == planned(PLAN, 0) + planned(PLAN, 1)


def killed_in_a_thread() -> list[Any]:
    """Iterate in a thread, with a worker that is killed; the main thread must not be hit by the news."""
    list(islice(made(FORK, 1), 1))  # torch's handler is in place, as after any loader of the main thread
    found: list[Any] = []

    def consume() -> None:
        try:
            with made(FORK, 1) as loader:
                for n, batch in enumerate(loader):
                    found.append(batch["x"].tolist())
                    if n == 2:
                        os.kill(workers()[0].pid, signal.SIGKILL)
        except BaseException as error:
            found.append(repr(error))

    thread = threading.Thread(target=consume)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
    return found


def test_a_worker_killed_under_a_loader_in_a_thread_is_replaced() -> None:
    assert isolated(killed_in_a_thread) == planned(PLAN)


def closed_elsewhere(options: RunOptions) -> list[str]:
    """Iterate here, close in another thread."""
    loader = made(options)
    batches = iter(loader)
    next(batches)
    outcome: list[str] = []

    def close() -> None:
        try:
            loader.close()
            outcome.append("closed")
        except BaseException as error:
            outcome.append(repr(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join(10)
    return outcome


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_a_loader_can_be_closed_by_another_thread(options: RunOptions) -> None:
    assert isolated(closed_elsewhere, options) == ["closed"]


@pytest.mark.parametrize(
    "options", [RunOptions(), THREADS, FORK, PERSISTENT], ids=["inline", "threads", "fork", "persistent"]
)
def test_random_numbers_of_the_user_are_left_alone(options: RunOptions) -> None:
    import random

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    torch.manual_seed(7)
    before = states()
    with made(options, 0 if options.executor == "auto" else 2, transform=with_noise) as loader:
        for _ in range(2):
            list(loader)
    assert states() == before


def test_workers_do_not_share_torchs_or_numpys_random_numbers() -> None:
    def global_noise(item: Any, rng: Any) -> Any:
        return {"x": item["x"], "torch": torch.rand(()), "numpy": rng.random()}

    with made(FORK, transform=global_noise) as loader:
        batches = list(loader)
    for name in ("torch", "numpy"):
        values = [value for batch in batches for value in batch[name].tolist()]
        assert len(set(values)) == len(values)


def test_closing_takes_no_longer_than_a_read() -> None:
    for options in (THREADS, FORK, PERSISTENT):
        loader = made(options, transform=MishapAt())
        with ExitStack() as stack:
            stack.callback(loader.close)
            batches = iter(loader)
            next(batches)
            began = time.monotonic()
            loader.close()
            assert time.monotonic() - began < 1, f"{options}"
