"""The demo in its quick form, like a user runs it, and its checks, which must fail if anything differs."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from penstock_test_parts import eventually
from penstock_test_processes import is_group_gone
from typer.testing import CliRunner

from examples.demo.checks import check_damage, check_decoding, compare, copy_damaged
from examples.demo.settings import Settings, digest
from penstock import create_shards_from_arrays
from penstock.cli import app
from penstock.shard import verify_shards
from penstock.shard.index_tars import Problem
from penstock.shard.manifest import Manifest

_ROOT = Path(__file__).parents[2]
_ITEMS, _SAVED, _KILLED = 70, 10, 13

pytestmark = pytest.mark.timeout(900)  # the first of these tests waits for the story


def _command(place: Path, *arguments: str) -> dict:
    """What starts the demo where every place that it might write to is an empty folder of its own."""
    for name in ("home", "temporary"):
        (place / name).mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    places = {"HOME": str(place / "home"), "TMPDIR": str(place / "temporary")}
    args = [sys.executable, "-m", "examples.demo", "--quick", *arguments]
    return {"args": args, "env": {**environment, **places}, "cwd": _ROOT, "text": True}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo")
    command = _command(place, "--seed", "3", "--keep", str(place / "files"))
    done = subprocess.run(**command, capture_output=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, place / "files"


def test_every_comparison_holds_and_is_one_of_the_page_about_the_demo(story):
    text, files = story
    checks = {line[8:46].strip() for line in text.splitlines() if line.startswith("   yes ")}
    assert len(checks) == 17  # one subject is held out; of the full demo, two are
    assert f"All {len(checks)} checks passed." in text
    assert "SIGKILL after" in text
    page = (_ROOT / "docs" / "tutorial" / "what-the-demo-shows.md").read_text()
    named = {what for what in checks if " is decoded " not in what and "Within the budget" not in what}
    assert named <= {line[8:46].strip() for line in page.splitlines() if line.startswith("   yes ")}
    chapters = [line for line in text.splitlines() if line[:1].isdecimal()]
    assert len(chapters) == 7
    assert [chapter for chapter in chapters if chapter not in page] == []
    assert "The Penstock demo" in (files / "report.html").read_text()


def test_it_writes_where_it_is_told_to_and_nowhere_else(story):
    _, files = story
    assert [list((files.parent / name).iterdir()) for name in ("home", "temporary")] == [[], []]
    assert sorted(path.name for path in files.iterdir()) == ["damaged", "recordings", "report.html", "runs", "shards"]


def test_the_command_that_is_shown_makes_the_same_shards(story, tmp_path, monkeypatch):
    text, files = story
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith("penstock convert"))
    words = " ".join(line.strip().rstrip("\\") for line in lines[start : start + 3]).replace("'", "").split()
    words[words.index("--output") + 1] = str(tmp_path / "shards")
    monkeypatch.chdir(files)
    made = CliRunner().invoke(app, words[1:])
    assert made.exit_code == 0, made.output
    for name in ("train", "test"):
        paths = [folder / "shards" / name / "dataset_metadata.json" for folder in (files, tmp_path)]
        assert Manifest.read(paths[0]).fingerprint == Manifest.read(paths[1]).fingerprint


def test_a_folder_in_use_is_refused(story):
    args = [sys.executable, "-m", "examples.demo", "--quick", "--keep", str(story[1])]
    done = subprocess.run(args, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--keep: must be a new or empty folder" in done.stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_demo_with_all_its_processes_and_removes_the_files(tmp_path, sent, code):
    temporary, deadline = tmp_path / "temporary", time.monotonic() + 300
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(**_command(tmp_path), **pipes) as started:
        try:
            while not any(temporary.glob("*/runs/whole.json")):
                assert started.poll() is None, started.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # Ctrl-C goes to all processes of a terminal, a termination to the one that is named.
            (os.killpg if sent == signal.SIGINT else os.kill)(started.pid, sent)
            _, errors = started.communicate(timeout=300)
        finally:
            started.kill()
    assert started.returncode == code, errors
    assert "Traceback" not in errors
    assert [list((tmp_path / name).iterdir()) for name in ("home", "temporary")] == [[], []]
    assert eventually(lambda: is_group_gone(started.pid))


# -- the comparisons ---------------------------------------------------------------------------------------------------


def _arrays():
    numbers = np.arange(_ITEMS, dtype=np.float32)[:, None, None]
    behavior = numbers + np.array([[0.25, 0.5], [0.75, 0.125]], np.float32)
    return {"spikes": np.repeat(numbers, 3, axis=1), "lfp": np.repeat(numbers, 4, axis=2), "behavior": behavior}


@pytest.fixture
def trainings(tmp_path):
    """The files of a whole, a killed and a resumed training that agree."""
    whole = replace(Settings(str(tmp_path), 1).quick(), epochs=3, batch_size=16, memory_bytes=1_000_000)
    create_shards_from_arrays(whole.shards("train"), _arrays(), shard_size=20)
    (tmp_path / "runs").mkdir()
    killed, resumed = (replace(whole, name=name) for name in ("killed", "resumed"))
    _, plan = whole.open()
    draws = [draw for epoch in range(3) for draw in plan.epoch(epoch).draws(range(plan.n_batches))]
    behavior = _arrays()["behavior"]
    steps = [
        {"step": number, "items": [digest(behavior[item]) for item in draw.items], "loss": (1 / (1 + number)).hex()}
        for number, draw in enumerate(draws)
    ]
    for training, some in ((whole, steps), (killed, steps[:_KILLED]), (resumed, steps[_SAVED:])):
        _write_steps(training, some)
        hashes = [plan.order_hash(epoch) for epoch in range(3)]
        training.path("result.json").write_text(json.dumps({"private_bytes": 500_000, "order_hashes": hashes}))
        np.save(training.path("weights.npy"), np.arange(5, dtype=np.float32))
    return whole, killed, resumed, plan


def _write_steps(training, steps):
    training.path("steps").write_text("".join(json.dumps(step) + "\n" for step in steps))


def _edit(which, change):
    """Return what changes the log of one training."""

    def edit(trainings):
        steps = trainings[which].steps()
        change(steps)
        _write_steps(trainings[which], steps)

    return edit


def _change_weight(trainings):
    weights = np.arange(5, dtype=np.float32)
    weights[2] = np.nextafter(weights[2], np.float32(9))
    np.save(trainings[2].path("weights.npy"), weights)


def _change_order(trainings):
    result = {"private_bytes": 1_500_000, "order_hashes": ["0", "1", "2"]}
    trainings[2].path("result.json").write_text(json.dumps(result))


def _next_loss(steps):
    steps[4]["loss"] = float(np.nextafter(float.fromhex(steps[4]["loss"]), 1)).hex()


def _swap_items(trainings):
    def swap(steps):
        for step in steps:
            if step["step"] == 12:
                step["items"][:2] = step["items"][1::-1]

    for which in range(3):
        _edit(which, swap)(trainings)


def _half_a_line(trainings):
    with trainings[1].path("steps").open("a") as log:
        log.write('{"step": 13, "ite')


_WINDOWS = ["Same windows in every batch", "Same windows as in the plan", "Every window once per epoch"]
_DIFFERENCES = {
    "none": (lambda _: None, []),
    "half a line of a killed training": (_half_a_line, []),
    "another window": (_edit(2, lambda steps: steps[-1]["items"].__setitem__(3, steps[-1]["items"][2])), _WINDOWS),
    "a batch is left out": (
        _edit(2, lambda steps: steps.pop()),
        ["Same windows in every batch", "Same loss in every step", *_WINDOWS[1:]],
    ),
    "two windows change places in all of them": (_swap_items, ["Same windows as in the plan"]),
    "the last bit of a loss": (_edit(2, _next_loss), ["Same loss in every step"]),
    "a step that is repeated": (
        _edit(1, lambda steps: steps[_KILLED - 1].update(loss=(0.5).hex())),
        ["Same steps when repeated"],
    ),
    "the last bit of a weight": (_change_weight, ["Same weights at the end"]),
    "another order, more memory": (_change_order, ["Same hash of each epoch's order", "Within the budget of 1 MB"]),
}


@pytest.mark.parametrize("difference", _DIFFERENCES)
def test_a_difference_between_trainings_is_found(trainings, difference):
    change, expected = _DIFFERENCES[difference]
    change(trainings)
    checks = list(compare(*trainings))
    assert len(checks) == 8
    assert [check.what for check in checks if not check.holds] == expected


@pytest.mark.parametrize(
    ("scores", "holds"),
    [((0.7, -0.01, -0.5), True), ((0.2, -0.01, -0.5), False), ((0.5, -0.01, 0.6), False), ((np.nan, 0, 0), False)],
)
def test_decoding_that_chance_could_do_is_none(scores, holds):
    subjects = {"sim-02": dict(zip(("r2", "mean", "shuffled"), scores, strict=True))}
    assert [check.holds for check in check_decoding(subjects)] == [holds]
    assert [check.holds for check in check_decoding({})] == [False]


def _set_item(name, which, value):
    return lambda found, _: found[name][which[0]]["items"].__setitem__(which[1], value)


_DAMAGES = {
    "none": (lambda _, __: None, []),
    "another item in the error": (lambda found, _: found["error"].update(item=48), ["The error names shard and item"]),
    "no error": (lambda found, _: found.update(error=None), ["The error names shard and item"]),
    "verification misses it": (lambda _, problems: problems.clear(), ["Verify finds it, and nothing else"]),
    "the quarantine lists more": (
        lambda found, _: found["quarantine"].append({"shard": "shard_000000.tar", "item": 3}),
        ["Quarantine lists it, and nothing else"],
    ),
    "a batch of another shape": (
        lambda found, _: found["replaced"][2]["shapes"][0].__setitem__(0, 1),
        ["Every batch keeps its shape"],
    ),
    "another item differs": (_set_item("healthy", (0, 0), "other"), ["All other windows are bit-equal"]),
}


@pytest.mark.parametrize("difference", _DAMAGES)
def test_damage_is_located_and_judged(trainings, difference):
    whole, plan = trainings[0], trainings[3]
    damage = copy_damaged(whole.shards("train"), whole.damaged, 47)
    before, after = (np.fromfile(folder / damage.shard, np.uint8) for folder in (whole.shards("train"), whole.damaged))
    assert np.unpackbits(before ^ after).sum() == 1
    _, problems = verify_shards(whole.damaged)
    assert [(problem.shard, problem.item) for problem in problems] == [(damage.shard, 47)]
    batches = [
        {"shapes": [[len(draw.items), 3, 1]], "items": [f"digest-{item}" for item in draw.items]}
        for draw in plan.epoch(0).draws(range(plan.n_batches))
    ]
    entry = {"shard": damage.shard, "item": 47}
    found = {"error": dict(entry), "quarantine": [entry], "healthy": batches, "replaced": copy.deepcopy(batches)}
    for batch in found["replaced"]:
        batch["items"] = ["digest-5" if name == "digest-47" else name for name in batch["items"]]
    problems, (change, expected) = [Problem(damage.shard, 47, "checksum")], _DAMAGES[difference]
    change(found, problems)
    assert [check.what for check in check_damage(damage, problems, found, plan) if not check.holds] == expected
