"""`penstock inspect`, `verify` and `index` of a URL, as in a shell: exit codes, tables for people, JSON for scripts."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_test_shards import archive, flip_member, npy, uniform, write
from typer.testing import CliRunner

from penstock import TarSource
from penstock.cli import app


@pytest.fixture
def there(s3: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Endpoint:
    """A dataset of 23 items at a URL; credentials are in the environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "shards", uniform(0))
    shutil.copytree(tmp_path / "shards", s3.folder, dirs_exist_ok=True)
    return s3


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_inspect_shows_what_is_at_a_url(there: Endpoint) -> None:
    found = run("inspect", str(there.url), "--endpoint", there.address, "--item", "7")
    assert found.exit_code == 0, found.output
    local = run("inspect", "shards", "--item", "7").output
    assert found.output.partition("\n")[2] == local.partition("\n")[2]  # all but the first line, which names the place
    found = run("inspect", str(there.url), "--endpoint", there.address, "--storage")
    assert f"Storage  {there.url}: speed unknown: a URL is not measured." in found.output
    assert "WindowShuffle" in found.output


def test_a_url_that_lost_a_slash_is_one(there: Endpoint) -> None:
    """As `str(Path("s3://bucket/train"))` gives it, in a script."""
    found = run("check", str(there.url).replace("//", "/"), "--all", "--endpoint", there.address, "--quiet")
    assert (found.exit_code, "23 items in 6 shards" in found.output) == (0, True), found.output


def test_inspect_for_scripts(there: Endpoint) -> None:
    found = json.loads(run("inspect", str(there.url), "--endpoint", there.address, "--json").output)
    local = json.loads(run("inspect", "shards", "--json").output)
    assert found == local
    found = json.loads(run("inspect", str(there.url), "--endpoint", there.address, "--json", "--storage").output)
    assert (found["storage"]["mount"], found["storage"]["is_remote"]) == (str(there.url), True)


def test_verify_reads_a_url(there: Endpoint) -> None:
    found = run("check", str(there.url), "--all", "--endpoint", there.address, "--quiet")
    assert (found.exit_code, "23 items in 6 shards" in found.output) == (0, True), found.output
    flip_member(there.folder, "sample_000000005.x.npy")
    found = run("check", str(there.url), "--all", "--endpoint", there.address, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["problems"] == [
        {"shard": "shard_000001.tar", "item": 5, "reason": "the checksum of 'x.npy' does not match its bytes"}
    ]


def test_index_uploads_or_keeps_the_index(there: Endpoint, tmp_path: Path) -> None:
    tars = there.below("tars")
    for shard in range(2):
        archive(tars.folder / f"train-{shard}.tar", [{"x.npy": npy(np.int64(shard))}], first=shard)
    where = str(tars.url / "train-{0..1}.tar")
    kept = run("index", where, "--endpoint", there.address, "--output", "kept", "--quiet")
    assert (kept.exit_code, "2 items in 2 shards: x" in kept.output) == (0, True), kept.output
    assert [path.name for path in tars.folder.iterdir() if path.suffix != ".tar"] == []
    assert TarSource(tmp_path / "kept", store=there.options).take(np.array([1, 0]))["x"].tolist() == [1, 0]
    assert run("check", "kept", "--all", "--endpoint", there.address, "-q").exit_code == 0
    uploaded = run("index", where, "--endpoint", there.address, "--json")
    assert json.loads(uploaded.stdout)["folder"] == str(tars.url)
    assert TarSource(where, store=there.options).take(np.array([1, 0]))["x"].tolist() == [1, 0]


def test_what_is_not_there_is_one_line(there: Endpoint) -> None:
    for command in ("inspect", "tune"):
        found = run(command, f"{there.url}/nowhere", "--endpoint", there.address)
        assert found.exit_code != 0
        assert f"there is nothing at {there.url}/nowhere" in found.output
    found = run("index", "shards", "--output", "kept")
    assert "--output needs a URL, got shards" in found.output
    found = run("inspect", str(there.url), "--endpoint", "localhost")
    assert "endpoint must begin with http:// or https://" in found.output


def test_what_is_there_instead_is_said(there: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", there.address)
    shutil.copytree(there.folder, there.folder / "below" / "train")
    (there.folder / "below" / "mine").mkdir()
    archive(there.folder / "below" / "mine" / "a.tar", [{"x.npy": npy(np.int64(0))}], first=0)
    for where, message in (
        ("s3://bukcet/train", "NoSuchBucket"),
        (f"{there.url}/mit%20leer", "Names are taken as they are: write a space, not %20."),
        (f"{there.url}/below", f"the datasets are below it, such as {there.url}/below/train"),
        (f"{there.url}/below/mine/a.tar", f"Make one: `penstock index '{there.url}/below/mine/a.tar'`"),
        (f"{there.url}/a.npy", f"make a dataset of it: penstock convert {there.url}/a.npy --output DIR"),
        (f"{there.url}/a.zarr/", f"make a dataset of it: penstock convert {there.url}/a.zarr/ --output DIR"),
    ):
        found = run("inspect", where)
        assert (found.exit_code, message in found.output) == (2, True), found.output


def test_a_report_of_a_url(there: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", there.address)
    found = run("inspect", str(there.url), "--page", str(tmp_path / "r.html"))
    assert found.exit_code == 0, found.output
    page = (tmp_path / "r.html").read_text()
    assert "23 items" in page
    assert str(there.url) in page
    (there.folder / "shard_000003.tar").unlink()
    found = run("inspect", str(there.url), "--page", str(tmp_path / "r.html"), "--json")
    assert "shard_000003.tar is missing" in json.dumps(json.loads(found.stdout)["faults"])


@pytest.mark.parametrize("command", ["convert", "index", "inspect", "check", "tune"])
def test_help_teaches_urls(command: str) -> None:
    found = run(command, "--help").output
    assert "--endpoint" in found
    assert "--anonymous" in found
    assert "://" in found.partition("Examples")[2]
