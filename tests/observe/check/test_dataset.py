"""What is said about datasets, stores, runs and other folders; every command is run, and helps."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from penstock_test_processes import run_isolated

import penstock as ps
from penstock.observe.check import dataset, listing
from penstock.observe.check.folder import examine_data
from penstock.shard import manifest as manifests
from penstock.shard.verify import verify_sample, verify_shards
from tests.observe.check.look import find, look, run_command, tree


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 items in shards of 25; values are item numbers."""
    folder = tmp_path_factory.mktemp("written") / "a dataset"
    ps.create_shards_from_arrays(folder, {"x": np.arange(200).reshape(100, 2)}, shard_size=25)
    return folder


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "it's a dataset"))


def change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_healthy_dataset_is_ok_and_nothing_in_it_changes(shards: Path) -> None:
    before = tree(shards)
    findings = {finding.name: finding for finding in examine_data(str(shards), lambda *_: None)}
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert findings["data.manifest"].facts["items"] == 100
    assert findings["data.shards"].facts == {"checked": 4, "shards": 4, "problems": [], "without_index": []}
    assert findings["data.checksums"].facts["items"] == 16
    run_command(findings["data.checksums"])
    assert tree(shards) == before


def test_a_damaged_item_of_the_sample_is_named_and_verify_finds_it(shards: Path) -> None:
    change(shards / "shard_000001.tar", 600)
    found = look(shards)
    assert list(found) == ["data.checksums"]
    assert found["data.checksums"].level == "problem"
    assert "shard_000001.tar, item 25: the checksum of 'x.npy'" in found["data.checksums"].text
    assert "item 25" in run_command(found["data.checksums"], code=1)


@pytest.mark.parametrize("name", ["shard_000002.tar", "shard_000002.tar.index"])
def test_a_file_that_is_missing_is_a_problem_that_is_named_once(shards: Path, name: str) -> None:
    (shards / name).unlink()
    found = look(shards)
    assert list(found) == ["data.shards"]
    assert name in found["data.shards"].text
    assert name in run_command(found["data.shards"], code=1)


def test_a_shard_of_another_size_is_a_problem(shards: Path) -> None:
    os.truncate(shards / "shard_000003.tar", 1024)
    found = look(shards)["data.shards"]
    assert "shard_000003.tar has 1024 bytes, but 52224 were written" in found.text


def test_a_sample_is_bounded_in_bytes_and_reads_compressed_shards_as_a_whole(shards: Path, tmp_path: Path) -> None:
    whole = manifests.Manifest.read(shards / "dataset_metadata.json")
    one = verify_sample(whole, max_bytes=1024, max_seconds=60)
    assert (one.n_shards, one.n_items, one.n_bytes) == (1, 1, 1024)
    assert verify_sample(whole, max_bytes=1 << 20, max_seconds=60, max_shards=2).n_shards == 2
    ps.create_shards_from_arrays(
        tmp_path / "gz", {"x": np.arange(200).reshape(100, 2)}, shard_size=25, compression="gz"
    )
    small = manifests.Manifest.read(tmp_path / "gz" / "dataset_metadata.json")
    assert verify_sample(small, max_bytes=1 << 20, max_seconds=60).n_items == 100
    change(tmp_path / "gz" / "shard_000001.tar", 400)
    assert [problem.shard for problem in verify_sample(small, max_bytes=1 << 20, max_seconds=60).problems] == [
        "shard_000001.tar"
    ]


def test_a_damaged_manifest_is_a_problem(shards: Path) -> None:
    change(shards / "dataset_metadata.json", 100)
    assert look(shards)["data.manifest"].level == "problem"


def test_the_manifest_of_another_program_is_replaced_by_the_command(shards: Path) -> None:
    for index in shards.glob("*.index"):
        index.unlink()
    (shards / "dataset_metadata.json").write_text('{"shards": 4}')
    found = look(shards)["data.manifest"]
    run_command(found)
    assert look(shards) == {}
    assert len(ps.TarSource(shards).index) == 100


def test_archives_without_an_index_get_one_by_the_command(shards: Path) -> None:
    (shards / "dataset_metadata.json").unlink()
    found = look(shards)
    assert list(found) == ["data.kind"]
    assert "copy its dataset_metadata.json again" in found["data.kind"].advice
    run_command(found["data.kind"])
    assert look(shards) == {}
    (shards / "shard_000001.tar.index").unlink()  # of archives that were indexed, it can be made again
    run_command(look(shards)["data.shards"])
    assert look(shards) == {}


def test_a_pattern_that_was_indexed_is_a_dataset_and_one_that_was_not_gets_the_command(shards: Path) -> None:
    (shards / "dataset_metadata.json").unlink()
    pattern = shards / "shard_00000{0..2}.tar"
    run_command(look(pattern)["data.kind"])
    assert look(pattern) == {}
    assert find(pattern, "data.manifest").facts["items"] == 75
    assert find(shards, "data.manifest").facts["items"] == 75  # and is found in its folder


def test_files_that_do_not_belong_to_the_dataset_are_removed_by_the_command(shards: Path) -> None:
    shutil.copy(shards / "shard_000000.tar", shards / "old one.tar")
    (shards / "shard_000009.tar.index").touch()
    (shards / "notes.txt").touch()
    found = look(shards)
    assert list(found) == ["data.orphans"]
    assert found["data.orphans"].facts["files"] == ["old one.tar", "shard_000009.tar.index"]
    run_command(found["data.orphans"])
    assert look(shards) == {}
    assert (shards / "notes.txt").exists()
    assert verify_shards(shards)[1] == []


def test_a_cache_of_a_large_manifest_that_is_stale_or_missing_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dataset._TABLE_FROM == manifests._TABLE_FROM
    monkeypatch.setattr(manifests, "_TABLE_FROM", 2)
    monkeypatch.setattr(dataset, "_TABLE_FROM", 2)
    ps.create_shards_from_arrays(tmp_path / "own", {"x": np.arange(9)}, shard_size=3)
    assert find(tmp_path / "own", "data.cache").level == "ok"
    change(tmp_path / "own" / "dataset_metadata.shards", 40)
    assert "damaged" in look(tmp_path / "own")["data.cache"].text
    (tmp_path / "own" / "dataset_metadata.shards").unlink()
    assert "missing" in look(tmp_path / "own")["data.cache"].text


def test_items_in_quarantine_are_a_warning(shards: Path) -> None:
    change(shards / "shard_000001.tar", 600)
    rows = ps.TarSource(shards, on_error="substitute").take(np.arange(100))["x"]
    assert np.flatnonzero(rows[:, 0] != 2 * np.arange(100)).tolist() == [25]
    found = look(shards)
    assert found["data.quarantine"].text == "Trainings have replaced 1 bad item, which quarantine.jsonl lists."
    run_command(found["data.quarantine"], code=1)


def test_the_datasets_of_a_split_are_examined_each(written: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        shutil.copytree(written, tmp_path / name)
    change(tmp_path / "val" / "shard_000001.tar", 600)
    found = look(tmp_path)
    assert list(found) == ["data.checksums"]
    assert str(tmp_path / "val") in found["data.checksums"].command


def test_special_files_are_named_and_never_opened(shards: Path) -> None:
    os.mkfifo(shards / "pipe.tar")
    os.mkfifo(shards / "quarantine.jsonl")
    found = look(shards)
    assert found["data.special_files"].facts["special"] == {"pipe.tar": "a FIFO", "quarantine.jsonl": "a FIFO"}
    assert "pipe.tar" in run_command(found["data.special_files"])
    (shards / "dataset_metadata.json").unlink()
    os.mkfifo(shards / "dataset_metadata.json")
    assert "must be a regular file" in look(shards)["data.manifest"].text
    assert "neither a folder nor a regular file" in look(shards / "pipe.tar")["data.kind"].text


def test_a_folder_of_very_many_entries_is_listed_in_part(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (shards / f"{number}.txt").touch()
    whole = listing.list_folder(shards)
    assert whole.is_complete
    assert whole.n_entries == 59
    part = listing.list_folder(shards, most=20)
    assert (part.is_complete, part.n_entries) == (False, 20)
    monkeypatch.setattr(listing.list_folder, "__defaults__", (20, 5.0))
    found = look(shards)
    assert list(found) == ["data.entries"]
    assert "20 were looked at" in found["data.entries"].text


def without_root(folder: Path) -> list[str]:
    folder.chmod(0o000)
    os.chown(folder, 65534, 65534)
    os.seteuid(65534)
    unreadable = look(folder)["data.permissions"]
    run_command(unreadable)
    os.seteuid(0)
    folder.chmod(0o777)
    return [unreadable.text]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_that_cannot_be_read_is_a_problem_and_the_command_opens_it() -> None:
    folder = Path(os.path.realpath("/tmp")) / f"penstock-check-{os.getpid()}"
    folder.mkdir()
    try:
        (found,) = run_isolated(without_root, folder)
        assert found == f"{folder} cannot be listed: Permission denied."
    finally:
        folder.rmdir()


def test_a_folder_that_all_may_write_is_a_warning_and_the_command_closes_it(shards: Path) -> None:
    shards.chmod(0o777)
    found = look(shards)
    assert list(found) == ["data.permissions"]
    run_command(found["data.permissions"])
    assert look(shards) == {}


def test_a_store_is_opened_and_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "store.zarr", mode="w")
    for name in ("a", "b"):
        group.create_array(name, shape=(10, 3), chunks=(5, 3), dtype="f4")[:] = np.arange(30).reshape(10, 3)
    assert look(tmp_path / "store.zarr") == {}
    arrays = find(tmp_path / "store.zarr", "data.store").facts["arrays"]
    assert [(entry["name"], entry["shape"], entry["chunk_bytes"]) for entry in arrays] == [
        ("a", [10, 3], 60),
        ("b", [10, 3], 60),
    ]
    left = tmp_path / "store.zarr" / "a" / "c" / "0" / f"0.{'1f' * 16}.partial"
    left.write_bytes(b"half")
    run_command(look(tmp_path / "store.zarr")["data.temporary"])
    assert look(tmp_path / "store.zarr") == {}
    (tmp_path / "store.zarr" / "b" / "zarr.json").write_text('{"node_type": "array"')
    found = look(tmp_path / "store.zarr")
    assert found["data.store"].level == "problem"
    assert f"{tmp_path / 'store.zarr' / 'b'}" in found["data.store"].text
    run_command(found["data.store"])


def test_run_files_are_read_and_the_command_shows_them(tmp_path: Path) -> None:
    with ps.watch([np.arange(5)] * 4, show=False) as watched:
        assert len(list(watched)) == 4
    watched.save(tmp_path / "run.json")
    (tmp_path / "other.json").write_text("{}")
    run = find(tmp_path, "data.run")
    assert run.level == "ok"
    assert look(tmp_path) == {}
    stored = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**stored, "figures": {}}))
    damaged = look(tmp_path)["data.run"]
    assert damaged.level == "problem"
    run_command(damaged)
    assert list(look(tmp_path)) == ["data.kind"]


def test_a_plain_folder_and_a_file_are_notes(tmp_path: Path) -> None:
    (tmp_path / "rows.npy").touch()
    assert list(look(tmp_path)) == ["data.kind"]
    assert look(tmp_path)["data.kind"].level == "note"
    np.save(tmp_path / "rows.npy", np.arange(6))
    assert look(tmp_path / "rows.npy") == {}
    assert find(tmp_path / "rows.npy", "data.source").facts == {"items": 6, "fields": ["rows"]}
