"""Full disks, unwritable folders and folders that vanish: an error, and finished shards are kept."""

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import run_isolated

from penstock import TarSource
from penstock.core.errors import SourceError, WriteError
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.manifest import MANIFEST
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from tests.shard.samples import contents, numbers, open_files_in, sample, start_writer, write

NOBODY = 65534


def big(number: int) -> dict[str, Any]:
    return {"x": np.full(3000, number, np.int32)}


def written_within(folder: Path, limit: int, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Write where no file may have more than `limit` bytes; return the error and what is still open."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(folder, 8, make=big, **options)
    except WriteError as error:
        return str(error), open_files_in(folder)
    return "written", open_files_in(folder)


@pytest.mark.parametrize("compression", ["none", "bz2"])
@pytest.mark.parametrize("shard_size", [1, 3])
def test_a_full_disk_in_the_middle_of_a_shard_is_an_error_that_resuming_recovers_from(
    shard_size: int, compression: Any, tmp_path: Path
) -> None:
    options = {"shard_size": shard_size, "compression": compression}
    write(tmp_path / "whole", 8, make=big, **options)
    smallest = min(path.stat().st_size for path in (tmp_path / "whole").glob("*.tar"))
    error, still_open = run_isolated(written_within, tmp_path / "set", smallest - 100, options)
    assert "Could not write to" in error
    assert "resume=True" in error
    assert still_open == []
    with pytest.raises(SourceError, match="a writer has not finished there"):
        TarSource(tmp_path / "set")
    write(tmp_path / "set", 8, make=big, resume=True, **options)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_full_disk_at_a_large_payload_leaves_nothing_open(tmp_path: Path) -> None:
    """Large payloads are written at once, small ones when the shard is closed."""
    error, still_open = run_isolated(written_within, tmp_path, 4096, {"shard_size": 8})
    assert "Could not write" in error
    assert still_open == []
    assert not list(tmp_path.rglob("*.part"))


def many_small_shards_within(folder: Path, limit: int) -> tuple[str, list[str]]:
    """Write shards of three kilobytes, so many that the manifest is the largest file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(folder, 40, make=lambda n: {"x": np.array([n, n], np.int32)}, shard_size=1)
    except WriteError as error:
        return str(error), open_files_in(folder)
    return "written", open_files_in(folder)


def test_a_full_disk_at_the_manifest_leaves_the_previous_dataset(tmp_path: Path) -> None:
    assert run_isolated(many_small_shards_within, tmp_path / "whole", 10**6) == ("written", [])
    sizes = sorted((path.stat().st_size, path.name) for path in (tmp_path / "whole").iterdir())
    assert sizes[-1][1] == MANIFEST
    write(tmp_path / "set", 7)
    error, still_open = run_isolated(many_small_shards_within, tmp_path / "set", sizes[-1][0] - 1)
    assert "Could not write" in error
    assert "resume=True" in error
    assert still_open == []
    assert numbers(tmp_path / "set") == list(range(7))
    assert list((tmp_path / "set").rglob("*.aside")) == []
    writer = ShardWriter(tmp_path / "set", WriteOptions(shard_size=1), resume=True)
    assert writer.written == 40
    writer.commit()
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_publication_that_fails_names_the_dataset_and_what_to_do_and_resumes(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start_writer(tmp_path / "set", shard_size=2)
    for number in range(4):
        writer.write(sample(number), None, {"number": number})

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(
            WriteError, match=r"Could not write .*dataset_metadata\.json: \[Errno 5\] .*error\. \w"
        ) as caught:
            writer.commit()
    assert str(caught.value).endswith("ontinue with resume=True.")
    write(tmp_path / "whole", 4, shard_size=2)
    write(tmp_path / "set", 4, resume=True, shard_size=2)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_full_disk_at_the_very_beginning_leaves_the_previous_dataset(tmp_path: Path) -> None:
    write(tmp_path / "set", 7)
    options = {"shard_size": 1, "metadata": {"text": "x" * 200_000}}
    error, still_open = run_isolated(written_within, tmp_path / "set", 100_000, options)
    assert "Could not write" in error
    assert still_open == []
    assert numbers(tmp_path / "set") == list(range(7))
    write(tmp_path / "whole", 8, make=big, **options)
    write(tmp_path / "set", 8, make=big, **options)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def written_by_nobody(folder: Path) -> str:
    if not os.getuid():
        os.setuid(NOBODY)
    try:
        WebDatasetWriter(folder)
    except WriteError as error:
        return str(error)
    return "written"


def test_a_folder_that_may_not_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o555)
    folder = tmp_path / "set"
    folder.mkdir()
    folder.chmod(0o555)
    for target in (folder, folder / "below"):
        error = run_isolated(written_by_nobody, target)
        assert str(folder) in error
        assert "Permission denied" in error
    assert contents(folder) == {}


def test_a_folder_that_vanishes_is_an_error(tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "set", shard_size=2)
    writer.write(sample(0), None, None)
    for path in sorted((tmp_path / "set").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "set").rmdir()
    with pytest.raises(WriteError, match="Could not write"):
        writer.write(sample(1), None, None)
    with pytest.raises(WriteError, match="has failed"):
        writer.write(sample(2), None, None)
    assert not (tmp_path / "set").exists()
