import threading
import time

import numpy as np
import pytest
from penstock_test_parts import FakeClock, numbered_source

from penstock import Loader, Plan, RunOptions, Sequential, Timings
from penstock.observe import timing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock(100.0)
    monkeypatch.setattr(timing, "time", fake)
    return fake


def test_calls_seconds_bytes_and_the_longest_call_are_added_up() -> None:
    timings = Timings()
    for seconds, nbytes in [(0.5, 100), (2.0, 50), (0.25, 7)]:
        timings.record("read", seconds, nbytes)
    timings.record("wait", 1.0, 0)
    read = timings.stages["read"]
    assert (read.calls, read.seconds, read.max_seconds, read.nbytes) == (3, 2.75, 2.0, 157)
    assert timings.stages["wait"].calls == 1


def test_the_wait_fraction_is_the_time_waited_over_all_the_time(clock: FakeClock) -> None:
    timings = Timings()
    clock.now += 8
    assert timings.wait_fraction == 0
    timings.record("wait", 1.0, 0)
    timings.record("wait", 1.0, 0)
    timings.record("read", 5.0, 0)
    assert timings.wait_fraction == pytest.approx(0.25)
    clock.now += 8
    assert timings.wait_fraction == pytest.approx(0.125)


def test_the_summary_names_every_stage_and_the_wait(clock: FakeClock) -> None:
    timings = Timings()
    clock.now += 4
    timings.record("read", 0.5, 3_000_000)
    timings.record("wait", 1.0, 0)
    said = str(timings).splitlines()
    assert said[0] == "read: 1 calls, 0.500 s, at most 500.0 ms, 3.0 MB"
    assert said[1].startswith("wait: 1 calls, 1.000 s")
    assert said[-1] == "waiting for data: 25.0 % of the time"


def test_no_call_is_lost_between_threads() -> None:
    timings, together = Timings(), threading.Barrier(4)

    def record() -> None:
        together.wait(120)
        for _ in range(500):
            timings.record("read", 1.0, 2)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = timings.stages["read"]
    assert (read.calls, read.seconds, read.nbytes) == (2000, 2000.0, 4000)


@pytest.mark.parametrize("options", [RunOptions(), RunOptions(executor="threads")], ids=["inline", "threads"])
def test_a_slow_source_is_seen_as_waiting_and_a_slow_consumer_is_not(options: RunOptions) -> None:
    source = numbered_source(12)
    plan = Plan(source.index, Sequential(), batch_size=4)
    workers = 1 if options.executor == "threads" else 0
    pause = threading.Event()  # never set: waits on it take as long as they say

    def slow(item: dict[str, np.ndarray], rng: object) -> dict[str, np.ndarray]:
        pause.wait(0.02)
        return item

    waiting, working = Timings(), Timings()
    with Loader(source, plan, transform=slow, num_workers=workers, options=options, observer=waiting) as loader:
        began = time.perf_counter()
        list(loader)
        took = time.perf_counter() - began
    assert waiting.stages["wait"].seconds >= 0.2  # 12 items of 0.02 s; all but the head of the time is waited
    assert waiting.stages["wait"].seconds <= took
    assert waiting.stages["transform"].calls == 3
    with Loader(source, plan, num_workers=workers, options=options, observer=working) as loader:
        for _ in loader:
            pause.wait(0.05)
    assert working.wait_fraction < waiting.wait_fraction
