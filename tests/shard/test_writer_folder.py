"""Other content of the folder: files of other programs, the previous dataset, and a second writer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from penstock_test_parts import run_isolated

from penstock.core.errors import OptionError, WriteError
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import MANIFEST
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.table import read_table
from penstock.shard.writer import ShardWriter
from tests.shard.samples import contents, numbers, sample, start_writer, write

# -- what is there already ---------------------------------------------------------------------------------------------


@pytest.fixture
def others(tmp_path: Path) -> dict[str, bytes]:
    """Put files of other programs into the folder."""
    files = {
        "notes.txt": b"mine",
        "shard_000009.tar": b"not yours",
        "other.tar": b"mine",
        "other.tar.index": b"mine",
        "shard_000099.tar.index": b"mine",
        "sub/shard_000000.tar": b"mine",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return files


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_size": 7},
        {"shard_size": 1},
        {"shard_name_pattern": "train_{shard_idx:02d}.tar"},
        {"compression": "gz"},
    ],
    ids=str,
)
def test_rewriting_removes_stale_shards_and_no_file_of_others(
    options: dict[str, Any], others: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path, 7)
    write(tmp_path, 5, make=lambda n: sample(100 + n), **options)
    write(tmp_path / "fresh", 5, make=lambda n: sample(100 + n), **options)
    fresh = contents(tmp_path / "fresh")
    found = {name: content for name, content in contents(tmp_path).items() if not name.startswith("fresh")}
    assert found == {**fresh, **others}
    assert numbers(tmp_path) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("name", ["shard_000002.tar", "shard_000002.tar.index"])
def test_a_file_of_the_previous_dataset_that_is_gone_already_is_not_missed(name: str, tmp_path: Path) -> None:
    write(tmp_path, 7)
    (tmp_path / name).unlink()
    write(tmp_path, 2)
    assert sorted(contents(tmp_path)) == [MANIFEST, "shard_000000.tar", "shard_000000.tar.index"]
    assert numbers(tmp_path) == [0, 1]


def test_shards_whose_manifest_was_removed_do_not_stay_beside_the_new_ones(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / MANIFEST).unlink()
    write(tmp_path, 2)
    assert sorted(contents(tmp_path)) == [MANIFEST, "shard_000000.tar", "shard_000000.tar.index"]


def test_the_writer_does_not_remove_files_listed_in_a_foreign_manifest(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(b"three years")
    foreign = {"total_samples": 1, "shards": [{"shard_name": "thesis.txt"}]}
    (tmp_path / MANIFEST).write_text(json.dumps(foreign))
    write(tmp_path, 2)
    assert (tmp_path / "thesis.txt").read_bytes() == b"three years"
    assert numbers(tmp_path) == [0, 1]


def test_archives_of_others_that_have_an_index_are_not_removed(tmp_path: Path) -> None:
    write(tmp_path / "theirs", 4, shard_name_pattern="theirs_{shard_idx}.tar")
    (tmp_path / "theirs" / MANIFEST).unlink()
    theirs = {name: content for name, content in contents(tmp_path / "theirs").items() if name.endswith(".tar")}
    index_archives(tmp_path / "theirs")
    write(tmp_path / "theirs", 2)
    found = contents(tmp_path / "theirs")
    assert numbers(tmp_path / "theirs") == [0, 1]
    assert {name: found[name] for name in theirs} == theirs


def test_a_large_manifest_has_a_table_which_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shard.manifest._TABLE_FROM", 3)
    for n_samples, has_table in ((7, True), (8, True), (5, False)):
        write(tmp_path, n_samples)
        assert (tmp_path / "dataset_metadata.shards").exists() == has_table
        assert (read_table(tmp_path / MANIFEST) is not None) == has_table
        assert numbers(tmp_path) == list(range(n_samples))
    write(tmp_path, 7)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "dataset_metadata.shards").unlink()
    index_archives(tmp_path)
    assert read_table(tmp_path / MANIFEST) is not None


def test_replacing_a_dataset_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 7)
    assert not caplog.messages
    write(tmp_path, 2)
    assert [message for message in caplog.messages if "Replacing the dataset of 7 items" in message]


# -- two writers -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = start_writer(tmp_path)
    first.write(sample(0), None, None)
    for resume in (False, True):
        with pytest.raises(WriteError, match="Another writer is at work"):
            ShardWriter(tmp_path, WriteOptions(), resume=resume)
    first.write(sample(1), None, None)
    first.commit()
    assert numbers(tmp_path) == [0, 1]
    write(tmp_path, 1)
    assert numbers(tmp_path) == [0]


def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    first = start_writer(tmp_path)
    assert run_isolated(outcome_of_writing, tmp_path) == "Another writer"
    first.abandon()
    assert run_isolated(outcome_of_writing, tmp_path) == "written"


def outcome_of_writing(folder: Path) -> str:
    try:
        write(folder, 2)
    except WriteError as error:
        return str(error)[:14]
    return "written"


def test_a_child_process_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write(sample(0), None, None)
    waiting, telling = os.pipe()
    pid = os.fork()
    if not pid:  # a worker process that was forked while the writer was open, and lives on
        os.close(telling)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        writer.commit()
        write(tmp_path, 2)
    finally:
        os.close(telling)
        os.waitpid(pid, 0)
    assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("kind", ["written", "indexed"])
def test_a_dataset_is_not_replaced_unless_asked(kind: str, tmp_path: Path) -> None:
    write(tmp_path)
    if kind == "indexed":  # archives of others, which a writer must not take for its own
        (tmp_path / "dataset_metadata.json").unlink()
        index_archives(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(WriteError, match=r"holds a dataset already\. Replace it with overwrite=True, or use another"):
        ShardWriter(tmp_path, WriteOptions(3))
    assert contents(tmp_path) == before
    write(tmp_path, 2, overwrite=True)
    assert numbers(tmp_path) == [0, 1]


def test_resuming_and_replacing_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="At most one of resume and overwrite"):
        ShardWriter(tmp_path, WriteOptions(), resume=True, overwrite=True)
