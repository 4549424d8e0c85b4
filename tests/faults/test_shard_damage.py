"""Stored damage, at rest and in the middle of an epoch: the right error, or an exact substitute, never silence.

Item i has x = (i, i + 1/2, …) of fixed shape, y of a length that varies, and metadata; each says which item it is.
"""

import json
import multiprocessing as mp
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import isolated

from penstock import Loader, Plan, RunOptions, Shuffle, TarSource, WindowShuffle
from penstock.core.errors import DamageError
from penstock.shard.manifest import MANIFEST
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter, WriteOptions

SOAK = os.environ.get("PENSTOCK_SOAK") == "1"
N_ITEMS, SHARD_SIZE = 6, 2
ALL = np.arange(N_ITEMS)
ITEM_BYTES = 3 * 1024  # three members: a header, and a payload of one block
SECOND = "shard_000001.tar"


def item(number: int, salt: int = 0) -> dict[str, Any]:
    number += salt
    return {"x": np.arange(4, dtype=np.float32) / 2 + number, "y": np.full(number % 3, number, np.int16)}


def write(folder: Path, n_items: int = N_ITEMS, *, salt: int = 0, **options: Any) -> None:
    writer = ShardWriter(folder, WriteOptions(**{"shard_size": SHARD_SIZE, **options}))
    for number in range(n_items):
        writer.write(item(number, salt), None, {"number": number + salt})
    writer.commit()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets that are copied for each test: one for each compression, and one of other items."""
    folder = tmp_path_factory.mktemp("originals")
    for compression in ("none", "gz", "xz"):
        write(folder / compression, compression=compression)
    write(folder / "other", salt=100)
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals / "none", tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture(params=["gz", "xz"])
def packed(request: pytest.FixtureRequest, originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals / request.param, tmp_path / "set")
    return tmp_path / "set"


def facts(block: Any) -> list[Any]:
    """Return the items of a block as plain values, each with the number that all of its fields agree on."""
    numbers = [about["number"] for about in block["metadata"]]
    for number, x, y in zip(numbers, block["x"], block["y"], strict=True):
        assert x.tobytes() == item(number)["x"].tobytes(), "a torn item"
        assert y.tobytes() == item(number)["y"].tobytes(), "a torn item"
    return numbers


def quarantined(folder: Path) -> list[tuple[int, str]]:
    path = folder / "quarantine.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(entry["item"], entry["shard"]) for entry in entries]


def damage_of(source: TarSource, items: Any = ALL) -> DamageError:
    with pytest.raises(DamageError) as caught:
        source.take(np.asarray(items))
    return caught.value


def attempt(take: Callable[[], Any]) -> tuple[Any, DamageError | None]:
    """Return what was read, or how it is damaged."""
    try:
        return take(), None
    except DamageError as error:
        return None, error


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


# -- bits --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_any_member_is_named_with_its_item(folder: Path) -> None:
    path, source = folder / SECOND, TarSource(folder)
    whole = path.read_bytes()
    assert len(whole) == SHARD_SIZE * ITEM_BYTES + 1024
    found = (SECOND, -1)
    for place in range(SHARD_SIZE * ITEM_BYTES):
        for bit in range(8) if SOAK or place % 97 == 0 else (place % 8,):
            flip(path, place, bit)
            if place % 97 == 0:
                source.close()  # otherwise, it is still open, and was never read without an error
            try:
                source.take(np.array([2, 3]))
            except DamageError as error:
                found = (error.shard, error.item or -1)
            assert found == (SECOND, 2 + place // ITEM_BYTES), f"bit {bit} of byte {place}"
            flip(path, place, bit)
            found = (SECOND, -1)
    assert path.read_bytes() == whole
    source.close()
    assert facts(source.take(ALL)) == list(range(N_ITEMS))


def test_a_flipped_bit_is_found_whatever_is_asked_for_and_only_where_it_is(folder: Path) -> None:
    source = TarSource(folder, fields=["x"])
    flip(folder / SECOND, ITEM_BYTES + 700)  # item 3, its x
    for items in ([3], [3, 3], [5, 3, 0], [0, 1, 2, 3, 4, 5], [2, 3] * 40):
        assert damage_of(source, items).item == 3
    assert source.take(np.array([0, 1, 2, 4, 5]))["x"][:, 0].tolist() == [0, 1, 2, 4, 5]
    assert TarSource(folder, fields=["y", "metadata"]).take(ALL)["metadata"][3]["number"] == 3


def test_a_flipped_bit_in_any_byte_gives_the_healthy_items_and_the_same_substitute_each_time(folder: Path) -> None:
    path = folder / SECOND
    substitutes: dict[int, set[int]] = {2: set(), 3: set()}
    for place in range(0, SHARD_SIZE * ITEM_BYTES, 1 if SOAK else 23):
        flip(path, place, place % 8)
        bad = 2 + place // ITEM_BYTES
        found = facts(TarSource(folder, on_error="substitute").take(ALL))
        substitutes[bad].add(found[bad])
        assert found[bad] != bad
        assert [found[n] for n in range(N_ITEMS) if n != bad] == [n for n in range(N_ITEMS) if n != bad]
        assert quarantined(folder) == [(bad, SECOND)]
        (folder / "quarantine.jsonl").unlink()
        flip(path, place, place % 8)
    assert all(len(found) == 1 for found in substitutes.values())
    assert facts(TarSource(folder, on_error="substitute").take(ALL)) == list(range(N_ITEMS))
    assert quarantined(folder) == []


@pytest.mark.parametrize("verify", ["first", "always"])
def test_damage_is_found_in_every_epoch(verify: Any, folder: Path) -> None:
    source = TarSource(folder, verify=verify)
    flip(folder / SECOND, 600)
    for _ in range(3):
        assert damage_of(source).item == 2
        assert facts(source.take(np.array([3, 5]))) == [3, 5]


def test_any_damaged_byte_of_a_compressed_shard_is_named_or_makes_no_difference(packed: Path) -> None:
    path, source = packed / SECOND, TarSource(packed)
    for place in range(path.stat().st_size):
        for bit in range(8) if SOAK else (place % 8,):
            flip(path, place, bit)
            source.close()
            found, error = attempt(lambda: facts(source.take(ALL)))
            if error is None:
                assert found == list(range(N_ITEMS)), f"bit {bit} of byte {place}"
            else:
                assert (error.shard, error.item in (2, 3)) == (SECOND, True), f"bit {bit} of byte {place}"
            flip(path, place, bit)


def test_a_damaged_compressed_shard_is_substituted_item_by_item(packed: Path) -> None:
    flip(packed / SECOND, packed.joinpath(SECOND).stat().st_size // 2)
    found = facts(TarSource(packed, on_error="substitute").take(ALL))
    assert [found[n] for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
    assert not {2, 3} & set(found)
    assert sorted(quarantined(packed)) == [(2, SECOND), (3, SECOND)]


@pytest.mark.parametrize("place", [0, 20, 100, -1, -10])
def test_a_damaged_index_is_named(place: int, folder: Path) -> None:
    size = (folder / f"{SECOND}.index").stat().st_size
    flip(folder / f"{SECOND}.index", place % size)
    error = damage_of(TarSource(folder))
    assert error.shard.startswith(SECOND)
    assert error.item == 2
    assert facts(TarSource(folder).take(np.array([0, 1, 4, 5]))) == [0, 1, 4, 5]


# -- files -------------------------------------------------------------------------------------------------------------


def lengths(total: int) -> list[int]:
    return sorted({*range(0, total, 512), 1, 100, 513, 1023, 1025, 3000, total - 1, total - 513})


def test_a_shard_truncated_anywhere_is_named(folder: Path) -> None:
    path, source = folder / SECOND, TarSource(folder)
    whole = path.read_bytes()
    for length in lengths(len(whole)):
        path.write_bytes(whole[:length])
        source.close()
        error = damage_of(source)
        assert (error.shard, error.item) == (SECOND, 2), f"{length} bytes"
        assert error.reason == f"truncated: {length} bytes, but {len(whole)} were written"
        found = facts(TarSource(folder, on_error="substitute").take(ALL))
        assert [found[n] for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
        assert not {2, 3} & set(found)


def test_a_compressed_shard_truncated_anywhere_is_named(packed: Path) -> None:
    path, source = packed / SECOND, TarSource(packed)
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        source.close()
        error = damage_of(source)
        assert (error.shard, error.item) == (SECOND, 2), f"{length} bytes"


def test_a_shard_that_grew_is_named(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(bytes(512))
    assert (damage_of(TarSource(folder)).shard, damage_of(TarSource(folder)).item) == (SECOND, 2)


def test_a_missing_shard_is_named_before_anything_is_read(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(DamageError, match="is missing") as caught:
        TarSource(folder)
    assert caught.value.shard == SECOND


def test_a_shard_that_goes_missing_later_is_named(folder: Path) -> None:
    source = TarSource(folder)
    (folder / SECOND).unlink()
    assert (damage_of(source).shard, damage_of(source).item) == (SECOND, 2)
    assert facts(source.take(np.array([0, 5]))) == [0, 5]


def test_a_missing_index_is_named(folder: Path) -> None:
    (folder / f"{SECOND}.index").unlink()
    error = damage_of(TarSource(folder))
    assert (error.shard, error.item) == (SECOND, 2)


def reading_a_pipe(folder: Path) -> str:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    try:
        TarSource(folder).take(ALL)
    except DamageError as error:
        return error.shard
    return "read"


def test_a_pipe_in_the_place_of_a_shard_does_not_hang(folder: Path) -> None:
    assert isolated(reading_a_pipe, folder, seconds=5) == SECOND


def swap(folder: Path, name: str, other: str) -> None:
    (folder / name).rename(folder / "aside")
    (folder / other).rename(folder / name)
    (folder / "aside").rename(folder / other)


@pytest.mark.parametrize("kind", ["none", "gz", "xz"])
@pytest.mark.parametrize("suffixes", [("",), (".index",), ("", ".index")], ids=["shards", "indexes", "both"])
def test_two_shards_that_were_swapped_are_named(
    kind: str, suffixes: tuple[str, ...], originals: Path, tmp_path: Path
) -> None:
    shutil.copytree(originals / kind, tmp_path / "set")
    folder = tmp_path / "set"
    for suffix in suffixes:
        swap(folder, f"{SECOND}{suffix}", f"shard_000002.tar{suffix}")
    source = TarSource(folder)
    for name, numbers in ((SECOND, (2, 3)), ("shard_000002.tar", (4, 5))):
        for number in numbers:
            error = damage_of(source, [number])
            assert error.shard.startswith(name)
            assert error.item == number
    assert facts(source.take(np.array([1, 0]))) == [1, 0]


@pytest.mark.parametrize("suffixes", [("",), ("", ".index")], ids=["shard", "with its index"])
def test_a_shard_of_another_data_set_is_named(suffixes: tuple[str, ...], folder: Path, originals: Path) -> None:
    for suffix in suffixes:
        shutil.copyfile(originals / "other" / f"{SECOND}{suffix}", folder / f"{SECOND}{suffix}")
    source = TarSource(folder)
    assert (damage_of(source, [3]).shard.startswith(SECOND), damage_of(source, [3]).item) == (True, 3)
    found = facts(TarSource(folder, on_error="substitute").take(ALL))
    assert not {2, 3} & set(found)


def test_a_manifest_older_than_its_shards_is_noticed(folder: Path, originals: Path) -> None:
    manifest = (folder / MANIFEST).read_bytes()
    write(folder, salt=100)
    (folder / MANIFEST).write_bytes(manifest)
    source = TarSource(folder)
    for number in range(N_ITEMS):
        error = damage_of(source, [number])
        assert (error.shard.startswith(f"shard_{number // 2:06d}.tar"), error.item) == (True, number)


@pytest.mark.parametrize("length", [0, 1, 100, -2])
def test_a_truncated_manifest_is_no_data_set(length: int, folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamageError, match=MANIFEST):
        TarSource(folder)


def test_verify_names_what_reading_names(folder: Path) -> None:
    flip(folder / SECOND, 5)
    (folder / "shard_000002.tar").write_bytes(b"")
    found = {(problem.shard, problem.item) for problem in verify_shards(folder)[1]}
    assert (SECOND, 2) in found
    assert {shard for shard, _ in found} == {SECOND, "shard_000002.tar"}


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
    assert sorted(quarantined(folder)) == [(0, "shard_000000.tar"), (2, SECOND)]


def test_the_budget_counts_each_item_once_and_over_processes(folder: Path) -> None:
    flip(folder / SECOND, 5)
    for _ in range(3):
        source = TarSource(folder, on_error="substitute", max_bad_items=1)
        for _ in range(3):
            source.take(ALL)
    assert quarantined(folder) == [(2, SECOND)]
    flip(folder / SECOND, ITEM_BYTES + 5)
    assert "max_bad_items=1" in str(damage_of(TarSource(folder, on_error="substitute", max_bad_items=1), [3]))


def test_without_a_healthy_item_there_is_no_substitute(folder: Path) -> None:
    for number in range(3):
        (folder / f"shard_{number:06d}.tar").write_bytes(b"")
    assert "no healthy item" in str(damage_of(TarSource(folder, on_error="substitute"), [0]))


def test_a_quarantine_of_another_data_set_does_not_count(folder: Path) -> None:
    flip(folder / SECOND, 5)
    (folder / "quarantine.jsonl").write_text(
        json.dumps({"item": 0, "shard": "a.tar", "reason": "b", "fingerprint": "c"}) + "\n"
    )
    assert facts(TarSource(folder, on_error="substitute", max_bad_items=1).take(ALL))[0] == 0
    assert (2, SECOND) in quarantined(folder)


@pytest.mark.parametrize("rubbish", ['{"item": 2, "sha', '{"item": 2, "sha\n', "\0\0\0", "[1, 2]}\n", "{}\n"])
def test_a_quarantine_that_was_cut_off_is_no_hindrance(rubbish: str, folder: Path) -> None:
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

RUNS = {
    "inline": (0, None),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork")),
}


def loader_of(folder: Path, run: str, **options: Any) -> Loader:
    source = TarSource(folder, fields=["x"], on_error="substitute", **options)
    workers, run_options = RUNS[run]
    plan = Plan(source.index, Shuffle(), batch_size=2, seed=7)
    return Loader(source, plan, num_workers=workers, options=run_options)


def delivered(batches: Any) -> list[list[int]]:
    return [batch["x"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["none", "xz"])
def test_order_and_resume_are_exact_with_substitutes(kind: str, originals: Path, tmp_path: Path) -> None:
    shutil.copytree(originals / kind, tmp_path / "set")
    folder = tmp_path / "set"
    with loader_of(folder, "inline") as loader:
        healthy = [delivered(loader) for _ in range(2)]
    size = (folder / SECOND).stat().st_size
    flip(folder / SECOND, 5 if kind == "none" else size // 2)
    bad = {2} if kind == "none" else {2, 3}
    expected: list[list[list[int]]] = []
    for run in RUNS:
        (folder / "quarantine.jsonl").unlink(missing_ok=True)
        with loader_of(folder, run) as loader:
            found = [delivered(loader) for _ in range(2)]
        expected = expected or found
        assert found == expected, run
        assert {number for number, _ in quarantined(folder)} == bad, run
        assert len(quarantined(folder)) == len(bad), run
    for one, other in zip(np.ravel(healthy).tolist(), np.ravel(expected).tolist(), strict=True):
        assert (one == other) == (one not in bad)
    for run in RUNS:
        for stop in range(1, 6):
            with loader_of(folder, run) as loader:
                first = (
                    delivered(islice(loader, stop))
                    if stop <= 3
                    else delivered(loader) + delivered(islice(loader, stop - 3))
                )
                state = json.loads(json.dumps(loader.state_dict()))
            with loader_of(folder, "threads" if run == "inline" else "inline") as loader:
                loader.load_state_dict(state)
                rest: list[list[int]] = []
                while loader.epoch < 2:
                    rest += delivered(loader)
            assert first + rest == expected[0] + expected[1], f"{run}, stopped after {stop}"


@pytest.mark.parametrize("run", RUNS)
def test_an_error_reaches_the_consumer_with_shard_and_item(run: str, folder: Path) -> None:
    flip(folder / SECOND, ITEM_BYTES + 5)
    source = TarSource(folder, fields=["x"])
    workers, options = RUNS[run]
    with Loader(
        source, Plan(source.index, Shuffle(), batch_size=2, seed=7), num_workers=workers, options=options
    ) as loader:
        with pytest.raises(DamageError) as caught:
            delivered(loader)
    assert (caught.value.shard, caught.value.item) == (SECOND, 3)


@pytest.mark.parametrize("run", RUNS)
def test_the_budget_holds_for_all_workers_together(run: str, folder: Path) -> None:
    for name in ("shard_000000.tar", SECOND, "shard_000002.tar"):
        flip(folder / name, 5)
    with loader_of(folder, run, max_bad_items=2) as loader:
        with pytest.raises(DamageError, match="max_bad_items=2"):
            delivered(loader)


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
# The bytes are what they were, or the file that was opened is still there under no name: both are exact.
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
def test_a_change_that_leaves_the_bytes_alone_is_borne(
    change: Callable[[Path], None], verify: Any, folder: Path
) -> None:
    source = TarSource(folder, verify=verify)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    change(folder / SECOND)
    found, error = attempt(lambda: facts(source.take(ALL)))
    if error is None:
        assert found == list(range(N_ITEMS))
    else:  # without checksums, a shard that was written to cannot be trusted any more
        assert verify == "never" or change in (remove, replace, replace_by_a_shorter_one)
        assert error.shard == SECOND


def test_touching_a_shard_again_and_again_is_borne(folder: Path) -> None:
    source = TarSource(folder)
    for _ in range(20):
        touch(folder / SECOND)
        assert facts(source.take(ALL)) == list(range(N_ITEMS))


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


@pytest.mark.parametrize("change", [*NOTICED, *HARMLESS], ids=lambda change: change.__name__)
@pytest.mark.parametrize("run", RUNS)
def test_a_shard_that_changes_in_the_middle_of_an_epoch_gives_exact_items_or_an_error(
    change: Callable[[Path], None], run: str, folder: Path
) -> None:
    exact = isolated(epochs_with_a_change, folder, change, run)
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
    assert sorted(quarantined(folder)) == [(2, SECOND), (3, SECOND)]


def test_windows_that_are_held_keep_what_was_verified(packed: Path) -> None:
    source = TarSource(packed, fields=["x"])
    plan = Plan(source.index, WindowShuffle(3, held=True), batch_size=2, seed=7)
    with Loader(source, plan, num_workers=0) as loader:
        batches = iter(loader)
        found = [next(batches)["x"][:, 0].tolist()]
        shrink_to_nothing(packed / SECOND)
        rest, error = attempt(lambda: delivered(batches))
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
            elif kind == "rewritten in pieces":
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
        assert ready.wait(10)
        yield
    finally:
        process.kill()
        process.join()


def reading_beside_a_vandal(folder: Path, kind: str, reads: int) -> tuple[int, int]:
    """Return how many reads were exact and how many were refused; anything else raises, or ends the process."""
    source = TarSource(folder)
    counts, failures = [0, 0], list[BaseException]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(reads):
                items = rng.integers(0, N_ITEMS, 4)
                found, error = attempt(lambda items=items: facts(source.take(items)))
                assert (found == items.tolist()) if error is None else (error.shard == SECOND), (found, error)
                counts[error is not None] += 1
        except BaseException as error:
            failures.append(error)

    with vandal(folder / SECOND, kind):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return counts[0], counts[1]


@pytest.mark.parametrize("kind", ["rewritten", "rewritten in pieces", "shrunk and refilled", "replaced"])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_beside_a_process_that_changes_a_shard_every_item_is_exact_or_refused(
    kind: str, compression: str, originals: Path, tmp_path: Path
) -> None:
    shutil.copytree(originals / compression, tmp_path / "set")
    exact, refused = isolated(reading_beside_a_vandal, tmp_path / "set", kind, 3000 if SOAK else 300)
    assert exact + refused == 2 * (3000 if SOAK else 300)
    assert exact, "items of the other shards are always there"


# -- the list, written by several at once ------------------------------------------------------------------------------


def together(n_workers: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads that begin at the same moment; raise what one of them raises."""
    barrier, failures = threading.Barrier(n_workers), list[BaseException]()

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(n_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_an_item_that_several_find_at_once_is_listed_once(folder: Path) -> None:
    flip(folder / SECOND, 5)
    for _ in range(30):
        sources = [TarSource(folder, on_error="substitute") for _ in range(4)]
        together(4, lambda number, sources=sources: facts(sources[number].take(np.array([2]))))
        assert quarantined(folder) == [(2, SECOND)]
        (folder / "quarantine.jsonl").unlink()


def test_several_at_once_do_not_exceed_the_budget(folder: Path) -> None:
    for name in ("shard_000000.tar", SECOND, "shard_000002.tar"):
        flip(folder / name, 5)
    for _ in range(30):
        sources = [TarSource(folder, on_error="substitute", max_bad_items=1) for _ in range(3)]
        with pytest.raises(DamageError, match="max_bad_items=1"):
            together(3, lambda number, sources=sources: sources[number].take(np.array([2 * number])))
        assert len(quarantined(folder)) == 1
        (folder / "quarantine.jsonl").unlink()


def test_beginning_to_read_does_not_lose_what_another_has_just_listed(folder: Path) -> None:
    flip(folder / SECOND, 5)
    source = TarSource(folder, on_error="substitute")

    def work(number: int) -> None:
        if number:
            TarSource(folder, on_error="substitute")
        else:
            source.take(np.array([2]))

    for _ in range(100):
        together(4, work)
        assert quarantined(folder) == [(2, SECOND)]
        (folder / "quarantine.jsonl").unlink()


# -- more shards than files may be open --------------------------------------------------------------------------------


def allow_files(more: int) -> None:
    """Let this process open so many files more than it has open now: a forked one has those of its parent."""
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def reading_a_shard_that_was_replaced_while_it_was_closed(folder: Path) -> str:
    """Read so many shards that the first one has to be closed, replace it, and read it again."""
    allow_files(50)
    write(folder, 80, shard_size=1)
    source = TarSource(folder, fields=["x"])
    for number in range(80):
        assert source.take(np.array([number]))["x"][0, 0] == number
    replace(folder / "shard_000000.tar")
    found, error = attempt(lambda: source.take(np.array([0])))
    return f"read {found}" if error is None else f"{error.item} in {error.shard}"


def test_a_shard_that_is_replaced_while_it_is_closed_is_verified_anew(tmp_path: Path) -> None:
    assert isolated(reading_a_shard_that_was_replaced_while_it_was_closed, tmp_path / "set") == "0 in shard_000000.tar"


def reading_many_shards_with_few_files(folder: Path, compression: str) -> list[int]:
    allow_files(50)
    write(folder, 150, shard_size=1, compression=compression)
    source = TarSource(folder)
    order = np.random.default_rng(7).permutation(150)
    one_by_one = [facts(source.take(np.array([number])))[0] for number in range(150)]
    return [*one_by_one, *np.argsort(facts(source.take(order))).tolist(), *order.argsort().tolist()]


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_more_shards_than_files_may_be_open_are_read(compression: str, tmp_path: Path) -> None:
    found = isolated(reading_many_shards_with_few_files, tmp_path / "set", compression)
    assert found[:150] == list(range(150))
    assert found[150:300] == found[300:]
