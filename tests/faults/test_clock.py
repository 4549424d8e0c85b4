"""A clock that jumps, and runs within the same second: the same bytes, the same batches, no change unnoticed."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from penstock_test_parts import delivered_items, planned_items

from penstock import DamageError, TarSource
from penstock.shard.verify import verify_shards
from tests.faults.loaders import FORK, PLAN, THREADS, make_loader
from tests.shard.samples import contents, numbers, sample, start_writer, write

YEAR = 365 * 86_400.0
CLOCKS: dict[str, Callable[[int, float], float]] = {
    "stands still": lambda _, now: 1e9,
    "goes back an hour at every look": lambda look, now: now - 3600.0 * look,
    "jumps ahead a year at every look": lambda look, now: now + YEAR * look,
    "is before 1970": lambda look, _: -YEAR + look,
}


@pytest.fixture(params=CLOCKS)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of day, which users and time servers set, be wrong; what counts seconds is not affected."""
    looks, now, real = count(), time.time(), CLOCKS[request.param]
    monkeypatch.setattr(time, "time", lambda: real(next(looks), now))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * real(next(looks), now)))


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_a_dataset_has_the_same_bytes_whatever_the_clock_says(compression: str, tmp_path: Path) -> None:
    write(tmp_path / "before", compression=compression)
    for name, clock in CLOCKS.items():
        looks, now = count(), time.time()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda clock=clock, looks=looks, now=now: clock(next(looks), now))
            write(tmp_path / name, compression=compression)
        assert contents(tmp_path / name) == contents(tmp_path / "before"), name


@pytest.mark.parametrize("when", [0.0, 1e9, 4e9], ids=["1970", "2001", "2096"])
def test_an_unfinished_write_is_resumed_whatever_the_times_of_its_files(when: float, tmp_path: Path) -> None:
    write(tmp_path / "whole")
    writer = start_writer(tmp_path / "set", shard_size=3)
    for number in range(5):
        writer.write(sample(number), None, {"number": number})
    writer.abandon()
    for path in (tmp_path / "set").rglob("*"):
        os.utime(path, (when, when))
    write(tmp_path / "set", resume=True)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("executor", ["threads", "fork"])
def test_a_clock_that_jumps_ends_no_wait_and_changes_no_batch(executor: str) -> None:
    options = replace({"threads": THREADS, "fork": FORK}[executor], timeout_seconds=100.0)
    with make_loader(options) as loader:
        assert delivered_items(loader) == planned_items(PLAN)


def test_datasets_written_within_the_same_second_are_told_apart(tmp_path: Path) -> None:
    """Same names, same sizes, same times: a source that is open notices that its dataset was replaced."""
    folder = tmp_path / "set"
    write(folder)
    source, items = TarSource(folder), np.arange(7)
    assert source.take(items)["x"][:, 0].tolist() == numbers(folder) == items.tolist()
    times = {path: path.stat() for path in folder.iterdir()}
    write(folder, make=lambda number: sample(number + 1))
    for path, status in times.items():
        assert path.stat().st_size == status.st_size or path.suffix == ".json"
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DamageError):
        source.take(items)
    assert verify_shards(folder)[1] == []
    assert numbers(folder) == (items + 1).tolist()
