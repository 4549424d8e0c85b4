"""Shards that change while they are read, or while they are closed: every item is exact, or refused by name."""

import multiprocessing as mp
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from penstock_cases import some_cases
from penstock_test_parts import run_at_once, run_isolated
from penstock_test_shards import (
    ALL,
    ITEM_BYTES,
    N_ITEMS,
    RUNS,
    SECOND,
    attempt,
    damage_of,
    facts,
    first_values,
    item,
    read_quarantine,
    write,
    write_items,
)

from penstock import Loader, Plan, Shuffle, TarSource, WindowShuffle
from penstock.source.tar import engine
from penstock.source.tar.request import Request

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
originals = penstock_test_shards.originals
folder = penstock_test_shards.folder
packed = penstock_test_shards.packed


# -- in the middle of an epoch -----------------------------------------------------------------------------------------


def shrink(path: Path) -> None:
    os.truncate(path, ITEM_BYTES + 100)


def shrink_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def refill(path: Path) -> None:
    content = path.read_bytes()
    os.truncate(path, 0)
    path.write_bytes(content)


def refill_with_zeros(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def rewrite_in_place(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in content))


def rewrite_and_put_the_time_back(path: Path) -> None:
    before = path.stat()
    rewrite_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    aside.replace(path)


def replace_by_a_shorter_one(path: Path) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(path.read_bytes()[:700])
    aside.replace(path)


def remove(path: Path) -> None:
    path.unlink()


def touch(path: Path) -> None:
    os.utime(path)


def make_read_only(path: Path) -> None:
    path.chmod(0o444)


NOTICED = [shrink, shrink_to_nothing, refill_with_zeros, rewrite_in_place, rewrite_and_put_the_time_back]


# The bytes are unchanged, or the open file still exists without a name: both are exact.
HARMLESS = [refill, touch, make_read_only, replace, replace_by_a_shorter_one, remove]


@pytest.mark.parametrize("change", NOTICED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_shard_that_changes_between_two_reads_is_noticed(
    change: Callable[[Path], None], verify: Any, folder: Path
) -> None:
    source = TarSource(folder, verify=verify)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    change(folder / SECOND)
    for _ in range(2):
        error = damage_of(source)
        assert (error.shard, error.item) == (SECOND, 2 if change is not shrink else 3)  # the first item is still whole
        error = damage_of(source, [3])
        assert (error.shard, error.item) == (SECOND, 3)
        assert facts(source.take(np.array([0, 5]))) == [0, 5]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_change_that_keeps_the_bytes_is_tolerated(change: Callable[[Path], None], verify: Any, folder: Path) -> None:
    source = TarSource(folder, verify=verify)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    change(folder / SECOND)
    found, error = attempt(lambda: facts(source.take(ALL)))
    if error is None:
        assert found == list(range(N_ITEMS))
    else:  # without checksums, a shard that was written to cannot be trusted any more
        assert verify == "never" or change in (remove, replace, replace_by_a_shorter_one)
        assert error.shard == SECOND


def test_touching_a_shard_repeatedly_is_tolerated(folder: Path) -> None:
    source = TarSource(folder)
    for _ in range(20):
        touch(folder / SECOND)
        assert facts(source.take(ALL)) == list(range(N_ITEMS))


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_side_index_that_is_rewritten_after_it_was_checked_leads_to_no_other_item(
    verify: Any, tmp_path: Path
) -> None:
    rows = [{"x": np.full(4, n, np.float32), "y": np.full(200 * (n % 3), n)} for n in range(9)]
    write(tmp_path / "set", rows, shard_size=9)
    path, source = tmp_path / "set" / "shard_000000.tar.index", TarSource(tmp_path / "set", fields=["x"], verify=verify)
    whole = path.read_bytes()

    def read() -> Any:
        return source.take(np.arange(9))["x"][:, 0].tolist()

    assert read() == list(range(9))
    for place in range(0, len(whole), 1 if SOAK else 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        found, error = attempt(read)
        assert error is not None or found == list(range(9)), f"byte {place}"
    path.write_bytes(whole)
    if verify != "never":  # without checksums, it cannot be trusted any more
        assert read() == list(range(9))


def test_a_shard_that_was_just_written_to_is_verified_at_each_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dates are those of the last tick of a clock: another write within the same tick does not change them.
    monkeypatch.setattr(Request, "find_changed", lambda _: [])
    monkeypatch.setattr(engine, "SETTLED_NS", 10**18)
    source = TarSource(folder)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    rewrite_in_place(folder / SECOND)
    assert damage_of(source).item == 2


@pytest.mark.parametrize("change", [*NOTICED, *HARMLESS], ids=lambda change: change.__name__)
def test_a_compressed_shard_that_changes_is_exact_or_named(change: Callable[[Path], None], packed: Path) -> None:
    source = TarSource(packed)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    if change is shrink:
        os.truncate(packed / SECOND, packed.joinpath(SECOND).stat().st_size // 2)
    else:
        change(packed / SECOND)
    found, error = attempt(lambda: facts(source.take(ALL)))
    if error is None:
        assert found == list(range(N_ITEMS))
    else:
        assert error.shard == SECOND
        assert change not in (refill, touch, make_read_only)


@some_cases(11)
@pytest.mark.parametrize("change", [*NOTICED, *HARMLESS], ids=lambda change: change.__name__)
@pytest.mark.parametrize("run", RUNS)
def test_a_shard_that_changes_in_the_middle_of_an_epoch_gives_exact_items_or_an_error(
    change: Callable[[Path], None], run: str, folder: Path
) -> None:
    exact = run_isolated(epochs_with_a_change, folder, change, run)
    assert exact


def epochs_with_a_change(folder: Path, change: Callable[[Path], None], run: str) -> bool:
    """Read three epochs, with a change after the fourth batch; a process of its own, for SIGBUS would end it."""
    source = TarSource(folder, fields=["x"])
    workers, options = RUNS[run]
    plan = Plan(source.index, Shuffle(), batch_size=2, seed=7)
    expected = [[float(number) for number in plan.epoch(e).draw(n).items] for e in range(3) for n in range(3)]
    found: list[list[float]] = []

    def read() -> None:
        with Loader(source, plan, num_workers=workers, options=options) as loader:
            while loader.epoch < 3:
                for batch in loader:
                    assert batch["x"].numpy().tobytes() == b"".join(
                        item(int(n))["x"].tobytes() for n in batch["x"][:, 0]
                    )
                    found.append(batch["x"][:, 0].tolist())
                    if len(found) == 4:
                        change(folder / SECOND)

    _, error = attempt(read)
    assert error is None or error.shard == SECOND
    # Workers that read ahead may meet the shard while it is being refilled.
    borne = (touch, make_read_only, refill) if run == "inline" else (touch, make_read_only)
    assert change not in (NOTICED if error is None else borne)
    return found == expected[: len(found)]


@pytest.mark.parametrize("change", [shrink, rewrite_in_place], ids=lambda change: change.__name__)
def test_a_shard_that_changes_in_the_middle_of_an_epoch_is_substituted(
    change: Callable[[Path], None], folder: Path
) -> None:
    source = TarSource(folder, on_error="substitute")
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    change(folder / SECOND)
    found = facts(source.take(ALL))
    assert [found[n] for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
    assert not {2, 3} & set(found)
    assert sorted(read_quarantine(folder)) == [(2, SECOND), (3, SECOND)]


def test_shuffle_windows_in_memory_keep_verified_items(packed: Path) -> None:
    source = TarSource(packed, fields=["x"])
    plan = Plan(source.index, WindowShuffle(3, held=True), batch_size=2, seed=7)
    with Loader(source, plan, num_workers=0) as loader:
        batches = iter(loader)
        found = [next(batches)["x"][:, 0].tolist()]
        shrink_to_nothing(packed / SECOND)
        rest, error = attempt(lambda: first_values(batches))
    assert error is None or error.shard == SECOND
    found += rest or []
    expected = [[float(number) for number in plan.epoch(0).draw(n).items] for n in range(3)]
    assert found == expected[: len(found)]


# -- at the same time, from another process ----------------------------------------------------------------------------


def vandalise(path: Path, kind: str, ready: Any) -> None:
    """Change a shard again and again, and put it right again, until this process is ended."""
    whole = path.read_bytes()
    wrong = bytes(byte ^ 0x55 for byte in whole)
    ready.set()
    while True:
        for content in (wrong, whole):
            if kind == "rewritten":
                with path.open("r+b") as file:
                    file.write(content)
            elif kind == "rewritten in steps":
                with path.open("r+b", buffering=0) as file:
                    for start in range(0, len(content), 700):
                        file.write(content[start : start + 700])
            elif kind == "shrunk and refilled":
                os.truncate(path, 0 if content is wrong else 1000)
                path.write_bytes(whole)
            else:
                aside = path.with_name("aside")
                aside.write_bytes(content)
                aside.replace(path)


@contextmanager
def vandal(path: Path, kind: str) -> Iterator[None]:
    context = mp.get_context("fork")
    ready = context.Event()
    process = context.Process(target=vandalise, args=(path, kind, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(120)
        yield
    finally:
        process.kill()
        process.join()


def reading_beside_a_vandal(folder: Path, kind: str, reads: int) -> tuple[int, int]:
    """Return how many reads were exact and how many were refused; anything else raises, or ends the process."""
    source = TarSource(folder)
    counts = [0, 0]

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(reads):
            items = rng.integers(0, N_ITEMS, 4)
            found, error = attempt(lambda items=items: facts(source.take(items)))
            assert (found == items.tolist()) if error is None else (error.shard == SECOND), (found, error)
            counts[error is not None] += 1

    with vandal(folder / SECOND, kind):
        run_at_once(2, read)
    return counts[0], counts[1]


@some_cases(4)
@pytest.mark.parametrize("kind", ["rewritten", "rewritten in steps", "shrunk and refilled", "replaced"])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_beside_a_process_that_changes_a_shard_every_item_is_exact_or_refused(
    kind: str, compression: str, originals: Path, tmp_path: Path
) -> None:
    shutil.copytree(originals / compression, tmp_path / "set")
    exact, refused = run_isolated(reading_beside_a_vandal, tmp_path / "set", kind, 3000 if SOAK else 300)
    assert exact + refused == 2 * (3000 if SOAK else 300)
    assert exact, "items of the other shards are always there"


# -- more shards than files may be open --------------------------------------------------------------------------------


def allow_files(more: int) -> None:
    """Let this process open so many files more than it has open now: a forked one has those of its parent."""
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def reading_a_shard_that_was_replaced_while_it_was_closed(folder: Path) -> str:
    """Read so many shards that the first one has to be closed, replace it, and read it again."""
    allow_files(50)
    write_items(folder, 80, shard_size=1)
    source = TarSource(folder, fields=["x"])
    for number in range(80):
        assert source.take(np.array([number]))["x"][0, 0] == number
    replace(folder / "shard_000000.tar")
    found, error = attempt(lambda: source.take(np.array([0])))
    return f"read {found}" if error is None else f"{error.item} in {error.shard}"


def test_a_shard_that_is_replaced_while_it_is_closed_is_verified_again(tmp_path: Path) -> None:
    assert (
        run_isolated(reading_a_shard_that_was_replaced_while_it_was_closed, tmp_path / "set") == "0 in shard_000000.tar"
    )


def reading_many_shards_with_few_files(folder: Path, compression: str) -> list[int]:
    allow_files(50)
    write_items(folder, 150, shard_size=1, compression=compression)
    source = TarSource(folder)
    order = np.random.default_rng(7).permutation(150)
    one_by_one = [facts(source.take(np.array([number])))[0] for number in range(150)]
    return [*one_by_one, *np.argsort(facts(source.take(order))).tolist(), *order.argsort().tolist()]


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_more_shards_than_the_limit_of_open_files_are_read(compression: str, tmp_path: Path) -> None:
    found = run_isolated(reading_many_shards_with_few_files, tmp_path / "set", compression)
    assert found[:150] == list(range(150))
    assert found[150:300] == found[300:]
