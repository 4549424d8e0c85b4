"""`penstock convert` on real files: its output, its exit codes, and the files it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock import OptionError, TarSource
from penstock.cli import app
from penstock.convert import ConvertOptions
from penstock.recipes.webdataset import NWBToWebDatasetConverter


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of 20 rows each; value = 100 x file + row."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        np.save(tmp_path / f"rows{number}.npy", np.arange(20.0)[:, None] + 100 * number)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def values(folder: Path) -> list[float]:
    source = TarSource(folder)
    return source.take(np.arange(len(source.index)))["data"][:, 0].tolist()


def test_patterns_are_expanded_in_alphabetical_order(rows: Path) -> None:
    done = run("rows*.npy", "-o", "out", "--shard-size", "7", "--validate")
    assert done.exit_code == 0, done.output
    assert values(rows / "out") == [100.0 * file + row for file in range(3) for row in range(20)]
    assert "60 items in 9 shards" in done.stdout
    assert "no problems" in done.stdout


def test_a_dry_run_writes_nothing_and_counts_exactly(rows: Path) -> None:
    before = tree(rows)
    done = run("rows*.npy", "-o", "out", "--dry-run", "--json", "--split", "a=0.5,b=0.5")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["samples"] == 60
    assert sum(part["samples"] for part in found["splits"].values()) == 60
    assert tree(rows) == before
    run("rows*.npy", "-o", "out", "--split", "a=0.5,b=0.5")
    written = sum(path.stat().st_size for path in (rows / "out").rglob("*.tar"))
    assert abs(found["bytes"] - written) <= 0.1 * written


def test_the_result_as_json_is_the_manifest(rows: Path) -> None:
    done = run("rows0.npy", "-o", "out", "--json")
    assert json.loads(done.stdout)["total_samples"] == 20


def test_one_bad_file_fails_the_run_by_default_and_is_named_with_its_reason(rows: Path) -> None:
    (rows / "rows1.npy").write_bytes(b"no array")
    done = run("rows*.npy", "-o", "out")
    assert done.exit_code == 1
    assert "rows1.npy" in done.output
    assert "nothing was published" in done.output
    assert not (rows / "out").exists()
    done = run("rows*.npy", "-o", "out", "--skip-bad")
    assert done.exit_code == 0
    assert "Skipped: Could not read rows1.npy: it is not" in done.output
    assert "2 of 3 inputs" in done.output
    assert values(rows / "out") == [100.0 * file + row for file in (0, 2) for row in range(20)]


def test_an_existing_dataset_is_replaced_only_with_overwrite(rows: Path) -> None:
    assert run("rows0.npy", "-o", "out").exit_code == 0
    before = tree(rows / "out")
    done = run("rows1.npy", "-o", "out")
    assert (done.exit_code, tree(rows / "out")) == (1, before)
    assert "--overwrite" in done.output
    assert run("rows1.npy", "-o", "out", "--overwrite").exit_code == 0
    assert values(rows / "out")[0] == 100.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing*.npy"], "No file matches"),
        (["absent.npy"], "No such file or folder"),
        (["rows0.npy", "--overlap", "1.0", "--sequence-length", "4"], "must be a number >= 0 and < 1"),
        (["rows0.npy", "--format", "edf"], "--format must be one of"),
        (["rows0.npy", "--split", "a=0.5"], "add up to 1"),
        (["rows0.npy", "rows0.npy"], "must be given once"),
        (["rows0.npy", "--unit-filter", "quality"], "--unit-filter must be NAME=VALUE"),
        (["rows0.npy", "--units", "union"], "--units must be one of"),
        (["rows0.npy", "--field", "wheel"], "--field must be NAME=VALUE"),
        (["rows0.npy", "--field", "wheel=acquisition/wheel"], "--field applies only to NWB inputs"),
        (["rows0.npy", "--compression", "zip"], "--compression must be one of"),
        (["rows0.npy", "--resume", "--overwrite"], "At most one of --resume and --overwrite"),
        (["rows0.npy", "--bin-size-ms", "5"], "--bin-size-ms applies only to NWB inputs"),
        (["rows0.npy", "--channels", "mono"], "--channels applies only to audio inputs"),
        (["rows0.npy", "--fields", "a"], "--fields applies only to npz or zarr inputs"),
    ],
)
def test_invalid_options_are_refused_with_2_and_leave_nothing(rows: Path, arguments: list[str], words: str) -> None:
    done = run(*arguments, "-o", "out")
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert not (rows / "out").exists()


SLOW = """
import sys, time
from pathlib import Path
import numpy as np
import penstock as ps

def slow(path):
    for row in range(30):
        if row == 25 and not Path("go").exists():
            Path("reached").touch()
            time.sleep(60)
        yield {"data": np.array([float(row)])}

ps.convert_to_shards(["rows0.npy"], "out", format=slow, options=ps.convert.ConvertOptions(ps.shard.WriteOptions(5)),
                     resume="resume" in sys.argv, show_progress=False)
"""


def test_ctrl_c_publishes_nothing_and_resume_ends_with_the_same_bytes(rows: Path) -> None:
    (rows / "slow.py").write_text(SLOW)
    (rows / "go").touch()
    subprocess.run([sys.executable, "slow.py"], check=True, cwd=rows)
    whole = tree(rows / "out")
    (rows / "out").rename(rows / "whole")
    # The function runs to its end once to count items. Then it is read.
    stopped = 'COUNT.append(1) is None and len(COUNT) == 2 and not Path("go").exists()'
    (rows / "slow.py").write_text("COUNT = []\n" + SLOW.replace('not Path("go").exists()', stopped))
    (rows / "go").unlink()
    process = subprocess.Popen([sys.executable, "slow.py"], cwd=rows, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not (rows / "reached").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not (rows / "out" / "dataset_metadata.json").exists()
    assert (rows / "out" / ".writing" / "shard_000003.tar").exists()
    (rows / "go").touch()
    subprocess.run([sys.executable, "slow.py", "resume"], check=True, cwd=rows)
    assert tree(rows / "out") == whole


def test_arguments_that_would_be_ignored_are_refused(rows: Path) -> None:
    with pytest.raises(OptionError, match="must be set in options"):
        NWBToWebDatasetConverter("out", shard_size=5, options=ConvertOptions())


@pytest.mark.parametrize(
    "given",
    [
        ["--input", "rows2.npy", "rows0.npy", "--output", "out"],
        ["-o", "out", "-i", "rows2.npy", "-i", "rows0.npy"],
        ["--input=rows2.npy", "--output=out", "--input=rows0.npy"],
        ["rows2.npy", "-o", "out", "--input", "rows0.npy"],
    ],
)
def test_inputs_may_follow_an_option_and_keep_their_order(rows: Path, given: list[str]) -> None:
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert values(rows / "out") == [100.0 * file + row for file in (2, 0) for row in range(20)]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_rows_of_several_files_are_noted_and_the_option_that_it_names_makes_files_items(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        np.save(f"rec{number}.npy", np.full((4, 8), number))
    note = "Note: Each row of an array is an item (4 per file); --format files makes each file one."
    assert note in run("rec*.npy", "-o", "rows", *more).stderr
    assert (
        "Each row is an item (4 here); --format files makes each file one."
        in CliRunner().invoke(app, ["inspect", "rec0.npy"]).stdout
    )
    for option in (
        (
            "--format",
            "files",
        ),
        ("--sequence-length", "2"),
    ):
        found = run("rec*.npy", "-o", option[0][2:], *option)
        assert found.exit_code == 0
        assert "Each row" not in found.stderr
    assert TarSource("format").take(np.arange(3))["data"].tolist() == [np.full((4, 8), n).tolist() for n in range(3)]
    np.save("wide.npy", np.zeros((4, 9), int))
    assert "The shape of data differs" in run("rec0.npy", "wide.npy", "-o", "wide").stderr
