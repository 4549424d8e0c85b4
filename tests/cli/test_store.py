"""`penstock index` and `verify` of zarr stores: what they print, and what they leave behind."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from penstock import create_shards_from_arrays
from penstock.cli import app
from penstock.recipes.streams import SimulationWriter

SIDECAR = ".penstock-checksums"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--quiet"])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    group = zarr.create_group(tmp_path / "rec.zarr")
    group.create_array("x", data=np.arange(1, 101), chunks=(10,), compressors=None)
    group.create_array("in/y", data=np.arange(1, 101), chunks=(50,))
    return tmp_path / "rec.zarr"


def test_a_store_is_indexed_and_verified(store: Path) -> None:
    refused = run("verify", str(store))
    assert refused.exit_code == 2
    assert f"has no checksums. Make them: penstock index {store}" in refused.stderr
    done = run("index", str(store))
    assert (done.exit_code, done.stdout) == (0, "12 chunks in 2 arrays, 0.0 MB: checksums written\n")
    assert sorted(path.parent.name for path in store.rglob(SIDECAR)) == ["x", "y"]
    done = run("verify", str(store), "--workers", "3")
    assert (done.exit_code, done.stdout) == (0, "12 chunks in 2 arrays, 0.0 MB: no problems\n")
    chunk = store / "x" / "c" / "3"
    before = chunk.stat()
    chunk.write_bytes(bytes(chunk.stat().st_size))
    os.utime(chunk, ns=(before.st_atime_ns, before.st_mtime_ns))
    (store / "in" / "y" / "c" / "0").unlink()
    bad = run("verify", str(store))
    assert bad.exit_code == 1
    assert bad.stderr.splitlines() == [
        "chunk (0,) of in/y, item 0: it is missing. Restore it, or run `penstock index` again if that is on purpose",
        f"chunk (3,) of x, item 30: its bytes do not match its checksum in {store / 'x' / SIDECAR}. Restore it from a "
        "copy",
        "2 problems",
    ]
    again = run("index", str(store))
    assert "x: 1 chunk changed, added or removed since the last index" in again.stderr


def test_the_json_of_a_store(store: Path) -> None:
    answer = json.loads(run("index", str(store), "--json").stdout)
    x = {"name": "x", "chunks": 10, "bytes": 800, "changed": 0}
    assert x in answer["arrays"]
    assert (answer["total_chunks"], answer["written"], answer["problems"]) == (12, True, [])
    assert json.loads(run("verify", str(store), "--json").stdout)["healthy"] is True
    os.truncate(store / "x" / "c" / "3", 7)
    bad = run("verify", str(store), "--json")
    assert bad.exit_code == 1
    assert [(found["shard"], found["item"]) for found in json.loads(bad.stdout)["problems"]] == [
        ("chunk (3,) of x", 30)
    ]
    refused = json.loads(run("index", str(store), "--json").stdout)
    assert (refused["written"], len(refused["problems"])) == (False, 1)


def test_folders_of_stores_and_single_arrays_are_indexed_and_datasets_stay_datasets(tmp_path: Path) -> None:
    with SimulationWriter(tmp_path / "sim", np.zeros((3, 5)), 10) as writer:
        writer.append(np.ones((10, 3, 4)))
    assert run("index", str(tmp_path / "sim")).stdout.startswith("5 chunks in 2 arrays")
    assert run("index", str(tmp_path / "sim" / "metadata.zarr")).stdout.startswith("1 chunk in 1 array")
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(4)})
    zarr.create_array(tmp_path / "shards" / "beside.zarr", data=np.arange(4))
    assert run("verify", str(tmp_path / "shards")).stdout.startswith("4 items in 1 shard")
