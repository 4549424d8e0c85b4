"""Bad items are replaced within a budget and listed once; order and resume stay exact for every executor."""

import json
import resource
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from penstock_test_parts import run_at_once, run_isolated
from penstock_test_shards import (
    ALL,
    ITEM_BYTES,
    N_ITEMS,
    RUNS,
    SECOND,
    damage_of,
    facts,
    first_values,
    flip,
    read_quarantine,
)

from penstock import Loader, Plan, Shuffle, TarSource
from penstock.core.errors import DamageError, WriteError

originals = penstock_test_shards.originals
folder = penstock_test_shards.folder


# -- the budget --------------------------------------------------------------------------------------------------------


def test_more_bad_items_than_the_budget_are_an_error(folder: Path) -> None:
    for name in ("shard_000000.tar", SECOND):
        flip(folder / name, 5)  # items 0 and 2
    for budget in (0, 1):
        source = TarSource(folder, on_error="substitute", max_bad_items=budget)
        error = damage_of(source)
        assert f"max_bad_items={budget}" in str(error)
        (folder / "quarantine.jsonl").unlink(missing_ok=True)
    found = facts(TarSource(folder, on_error="substitute", max_bad_items=2).take(ALL))
    assert [found[n] for n in (1, 3, 4, 5)] == [1, 3, 4, 5]
    assert sorted(read_quarantine(folder)) == [(0, "shard_000000.tar"), (2, SECOND)]


def test_the_budget_counts_each_item_once_and_over_processes(folder: Path) -> None:
    flip(folder / SECOND, 5)
    for _ in range(3):
        source = TarSource(folder, on_error="substitute", max_bad_items=1)
        for _ in range(3):
            source.take(ALL)
    assert read_quarantine(folder) == [(2, SECOND)]
    flip(folder / SECOND, ITEM_BYTES + 5)
    assert "max_bad_items=1" in str(damage_of(TarSource(folder, on_error="substitute", max_bad_items=1), [3]))


def test_without_a_healthy_item_there_is_no_substitute(folder: Path) -> None:
    for number in range(3):
        (folder / f"shard_{number:06d}.tar").write_bytes(b"")
    assert "no healthy item" in str(damage_of(TarSource(folder, on_error="substitute"), [0]))


def test_a_quarantine_of_another_dataset_does_not_count(folder: Path) -> None:
    flip(folder / SECOND, 5)
    (folder / "quarantine.jsonl").write_text(
        json.dumps({"item": 0, "shard": "a.tar", "reason": "b", "fingerprint": "c"}) + "\n"
    )
    assert facts(TarSource(folder, on_error="substitute", max_bad_items=1).take(ALL))[0] == 0
    assert (2, SECOND) in read_quarantine(folder)


@pytest.mark.parametrize("rubbish", ['{"item": 2, "sha', '{"item": 2, "sha\n', "\0\0\0", "[1, 2]}\n", "{}\n"])
def test_a_truncated_quarantine_file_is_tolerated(rubbish: str, folder: Path) -> None:
    flip(folder / SECOND, 5)
    (folder / "quarantine.jsonl").write_text(rubbish)
    for _ in range(2):
        found = facts(TarSource(folder, on_error="substitute", max_bad_items=1).take(ALL))
        assert found[:2] + found[3:] == [0, 1, 3, 4, 5]


def test_an_item_that_is_healthy_again_is_delivered_again(folder: Path) -> None:
    source = TarSource(folder, on_error="substitute")
    flip(folder / SECOND, 5)
    assert facts(source.take(ALL))[2] != 2
    flip(folder / SECOND, 5)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))


# -- order and resume with substitutes ---------------------------------------------------------------------------------


def loader_of(folder: Path, run: str, **options: Any) -> Loader:
    source = TarSource(folder, fields=["x"], on_error="substitute", **options)
    workers, run_options = RUNS[run]
    plan = Plan(source.index, Shuffle(), batch_size=2, seed=7)
    return Loader(source, plan, num_workers=workers, options=run_options)


@pytest.mark.parametrize("kind", ["none", "xz"])
def test_order_and_resume_are_exact_with_substitutes(kind: str, originals: Path, tmp_path: Path) -> None:
    shutil.copytree(originals / kind, tmp_path / "set")
    folder = tmp_path / "set"
    with loader_of(folder, "inline") as loader:
        healthy = [first_values(loader) for _ in range(2)]
    size = (folder / SECOND).stat().st_size
    flip(folder / SECOND, 5 if kind == "none" else size // 2)
    bad = {2} if kind == "none" else {2, 3}
    expected: list[list[list[int]]] = []
    for run in RUNS:
        (folder / "quarantine.jsonl").unlink(missing_ok=True)
        with loader_of(folder, run) as loader:
            found = [first_values(loader) for _ in range(2)]
        expected = expected or found
        assert found == expected, run
        assert {number for number, _ in read_quarantine(folder)} == bad, run
        assert len(read_quarantine(folder)) == len(bad), run
    for one, other in zip(np.ravel(healthy).tolist(), np.ravel(expected).tolist(), strict=True):
        assert (one == other) == (one not in bad)
    for run in RUNS:
        for stop in range(1, 6):
            with loader_of(folder, run) as loader:
                first = (
                    first_values(islice(loader, stop))
                    if stop <= 3
                    else first_values(loader) + first_values(islice(loader, stop - 3))
                )
                state = json.loads(json.dumps(loader.state_dict()))
            with loader_of(folder, "threads" if run == "inline" else "inline") as loader:
                loader.load_state_dict(state)
                rest: list[list[int]] = []
                while loader.epoch < 2:
                    rest += first_values(loader)
            assert first + rest == expected[0] + expected[1], f"{run}, stopped after {stop}"


@pytest.mark.parametrize("run", RUNS)
def test_resuming_is_exact_when_more_items_are_bad_than_before(run: str, folder: Path) -> None:
    """Items that turn bad between two parts of a run are replaced; whatever else was to come, comes."""
    with loader_of(folder, "inline") as loader:
        healthy = [first_values(loader) for _ in range(2)]
    flip(folder / SECOND, 5)  # item 2
    with loader_of(folder, run) as loader:
        first = first_values(islice(loader, 1))
        state = json.loads(json.dumps(loader.state_dict()))
    # Another process finds one more before this one resumes: item 5, which is the second of the last shard.
    flip(folder / "shard_000002.tar", ITEM_BYTES + 5)
    TarSource(folder, on_error="substitute").take(np.array([5, 2]))
    assert sorted(number for number, _ in read_quarantine(folder)) == [2, 5]
    found = []
    for again in RUNS:
        with loader_of(folder, again) as loader:
            loader.load_state_dict(state)
            rest = [first_values(loader), first_values(loader)]
        found.append(rest)
    assert found[0] == found[1] == found[2]
    for one, other in ((healthy[0][:1], first), (healthy[0][1:], found[0][0]), (healthy[1], found[0][1])):
        bad = {2.0} if other is first else {2.0, 5.0}
        for was, is_now in zip(np.ravel(one).tolist(), np.ravel(other).tolist(), strict=True):
            assert (was == is_now) == (was not in bad)
    assert len(read_quarantine(folder)) == 2


@pytest.mark.parametrize("run", RUNS)
def test_an_error_reaches_the_consumer_with_shard_and_item(run: str, folder: Path) -> None:
    flip(folder / SECOND, ITEM_BYTES + 5)
    source = TarSource(folder, fields=["x"])
    workers, options = RUNS[run]
    with Loader(
        source, Plan(source.index, Shuffle(), batch_size=2, seed=7), num_workers=workers, options=options
    ) as loader:
        with pytest.raises(DamageError) as caught:
            first_values(loader)
    assert (caught.value.shard, caught.value.item) == (SECOND, 3)


@pytest.mark.parametrize("run", RUNS)
def test_the_budget_holds_for_all_workers_together(run: str, folder: Path) -> None:
    for name in ("shard_000000.tar", SECOND, "shard_000002.tar"):
        flip(folder / name, 5)
    with loader_of(folder, run, max_bad_items=2) as loader:
        with pytest.raises(DamageError, match="max_bad_items=2"):
            first_values(loader)


# -- the list, written by several at once ------------------------------------------------------------------------------


def test_an_item_found_by_several_threads_at_once_is_listed_once(folder: Path) -> None:
    flip(folder / SECOND, 5)
    for _ in range(30):
        sources = [TarSource(folder, on_error="substitute") for _ in range(4)]
        run_at_once(4, lambda number, sources=sources: facts(sources[number].take(np.array([2]))))
        assert read_quarantine(folder) == [(2, SECOND)]
        (folder / "quarantine.jsonl").unlink()


def test_several_threads_do_not_exceed_the_budget(folder: Path) -> None:
    for name in ("shard_000000.tar", SECOND, "shard_000002.tar"):
        flip(folder / name, 5)
    for _ in range(30):
        sources = [TarSource(folder, on_error="substitute", max_bad_items=1) for _ in range(3)]
        with pytest.raises(DamageError, match="max_bad_items=1"):
            run_at_once(3, lambda number, sources=sources: sources[number].take(np.array([2 * number])))
        assert len(read_quarantine(folder)) == 1
        (folder / "quarantine.jsonl").unlink()


def test_starting_to_read_keeps_entries_just_listed_by_others(folder: Path) -> None:
    flip(folder / SECOND, 5)
    source = TarSource(folder, on_error="substitute")

    def work(number: int) -> None:
        if number:
            TarSource(folder, on_error="substitute")
        else:
            source.take(np.array([2]))

    for _ in range(100):
        run_at_once(4, work)
        assert read_quarantine(folder) == [(2, SECOND)]
        (folder / "quarantine.jsonl").unlink()


def take_within(folder: Path, limit: int) -> str:
    """Substitute where no file may have more than `limit` bytes; return the error."""
    source = TarSource(folder, on_error="substitute")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        source.take(ALL)
    except WriteError as error:
        return str(error)
    return "read"


def test_a_full_disk_at_the_list_of_bad_items_is_an_error_and_leaves_no_half_line(folder: Path) -> None:
    flip(folder / SECOND, 600)
    for limit in (0, 20):
        assert "Could not write the list of bad items" in run_isolated(take_within, folder, limit)
        assert (folder / "quarantine.jsonl").read_bytes() == b""
    assert run_isolated(take_within, folder, 10_000) == "read"
    assert read_quarantine(folder) == [(2, SECOND)]
