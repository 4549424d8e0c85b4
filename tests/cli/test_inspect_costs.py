"""`penstock inspect --cache` says what epochs cost in an object store, before anything is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock import Plan, Shuffle, create_shards_from_arrays
from penstock.cli import app
from penstock.core.index import Index
from penstock.observe.storage.advise import StoredDataset
from penstock.observe.storage.costs import estimate_storage_costs
from penstock.plan.costs import Prices


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs") / "shards"
    create_shards_from_arrays(folder, {"x": np.arange(3000 * 8).reshape(3000, 8)}, shard_size=500)
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_costs_are_those_of_the_plan_for_a_cache_of_that_size(shards: Path) -> None:
    stored = sum(path.stat().st_size for path in shards.glob("*.tar"))
    found = json.loads(run(shards, "--cache", stored // 4, "--json").stdout)["costs"]
    assert (found["stored_bytes"], found["cache_bytes"]) == (stored, stored // 4)
    plan = Plan(Index.uniform(3000, chunk=64), Shuffle(), batch_size=1)
    expected = plan.mixing(stored_bytes=stored, cache_bytes=stored // 4).costs
    assert expected is not None
    assert found["orders"][0] == {"order": "Shuffle()", **expected.to_dict(Prices())}
    assert found["orders"][1]["order"].startswith("WindowShuffle")
    for order in found["orders"]:
        assert order["first_epoch"]["bytes"] == stored
        assert order["later_epochs"]["bytes"] == pytest.approx(0.75 * stored, rel=0.001)
        assert order["later_epochs_lru"]["bytes"] > 0.94 * stored


def test_for_people_there_is_a_sentence_for_each_order(shards: Path) -> None:
    lines = run(shards, "--cache", "1MB").stdout.splitlines()
    (cost,) = [line for line in lines if line.startswith("Cost ")]
    assert "in an object store and a cache of 1 MB (" in cost
    assert "0.0004 USD per 1,000 requests and 0 USD per GB (an example" in cost
    assert sum(" first epoch " in line and "(with an LRU cache, " in line for line in lines) == 2
    assert "Cost" not in run(shards).stdout
    assert "costs" not in json.loads(run(shards, "--json").stdout)
    everything = run(shards, "--cache", "1 GB").stdout
    assert "each later one nothing." in everything
    assert "LRU" not in everything
    assert "and no cache, at" in run(shards, "--cache", "0").stdout


@pytest.mark.parametrize("size", ["lots", "-1", "5XB", "1.2.3GB", ""])
def test_what_is_not_a_size_is_refused_with_an_example(shards: Path, size: str) -> None:
    done = run(shards, f"--cache={size}")
    assert done.exit_code == 2
    assert f"must be a size such as 100GB, 1.5TB or 512MiB, got {size!r}" in done.output


def test_a_recording_has_no_costs(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(8))
    done = run(tmp_path / "rows.npy", "--cache", "1GB")
    assert done.exit_code != 0
    assert "--cache need a dataset, got the recording" in done.output


def test_compressed_shards_are_read_in_windows_of_whole_shards_only() -> None:
    compressed = StoredDataset(
        files=[], n_items=[100] * 50, stored_bytes=10**10, read_bytes=2e8, chunk_items=100, is_whole=True, is_fixed=True
    )
    found = estimate_storage_costs(compressed, cache_bytes=5 * 10**9, prices=Prices())
    ((order, costs),) = found.orders
    assert repr(order) == "WindowShuffle(window=10)"
    assert costs.later.n_bytes == 5 * 10**9
