"""`penstock check --all` of zarr stores: what it prints."""

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


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--quiet"])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    group = zarr.create_group(tmp_path / "rec.zarr")
    group.create_array("x", data=np.arange(1, 101), chunks=(10,), compressors=None)
    group.create_array("in/y", data=np.arange(1, 101), chunks=(50,))
    group.create_array("z", data=np.arange(1, 101), chunks=(50,), compressors=[zarr.codecs.Crc32cCodec()])
    return tmp_path / "rec.zarr"


def test_a_store_is_verified_and_arrays_without_checksums_are_named(store: Path) -> None:
    done = run("check", str(store), "--all", "--workers", "3")
    assert (done.exit_code, done.stdout) == (0, "14 chunks in 3 arrays, 0.0 MB: no problems\n")
    assert done.stderr == (
        "in/y, x: no checksum, so that not every flipped bit is found. Write arrays as zarr v3 with the codec crc32c, "
        "or convert them to shards.\n"
    )
    os.truncate(store / "z" / "c" / "1", 7)
    bad = run("check", str(store), "--all")
    assert bad.exit_code == 1
    assert bad.stderr.splitlines()[:2] == ["chunk (1,) of z, item 50: its checksum does not match", "1 problem"]


def test_the_json_of_a_store(store: Path) -> None:
    answer = json.loads(run("check", str(store), "--all", "--json").stdout)
    assert {"name": "x", "chunks": 10, "bytes": 800, "has_checksum": False} in answer["arrays"]
    assert [array["has_checksum"] for array in answer["arrays"]] == [False, False, True]
    assert (answer["total_chunks"], answer["healthy"], answer["problems"]) == (14, True, [])
    os.truncate(store / "x" / "c" / "3", 7)
    bad = run("check", str(store), "--all", "--json")
    assert bad.exit_code == 1
    assert [(found["shard"], found["item"]) for found in json.loads(bad.stdout)["problems"]] == [
        ("chunk (3,) of x", 30)
    ]


def test_folders_of_stores_and_single_arrays_are_verified_and_datasets_stay_datasets(tmp_path: Path) -> None:
    with SimulationWriter(tmp_path / "sim", np.zeros((3, 5)), 10) as writer:
        writer.append(np.ones((10, 3, 4)))
    assert run("check", str(tmp_path / "sim"), "--all").stdout.startswith("5 chunks in 2 arrays")
    assert run("check", str(tmp_path / "sim" / "metadata.zarr"), "--all").stdout.startswith("1 chunk in 1 array")
    refused = run("index", str(tmp_path / "sim"))
    assert refused.exit_code == 2
    assert "An index is one of tars, got the zarr store" in refused.stderr
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(4)})
    zarr.create_array(tmp_path / "shards" / "beside.zarr", data=np.arange(4))
    assert run("check", str(tmp_path / "shards"), "--all").stdout.startswith("4 items in 1 shard")
