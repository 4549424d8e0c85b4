"""The whole demo, in its quick form, run in a separate process like a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from penstock_test_parts import eventually
from penstock_test_processes import is_group_gone
from typer.testing import CliRunner

from penstock import MissingDependency, OptionError, TarSource
from penstock.cli import app
from penstock.demo import run as demo
from penstock.shard.manifest import Manifest
from penstock.transform import Moments

_CHAPTERS = (
    "1. The recordings",
    "2. Recordings become shards",
    "3. Every byte is verified",
    "4. A decoder from spikes to movement",
    "5. The same training is killed",
    "6. One bit of one shard is flipped",
    "7. Speed, and the report",
)


def _command(place: Path, *arguments: str) -> dict:
    """What starts the demo where every place that it might write to is an empty folder of its own."""
    for name in ("home", "temporary", "here"):
        (place / name).mkdir()
    left_out = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TERM")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        "args": [sys.executable, "-m", "penstock", "demo", "--quick", *arguments],
        "env": {**environment, "HOME": str(place / "home"), "TMPDIR": str(place / "temporary")},
        "cwd": place / "here",
    }


def _running(word: str) -> list[str]:
    """Return the command lines of all processes that name `word`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line:
            lines.append(line)
    return lines


pytestmark = pytest.mark.timeout(900)  # the first of these tests waits for the story


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The quick story, once: what it said, and where its files are."""
    place = tmp_path_factory.mktemp("demo")
    command = _command(place, "--seed", "3", "--keep", "files")
    done = subprocess.run(**command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, place / "here" / "files"


def test_the_story_is_told_to_its_end(told):
    done, files = told
    lines = done.stdout.splitlines()
    places = [next(n for n, line in enumerate(lines) if line.startswith(chapter)) for chapter in _CHAPTERS]
    assert places == sorted(places)
    assert "SIGKILL after" in done.stdout
    assert done.stderr == ""
    yes = [line for line in lines if line.startswith("   yes ")]
    assert not [line for line in lines if line.startswith("   NO ")]
    assert f"All {len(yes)} checks passed." in done.stdout
    assert str(files / "report.html") in done.stdout


def test_it_is_plain_text_where_stdout_is_no_terminal(told):
    assert not set(told[0].stdout) & {"\r", "\033"}
    assert max(len(line) for line in told[0].stdout.splitlines() if str(told[1]) not in line) <= 120


def test_it_writes_where_it_is_told_to_and_nowhere_else(told):
    _, files = told
    place = files.parents[1]
    assert {path.name: [below.name for below in path.iterdir()] for path in place.iterdir()} == {
        "home": [],
        "temporary": [],
        "here": ["files"],
    }
    kept = sorted(path.name for path in files.iterdir())
    assert kept == ["damaged", "recordings", "report.html", "runs", "shards"]
    assert _running(str(place)) == []


def test_the_report_is_a_whole_page_about_the_demo(told):
    page = (told[1] / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert "The Penstock demo" in page
    quarantined = json.loads((told[1] / "damaged" / "quarantine.jsonl").read_text())
    assert f"item {quarantined['item']:,} in quarantine" in page


def test_subjects_are_decoded_of_whom_the_training_has_seen_nothing(told):
    _, files = told
    seen, held_out = (
        {
            entry["groups"]["subject"]
            for entry in Manifest.read(files / "shards" / name / "dataset_metadata.json").metadata["conversion"][
                "inputs"
            ]
        }
        for name in ("train", "test")
    )
    assert seen
    assert not seen & held_out
    subjects = json.loads((files / "runs" / "whole.report.json").read_text())["subjects"]
    assert set(subjects) == held_out
    for scores in subjects.values():
        assert scores["r2"] > 0.4
        assert max(scores["mean"], scores["shuffled"]) < 0.05


def test_what_spikes_are_standardised_with_is_of_the_training_split_alone(told):
    shards = told[1] / "shards"
    source = TarSource(shards / "train", fields=["spikes"])
    spikes = source.take(np.arange(len(source.index)))["spikes"].astype(np.float64)
    kept = source.manifest.metadata["statistics"]
    assert kept["of"] == "train"
    assert Moments.from_json(kept["fields"]["spikes"]).mean == pytest.approx(spikes.mean(axis=(0, 1)))


def test_the_command_that_is_shown_makes_the_same_shards(told, tmp_path, monkeypatch):
    done, files = told
    lines = done.stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith("penstock convert"))
    words = " ".join(line.strip().rstrip("\\") for line in lines[start : start + 3]).replace("'", "").split()
    words[words.index("--workers") + 1] = "1"  # the bytes do not depend on it
    words[words.index("--output") + 1] = str(tmp_path / "shards")
    monkeypatch.chdir(files)
    made = CliRunner().invoke(app, words[1:])
    assert made.exit_code == 0, made.output
    for name in ("train", "test"):
        there, here = (
            Manifest.read(folder / "shards" / name / "dataset_metadata.json") for folder in (files, tmp_path)
        )
        assert there.fingerprint == here.fingerprint


def test_a_directory_in_use_is_refused_without_a_traceback(told):
    before = sorted(told[1].rglob("*"))
    done = CliRunner().invoke(app, ["demo", "--quick", "--keep", str(told[1])])
    assert done.exit_code == 2
    assert f"--keep must be a new or empty directory, got {told[1]}, which is not empty." in done.stderr
    assert sorted(told[1].rglob("*")) == before


def test_it_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"Could not write the files of the demo: .*Give --keep another directory"):
        demo.run(keep=tmp_path / "file" / "below", quick=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(OptionError, match=r"The demo requires \d+ MB of free space in .*files, got 1 MB\."):
        demo.run(keep=tmp_path / "files")
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (["pynwb"], r"The demo needs pynwb; install it with: pip install 'penstock\[nwb\]'"),
        (["scipy", "matplotlib"], r"The demo needs scipy and matplotlib; .*'penstock\[nwb,report\]'"),
    ],
)
def test_a_package_that_is_missing_is_said_before_anything_is_done(tmp_path, monkeypatch, hidden, message, capsys):
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=message):
        demo.run(keep=tmp_path / "files", quick=True)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_negative_seed_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--seed", "-1", "--keep", str(tmp_path / "files")])
    assert done.exit_code == 2
    with pytest.raises(OptionError, match="seed"):
        demo.run(keep=tmp_path / "files", seed=-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("holds", [True, False])
def test_a_difference_that_the_demo_finds_is_an_exit_code_of_1(monkeypatch, holds):
    result = demo.DemoResult(holds, (("Same weights", holds, "5 numbers"),), 1.5, None, None)
    monkeypatch.setattr("penstock.demo.run.run", lambda **_: result)
    assert bool(result) == holds
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert done.exit_code == (0 if holds else 1)
    assert json.loads(done.stdout)["holds"] == holds


@pytest.mark.parametrize(
    ("sent", "code", "when"),
    [(signal.SIGINT, 130, "*/recordings/*.nwb"), (signal.SIGTERM, 143, "*/shards/train/.writing/*")],
)
def test_a_signal_ends_the_demo_with_all_its_processes_and_removes_the_files(tmp_path, sent, code, when):
    temporary, deadline = tmp_path / "temporary", time.monotonic() + 300
    with subprocess.Popen(
        **_command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as started:
        try:
            while not any(temporary.glob(when)):
                assert started.poll() is None, started.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # Ctrl-C goes to all processes of a terminal, a termination to the one that is named.
            (os.killpg if sent == signal.SIGINT else os.kill)(started.pid, sent)
            _, errors = started.communicate(timeout=300)
        finally:
            started.kill()
    assert started.returncode == code, errors
    assert b"Traceback" not in errors
    assert [list((tmp_path / name).iterdir()) for name in ("home", "temporary", "here")] == [[], [], []]
    assert _running(str(tmp_path)) == []
    assert eventually(lambda: is_group_gone(started.pid))


def test_the_page_about_the_demo_shows_what_the_demo_says(told):
    page = (Path(__file__).parents[2] / "docs" / "tutorial" / "what-the-demo-shows.md").read_text()
    there, here = (
        {line[8:46].strip() for line in text.splitlines() if line.startswith("   yes ")}
        for text in (page, told[0].stdout)
    )
    # Who is held out, and the budget, depend on the size of the demo.
    named = {what for what in here if " is decoded " not in what and "Within the budget" not in what}
    assert named <= there
    assert [chapter for chapter in _CHAPTERS if chapter not in page] == []
