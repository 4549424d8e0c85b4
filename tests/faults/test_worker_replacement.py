"""One dead worker is replaced by one, at once, however workers start; the others keep running."""

import logging
import multiprocessing as mp
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_cases import some_cases
from penstock_test_parts import delivered_items, eventually, numbered_source, planned_items, run_isolated, to_plain
from penstock_test_processes import read_answer, start_script
from torch.utils.data import Dataset, get_worker_info

from penstock import ArraySource, DatasetSource, Loader, Plan, RunOptions, Sequential, Shuffle, WindowShuffle
from penstock.plan import Listed
from tests.faults.loaders import FORK, PERSISTENT, PLAN, make_loader, workers

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
LONG_SOURCE = numbered_source(4000)
LONG_PLAN = Plan(LONG_SOURCE.index, Shuffle(), batch_size=4, seed=7)  # 1000 batches
METHODS = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])


def pids_by_name() -> dict[str, int]:
    return {worker.name: worker.pid for worker in workers()}


def replace_one(method: str) -> tuple[list[Any], dict[str, int], dict[str, int]]:
    """Kill one of three workers in the middle; return the batches, and the workers before and after."""
    mp.set_forkserver_preload(["penstock.feed.loader"])
    options = RunOptions(executor="processes", start_method=method)  # type: ignore[arg-type]
    found, before, after = [], {}, {}
    with Loader(LONG_SOURCE, LONG_PLAN, num_workers=3, options=options) as loader:
        for batch in loader:
            found.append(to_plain(batch)["x"])
            if len(found) == 5:
                before = pids_by_name()
                os.kill(before["penstock-worker-1"], signal.SIGKILL)
            after = pids_by_name()
    return found, before, after


@some_cases(2)
@METHODS
def test_one_dead_worker_is_replaced_by_one_and_the_others_keep_running(method: str) -> None:
    found, before, after = run_isolated(replace_one, method)
    assert found == planned_items(LONG_PLAN)
    assert set(before) == {f"penstock-worker-{n}" for n in range(3)}
    assert {name: pid for name, pid in after.items() if name != "penstock-worker-1"} == {
        name: pid for name, pid in before.items() if name != "penstock-worker-1"
    }
    assert after.get("penstock-worker-1") != before["penstock-worker-1"]


class WaitFor:
    """Waits at one item until a file is there: for the death of the other worker to be noticed meanwhile."""

    def __init__(self, item: int, path: str) -> None:
        self.item, self.path = item, path

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item:
            eventually(Path(self.path).exists)
        return item


def kill_while_the_consumer_waits(path: str) -> list[list[int]]:
    """Kill the idle worker while the other one is waited for, in a thread that is not the main one."""
    found: list[list[int]] = []

    def consume() -> None:
        with make_loader(FORK, transform=WaitFor(planned_items(PLAN)[0][0], path)) as loader:
            found.extend(batch["x"].tolist() for batch in loader)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert eventually(lambda: len(workers()) == 2)
    old = pids_by_name()
    os.kill(old["penstock-worker-1"], signal.SIGKILL)
    replaced = eventually(lambda: pids_by_name().get("penstock-worker-1") not in (None, old["penstock-worker-1"]))
    Path(path).touch()
    consumer.join()
    assert replaced, "the dead worker was replaced before any batch came"
    return found


def test_a_death_is_an_event_also_outside_the_main_thread(tmp_path: Path) -> None:
    assert run_isolated(kill_while_the_consumer_waits, str(tmp_path / "go")) == planned_items(PLAN)


class KillingSource:
    """An array source whose process dies when one item is read."""

    def __init__(self, n_items: int, bad: int) -> None:
        self._source, self._bad, self._home = numbered_source(n_items), bad, os.getpid()
        self.index, self.fields = self._source.index, self._source.fields

    def read(self, span: Any, out: Any = None) -> Any:
        self._die_if(span.start <= self._bad < span.stop)
        return self._source.read(span, out)

    def take(self, items: Any, out: Any = None) -> Any:
        self._die_if(bool((items == self._bad).any()))
        return self._source.take(items, out)

    def close(self) -> None:
        self._source.close()

    def _die_if(self, now: bool) -> None:
        if now and os.getpid() != self._home:
            os.kill(os.getpid(), signal.SIGSEGV)


def find_the_killer(bad: int) -> tuple[list[list[int]], str]:
    source = KillingSource(600, bad)
    plan = Plan(source.index, Sequential(), batch_size=2)
    found: list[list[int]] = []
    with Loader(source, plan, num_workers=2, options=FORK) as loader:
        try:
            found.extend(batch["x"].tolist() for batch in loader)
        except Exception as error:
            return found, str(error)
    return found, ""


@pytest.mark.parametrize("bad", [0, 131, 599])
def test_of_batches_that_are_read_together_the_one_that_kills_is_found(bad: int) -> None:
    found, error = run_isolated(find_the_killer, bad)
    assert found == [[n, n + 1] for n in range(0, bad - bad % 2, 2)]
    assert f"killed by SIGSEGV while making batch {bad // 2} of epoch 0 (items [{bad - bad % 2}, " in error


def kill_at_random(method: str, kills: int, seed: int) -> tuple[list[Any], int]:
    """Kill random workers at random moments; return the batches of a few epochs, and how many died."""
    logging.disable()
    mp.set_forkserver_preload(["penstock.feed.loader"])
    options = RunOptions(executor="processes", start_method=method, persistent=True)  # type: ignore[arg-type]
    rng, found, died = random.Random(seed), [], 0
    with Loader(LONG_SOURCE, LONG_PLAN, num_workers=2, options=options) as loader:
        while died < kills:
            for batch in loader:
                found.append(to_plain(batch)["x"])
                if died < kills and rng.random() < 0.02 and workers():
                    victim = rng.choice(workers())
                    os.kill(victim.pid, rng.choice([signal.SIGKILL, signal.SIGSEGV]))
                    died += 1
    assert eventually(lambda: not workers())
    return found, died


@some_cases(2)
@METHODS
def test_random_deaths_of_workers_change_nothing(method: str) -> None:
    kills = 200 if SOAK else {"fork": 40}.get(method, 3)
    found, died = run_isolated(kill_at_random, method, kills, 7, seconds=1500 if SOAK else 200)
    epochs = len(found) // 1000
    assert died == kills
    assert found == [items for epoch in range(epochs) for items in planned_items(LONG_PLAN, epoch)]


def test_lanes_keep_their_workers_so_that_no_window_is_read_twice() -> None:
    source = ArraySource({"x": np.arange(256)}, chunk_items=8)
    plan = Plan(source.index, WindowShuffle(4), batch_size=4, lanes=2)
    with Loader(source, plan, num_workers=2, options=FORK) as loader:
        assert delivered_items(loader) == planned_items(plan)


# -- what runs in a worker ---------------------------------------------------------------------------------------------


class Informed(Dataset[dict[str, Any]]):
    """Items that say which worker made them, and what torch says about it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return {"item": item, "id": info.id, "of": info.num_workers, "seed": info.seed, "torch": torch.initial_seed()}


def test_torch_knows_which_worker_it_is() -> None:
    source = DatasetSource(Informed())
    plan = Plan(source.index, Sequential(), batch_size=2)
    with Loader(source, plan, num_workers=2, options=FORK) as loader:
        batches = list(loader)
    assert get_worker_info() is None
    seeds = {int(batch["id"][0]): int(batch["seed"][0]) for batch in batches}
    assert sorted(seeds) == [0, 1]
    assert seeds[0] != seeds[1]
    for batch in batches:
        assert batch["of"].tolist() == [2, 2]
        assert batch["torch"].tolist() == batch["seed"].tolist(), "code that seeds by torch.initial_seed() still works"


IN_MAIN = r"""
import json, sys, traceback
import numpy as np
from torch.utils.data import Dataset
from penstock import DatasetSource, Loader, OptionError, Plan, RunOptions, Sequential

namespace = {"__name__": "__main__", "Dataset": Dataset}
main = sys.modules["__main__"]
main.__spec__ = None
if sys.argv[1] == "notebook":
    del main.__file__
else:
    main.__file__ = "<stdin>"
exec("class DS(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): return i", namespace)
main.DS = namespace["DS"]

if __name__ == "__main__":
    source = DatasetSource(main.DS())
    plan = Plan(source.index, Sequential(), batch_size=2)
    said = ""
    try:
        options = RunOptions(executor="processes", start_method="spawn")
        list(Loader(source, plan, num_workers=2, options=options))
    except OptionError as error:
        said = str(error)
    print(json.dumps(said))
"""


@pytest.mark.parametrize("kind", ["notebook", "stdin"])
def test_a_dataset_of_a_notebook_is_named_if_workers_cannot_import_it(tmp_path: Path, kind: str) -> None:
    with start_script(tmp_path, IN_MAIN, kind) as process:
        said = read_answer(process)
    assert "start_method='spawn'" in said
    assert "DS is defined in __main__, which workers cannot import" in said
    assert "start_method='fork' or executor='threads'" in said


UNGUARDED = """
import numpy as np
from penstock import ArraySource, Loader, Plan, RunOptions, Sequential, WorkerError

source = ArraySource({"x": np.arange(8)})
plan = Plan(source.index, Sequential(), batch_size=2)
options = RunOptions(executor="processes", start_method="spawn")
try:
    list(Loader(source, plan, num_workers=1, options=options))
except WorkerError as error:
    print(error)
"""


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path: Path) -> None:
    with start_script(tmp_path, UNGUARDED) as process:
        out, err = process.communicate(timeout=300)
    assert "exited with code 1 while it started" in out
    assert "`if __name__ == '__main__':`" in out
    assert len(re.findall("Traceback", err)) <= 2, "once, and not for every worker that is tried"


# -- ending ------------------------------------------------------------------------------------------------------------


def close_while_waiting(path: str) -> tuple[str, float]:
    """Close the loader in another thread while this one waits for a batch that does not come."""
    loader = make_loader(FORK, 1, transform=WaitFor(planned_items(PLAN)[0][0], path))
    timer = threading.Timer(0.3, loader.close)
    timer.start()
    began = time.monotonic()
    try:
        next(iter(loader))
    except Exception as error:
        return repr(error), time.monotonic() - began
    finally:
        timer.join()
    return "", 0.0


def test_closing_wakes_a_consumer_that_waits(tmp_path: Path) -> None:
    said, seconds = run_isolated(close_while_waiting, str(tmp_path / "never"))
    assert "closed" in said
    assert seconds < 120


def leave_early_and_begin_again(turns: int) -> list[Any]:
    found = []
    with make_loader(PERSISTENT) as loader:
        for _ in range(turns):
            pids = None
            for count, batch in enumerate(loader):
                found.append(batch["x"].tolist())
                pids = pids or pids_by_name()
                if count == 2:
                    break
    return found


def test_leaving_early_many_times_loses_no_memory_and_no_batch() -> None:
    found = run_isolated(leave_early_and_begin_again, 30)
    assert found == [items for epoch in range(30) for items in planned_items(PLAN, epoch)[:3]]


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_a_kept_label_keeps_no_batch(options: RunOptions) -> None:
    """Labels are copied out of the shared memory, which is free for the next batch."""
    n_items = 64
    source = ArraySource({"x": np.arange(n_items * 200_000).reshape(n_items, 200_000), "label": np.arange(n_items)})
    plan = Plan(source.index, Shuffle(), batch_size=2)
    with Loader(source, plan, num_workers=1, options=options) as loader:
        labels, addresses = [], set()
        for batch in loader:
            labels.append(batch["label"])
            addresses.add(batch["x"].data_ptr())
            del batch
    assert [label.tolist() for label in labels] == planned_items(plan)
    assert len(addresses) <= 6, "32 batches lie in the few slots of the ring"


def say_much(items: list[Any]) -> dict[str, Any]:
    return {"x": [int(item["x"]) for item in items], "text": "x" * 3_000_000}


def change_the_plan_while_workers_answer(prefetch: int) -> list[Any]:
    """Leave an epoch while workers have long answers to send, and give them a plan that no pipe holds."""
    options = RunOptions(executor="processes", start_method="fork", persistent=True, prefetch=prefetch)
    source = numbered_source(80_000)
    found = []
    with Loader(source, Plan(source.index, Shuffle(), 2), collate=say_much, num_workers=2, options=options) as loader:
        for turn in range(3):
            order = np.random.default_rng(turn).permutation(80_000)
            loader.set_plan(Plan(source.index, Listed(order), batch_size=2))
            for batch, _ in zip(loader, range(3), strict=False):
                found.append(batch["x"] == order[2 * (len(found) % 3) :][:2].tolist())
    return found


@pytest.mark.parametrize("prefetch", [2, 300])
def test_long_answers_and_a_long_plan_do_not_block_each_other(prefetch: int) -> None:
    assert run_isolated(change_the_plan_while_workers_answer, prefetch) == [True] * 9


class ClosesItsPipe:
    """Closes all files of its worker at one item, the first time only, and lives on."""

    def __init__(self, item: int, path: str) -> None:
        self.item, self.path = item, path

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item and not Path(self.path).exists():
            Path(self.path).touch()
            os.closerange(3, 256)
            threading.Event().wait(60)
        return item


def close_the_pipe(path: str) -> list[list[int]]:
    with make_loader(FORK, transform=ClosesItsPipe(planned_items(PLAN)[3][0], path)) as loader:
        return delivered_items(loader)


def test_a_worker_that_closes_its_pipe_and_lives_on_is_replaced(tmp_path: Path) -> None:
    assert run_isolated(close_the_pipe, str(tmp_path / "closed")) == planned_items(PLAN)
