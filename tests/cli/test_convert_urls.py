"""`penstock convert` from and to URLs, on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from typer.testing import CliRunner

from penstock.cli import app
from tests.shard.samples import contents


@pytest.fixture
def bucket(s3: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """A bucket with two recordings, reached by the environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (s3.folder / "raw").mkdir()
    for number, name in enumerate(("a", "b")):
        np.save(s3.folder / "raw" / f"{name}.npy", np.arange(10).reshape(5, 2) + 100 * number)
    return s3


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_pattern_of_a_bucket_becomes_a_dataset_in_it(bucket: Endpoint, tmp_path: Path) -> None:
    found = run("convert", f"{bucket.url}/raw/*.npy", "-o", bucket.url / "set", "--shard-size", 4, "-q")
    assert found.exit_code == 0, found.output
    assert "10 items in 3 shards" in found.output
    local = run(
        "convert",
        bucket.folder / "raw/a.npy",
        bucket.folder / "raw/b.npy",
        "-o",
        tmp_path / "set",
        "--shard-size",
        4,
        "-q",
    )
    assert local.exit_code == 0, local.output
    written = contents(bucket.folder / "set")
    expected = contents(tmp_path / "set")
    assert {name: written[name] for name in written if ".tar" in name} == {
        name: expected[name] for name in expected if ".tar" in name
    }
    fingerprints = [json.loads(files["dataset_metadata.json"])["fingerprint"] for files in (written, expected)]
    assert fingerprints[0] == fingerprints[1]
    assert not (tmp_path / "s3:").exists()


def test_a_dataset_that_is_there_is_replaced_only_if_asked_for(bucket: Endpoint) -> None:
    where = ("convert", f"{bucket.url}/raw/a.npy", "-o", bucket.url / "set", "-q")
    assert run(*where).exit_code == 0
    again = run(*where)
    assert again.exit_code == 1
    assert "holds a dataset already. Replace it with --overwrite" in again.output
    assert run(*where, "--overwrite").exit_code == 0
    assert run(*where, "--resume").exit_code == 0


def test_an_endpoint_is_given_by_an_option(bucket: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    found = run(
        "convert", f"{bucket.url}/raw/a.npy", "-o", bucket.url / "set", "-q", "--endpoint", bucket.address, "--json"
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["total_samples"] == 5


def test_a_killed_conversion_is_resumed(bucket: Endpoint, tmp_path: Path) -> None:
    where = [f"{bucket.url}/raw/*.npy", "-o", str(bucket.url / "set"), "--shard-size", "2", "-q"]
    bucket.break_requests({"kind": "stall", "seconds": 600, "method": "P*", "key": "set/shard_000003.tar"})
    process = subprocess.Popen([sys.executable, "-m", "penstock", "convert", *where], env=dict(os.environ))
    while not (bucket.folder / "set/shard_000002.tar.index").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    bucket.reset()
    assert not (bucket.folder / "set/dataset_metadata.json").exists()
    refused = run("convert", *where)
    assert "holds an unfinished conversion. Resume it with --resume" in refused.output
    bucket.reset_counts()
    assert run("convert", *where, "--resume").exit_code == 0
    assert bucket.n_requests("POST", "set/shard_000000.tar") == bucket.n_requests("PUT", "set/shard_000000.tar") == 0
    assert json.loads((bucket.folder / "set/dataset_metadata.json").read_bytes())["total_samples"] == 10


def test_options_for_urls_without_a_url_are_refused(bucket: Endpoint, tmp_path: Path) -> None:
    found = run("convert", bucket.folder / "raw/a.npy", "-o", tmp_path / "set", "--cache", tmp_path / "cache")
    assert found.exit_code == 2
    assert "--cache must be left out: it is for URLs, and none of the inputs is one" in found.output
    found = run("convert", bucket.folder / "raw/a.npy", "-o", bucket.url / "set", "--anonymous")
    assert "--anonymous is for inputs at URLs, and none of them is one" in found.output
