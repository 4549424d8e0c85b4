"""`penstock inspect` and `penstock tune` say how fast the storage is, and which order fits it, in words and as JSON."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from penstock import create_shards_from_arrays
from penstock.cli import app
from penstock.observe.storage import look as storage
from penstock.observe.storage.device import Device
from penstock.observe.storage.measure import StorageSpeed

DISK = StorageSpeed(Device("xfs", "/data", True), 1000, 150e6, 90, 200, n_timed=300)
NVME = StorageSpeed(Device("ext4", "/", False), 1000, 2e9, 900_000, 1_900_000, n_timed=300)
TUNE = ("--budget", "0.1", "--max-workers", "0", "--quiet")


@pytest.fixture(autouse=True, scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, an array, and two zarr stores of which only one is compressed; value = row."""
    folder = tmp_path_factory.mktemp("data")
    rows = np.arange(600)[:, None] + np.zeros(125)  # 1 kB each
    create_shards_from_arrays(folder / "shards", {"x": rows}, shard_size=200)
    np.save(folder / "rows.npy", rows)
    for name, codec in (("packed.zarr", "auto"), ("raw.zarr", None)):
        stored = zarr.create_array(folder / name, shape=rows.shape, chunks=(50, 125), dtype="f8", compressors=codec)
        stored[:] = rows
    np.savez(folder / "pair.npz", a=rows, b=rows)
    return folder


@pytest.fixture(autouse=True)
def here(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(output: str) -> dict[str, str]:
    """Return the lines about storage and order."""
    return dict(re.findall(r"^(Storage|Order) +(.*)$", output, re.MULTILINE))


@pytest.mark.parametrize("command", [("inspect", "--storage"), ("tune", *TUNE)], ids=["inspect", "tune"])
@pytest.mark.parametrize(
    ("where", "order"),
    [
        ("shards", "WindowShuffle(window=3) with chunk_items=200, "),
        ("rows.npy", "WindowShuffle(window=1) with chunk_items=600, "),
        ("packed.zarr", "WindowShuffle(window=12) over chunks of 50 items, "),
        ("raw.zarr", "WindowShuffle(window=12) over chunks of 50 items, "),
    ],
)
def test_a_disk_gets_windows(command: tuple[str, ...], where: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "measure_storage", lambda *_: DISK)
    said = facts(run(command[0], where, *command[1:]))
    assert said["Storage"] == (
        "/data (xfs): 150 MB/s in sequence; random reads of 1 kB: 90/s one at a time, 200/s (0 MB/s) 32 at a time."
    )
    assert said["Order"].startswith(f"{order}mixing score ")
    found = json.loads(run(command[0], where, *command[1:], "--json"))
    assert found["storage"] == DISK.to_dict()
    assert said["Order"].startswith(found["order"]["order"])
    assert 0 <= found["order"]["mixing"] <= 1
    assert found["order"]["reason"] in said["Order"]


@pytest.mark.parametrize("where", ["shards", "rows.npy", "raw.zarr"])
def test_fast_random_reads_get_a_shuffle(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "measure_storage", lambda *_: NVME)
    order = facts(run("inspect", "--storage", where))["Order"]
    assert re.fullmatch(
        r"Shuffle\(\), mixing score \d\.\d\d of 1: random reads of an item reach 0\.\d\d of the speed in sequence\.",
        order,
    )


def test_what_is_measured_is_an_item_or_a_compressed_chunk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def answer(files: list[Path], item_bytes: float, *_: Any) -> StorageSpeed:
        asked["files"], asked["item_bytes"] = [Path(path).name for path in files], item_bytes
        return DISK

    monkeypatch.setattr(storage, "measure_storage", answer)
    run("inspect", "--storage", "rows.npy")
    assert asked == {"files": ["rows.npy"], "item_bytes": 1000}
    run("inspect", "--storage", "raw.zarr")
    assert (len(asked["files"]), asked["item_bytes"]) == (12, 1000)
    run("inspect", "--storage", "packed.zarr")
    sizes = [path.stat().st_size for path in data.glob("packed.zarr/c/**/*") if path.is_file()]
    assert (len(asked["files"]), asked["item_bytes"]) == (12, sum(sizes) / 12)
    run("inspect", "--storage", "shards")
    assert asked["files"] == [f"shard_{number:06d}.tar" for number in range(3)]
    assert 1000 < asked["item_bytes"] < 4000


def test_real_files_that_are_small_are_unknown_and_recordings_have_no_order() -> None:
    for where in ("shards", "rows.npy", "raw.zarr"):
        found = json.loads(run("inspect", "--storage", where, "--json"))
        assert found["storage"]["sequential"] is None
        is_memory = found["storage"]["unknown"] == "in memory: the file system is"
        assert is_memory or found["storage"]["unknown"].endswith(" MB are too few to measure")
        reason = "the files are in memory" if is_memory else "the speed is unknown, and "
        assert found["order"]["reason"].startswith(reason)
    found = json.loads(run("inspect", "--storage", "pair.npz", "--json"))
    assert (found["order"], found["storage"]["sequential"]) == (None, None)
    assert list(facts(run("inspect", "--storage", "pair.npz"))) == ["Storage"]
    assert facts(str(storage.look_at_storage("rows.npy"))) == facts(run("inspect", "--storage", "rows.npy"))


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_lines_that_fit_it(columns: int) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "penstock", "inspect", "--storage", "rows.npy"]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    said = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            said += os.read(leader, 65536)
        except OSError:  # all is read
            break
    os.close(leader)
    assert process.wait(300) == 0
    lines = said.decode().replace("\r", "").splitlines()
    assert any(line.startswith("  Storage   ") for line in lines)
    assert any(line.startswith("  Order     ") for line in lines)
    assert max(map(len, lines)) <= columns
