"""The checks of the demo: they must fail if anything differs. The whole demo runs in test_story.py."""

import copy
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from penstock import PenstockError, TarSource, create_shards_from_arrays
from penstock.demo import damage as demo_damage
from penstock.demo import judge as demo_judge
from penstock.demo.process import Processes
from penstock.demo.story import Story
from penstock.demo.task import QUICK, Task, digest, source_and_plan, task_from_json
from penstock.shard.index_tars import Problem
from penstock.shard.verify import verify_shards

_ITEMS = 70
_SCALE = replace(QUICK, epochs=3, batch_size=16, checkpoint_steps=5, memory_bytes=1_000_000)
_SAVED, _KILLED = 10, 13


def _arrays():
    numbers = np.arange(_ITEMS, dtype=np.float32)[:, None, None]
    behavior = numbers + np.array([[0.25, 0.5], [0.75, 0.125]], np.float32)
    return {"spikes": np.repeat(numbers, 3, axis=1), "lfp": np.repeat(numbers, 4, axis=2), "behavior": behavior}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "train"
    create_shards_from_arrays(folder, _arrays(), shard_size=20)
    return folder


@pytest.fixture
def tasks(shards, tmp_path):
    """The files of a whole, a killed and a resumed training that agree."""
    shutil.copytree(shards, tmp_path / "shards" / "train")
    (tmp_path / "runs").mkdir()
    whole = Task(str(tmp_path), "whole", 2, 1, _SCALE)
    killed, resumed = (replace(whole, name=name) for name in ("killed", "resumed"))
    _, plan = source_and_plan(whole)
    behavior = _arrays()["behavior"]
    draws = [draw for epoch in range(3) for draw in plan.epoch(epoch).draws(range(plan.n_batches))]
    steps = [
        {
            "step": number,
            "items": [digest(behavior[item]) for item in draw.items],
            "loss": (1 / (1 + number)).hex(),
        }
        for number, draw in enumerate(draws)
    ]
    for task, some in ((whole, steps), (killed, steps[:_KILLED]), (resumed, steps[_SAVED:])):
        _write_steps(task, some)
        hashes = [plan.order_hash(epoch) for epoch in range(3)]
        task.write_report({"private_bytes": 500_000, "order_hashes": hashes, "subjects": {}})
        np.save(task.path("weights.npy"), np.arange(5, dtype=np.float32))
    return whole, killed, resumed, plan


def _write_steps(task, steps):
    task.path("steps").write_text("".join(json.dumps(step) + "\n" for step in steps))


def _refused(story, capsys):
    """What the story says no to, as it is kept and as it is told."""
    refused = [what for what, holds, _ in story.checks if not holds]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("   NO ")]
    assert len(told) == len(refused)
    assert all(what in line for what, line in zip(refused, told, strict=True))
    assert story.holds == (not refused)
    return refused


def _judged(tasks, capsys):
    story = Story()
    demo_judge.compare(*tasks, story)
    assert len(story.checks) == 8
    return _refused(story, capsys)


def test_equal_trainings_are_found_equal(tasks, capsys):
    assert _judged(tasks, capsys) == []


def test_a_window_that_differs_is_found(tasks, capsys):
    resumed = tasks[2]
    steps = resumed.steps()
    steps[-1]["items"][3] = steps[-1]["items"][2]
    _write_steps(resumed, steps)
    expected = ["Same windows in every batch", "Same windows as in the plan", "Every window once per epoch"]
    assert _judged(tasks, capsys) == expected


def test_two_windows_in_each_others_place_are_found(tasks, capsys):
    for task in tasks[:3]:
        steps = task.steps()
        for step in steps:
            if step["step"] == 12:
                step["items"][:2] = step["items"][1::-1]
        _write_steps(task, steps)
    assert _judged(tasks, capsys) == ["Same windows as in the plan"]


def test_a_batch_that_is_left_out_is_found(tasks, capsys):
    resumed = tasks[2]
    _write_steps(resumed, resumed.steps()[:-1])
    assert "Same windows in every batch" in _judged(tasks, capsys)


def test_a_last_bit_of_a_loss_is_found(tasks, capsys):
    resumed = tasks[2]
    steps = resumed.steps()
    steps[4]["loss"] = float(np.nextafter(float.fromhex(steps[4]["loss"]), 1)).hex()
    _write_steps(resumed, steps)
    assert _judged(tasks, capsys) == ["Same loss in every step"]


def test_a_redone_step_that_comes_out_differently_is_found(tasks, capsys):
    killed = tasks[1]
    steps = killed.steps()
    steps[_KILLED - 1]["loss"] = (0.5).hex()
    _write_steps(killed, steps)
    assert _judged(tasks, capsys) == ["Same steps when repeated"]


def test_a_last_bit_of_a_weight_is_found(tasks, capsys):
    weights = np.arange(5, dtype=np.float32)
    weights[2] = np.nextafter(weights[2], np.float32(9))
    np.save(tasks[2].path("weights.npy"), weights)
    assert _judged(tasks, capsys) == ["Same weights at the end"]


def test_another_order_and_too_much_memory_are_found(tasks, capsys):
    tasks[2].write_report({"private_bytes": 1_500_000, "order_hashes": ["0", "1", "2"]})
    assert _judged(tasks, capsys) == ["Same hash of each epoch's order", "Within the budget of 1 MB"]


def test_half_a_line_in_the_log_of_a_killed_training_does_not_count(tasks):
    killed = tasks[1]
    with killed.path("steps").open("a") as log:
        log.write('{"step": 13, "ite')
    assert [step["step"] for step in killed.steps()] == list(range(_KILLED))


def test_windows_are_known_by_what_is_in_them(shards):
    numbers = demo_judge.numbers_by_digest(shards)
    assert [numbers[digest(row)] for row in _arrays()["behavior"]] == list(range(_ITEMS))


def test_a_task_is_the_same_on_the_other_side_of_a_pipe(tasks):
    task = replace(tasks[1], hold_at=7, resume="whole")
    assert task_from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        ({"r2": 0.7, "mean": -0.01, "shuffled": -0.5}, True),
        ({"r2": 0.2, "mean": -0.01, "shuffled": -0.5}, False),
        ({"r2": 0.5, "mean": -0.01, "shuffled": 0.6}, False),
        ({"r2": float("nan"), "mean": 0.0, "shuffled": 0.0}, False),
    ],
)
def test_decoding_that_chance_could_do_is_none(tasks, scores, holds):
    tasks[0].write_report({"subjects": {"sim-01": {"r2": 0.9, "mean": 0.0, "shuffled": 0.0}, "sim-02": scores}})
    story = Story(quiet=True)
    demo_judge.judge_decoding(tasks[0], story)
    assert [holds for _, holds, _ in story.checks] == [True, holds]


def test_a_story_without_a_comparison_does_not_hold():
    assert not Story(quiet=True).holds


def test_a_stop_is_heeded_at_the_next_word_and_a_second_one_at_once():
    story = Story(quiet=True)
    story.stop(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        story.progress("step", 1, 2, seconds=1.0)
    with pytest.raises(KeyboardInterrupt):
        story.say("on and on")
    with pytest.raises(SystemExit):
        story.stop(SystemExit(143))


def test_no_subject_to_decode_is_no_success(tasks):
    tasks[0].write_report({"subjects": {}})
    story = Story(quiet=True)
    demo_judge.judge_decoding(tasks[0], story)
    assert story.checks == [("Subjects are held out", False, "there are none")]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tasks, tmp_path):
    """A damaged copy, and what a process that reads it would leave."""
    healthy = tmp_path / "shards" / "train"
    damage = demo_damage.copy_damaged(healthy, tmp_path / "damaged", 47)
    plan = tasks[3]
    batches = [
        {"shapes": [[len(draw.items), 3, 1]], "items": [f"digest-{item}" for item in draw.items]}
        for draw in plan.epoch(0).draws(range(plan.n_batches))
    ]
    found = {
        "error": {"shard": damage.shard, "item": 47, "message": "Damaged"},
        "quarantine": [{"shard": damage.shard, "item": 47}],
        "healthy": batches,
        "replaced": copy.deepcopy(batches),
    }
    for batch in found["replaced"]:
        batch["items"] = ["digest-5" if name == "digest-47" else name for name in batch["items"]]
    return damage, [Problem(damage.shard, 47, "checksum")], found, plan


def _damage_judged(damaged, capsys):
    story = Story()
    demo_damage.judge_damage(*damaged, story)
    assert len(story.checks) == 6
    return _refused(story, capsys)


def test_the_copy_differs_in_one_bit_of_the_item_and_the_original_in_none(damaged, tmp_path, shards):
    damage, copied = damaged[0], tmp_path / "damaged"
    assert (damage.item, damage.shard) == (47, "shard_000002.tar")
    for path in sorted(shards.iterdir()):
        before, after = (np.frombuffer((folder / path.name).read_bytes(), np.uint8) for folder in (shards, copied))
        turned = np.unpackbits(before ^ after)
        assert turned.sum() == (path.name == damage.shard)
        if turned.any():
            assert int(np.flatnonzero(before != after)[0]) == damage.byte
        assert (tmp_path / "shards" / "train" / path.name).read_bytes() == path.read_bytes()
    _, problems = verify_shards(copied)
    assert [(problem.shard, problem.item) for problem in problems] == [(damage.shard, 47)]
    assert (TarSource(copied, fields=["lfp"]).take(np.array([47]))["lfp"] == 47).all()


def test_damage_that_is_found_and_replaced_is_judged_so(damaged, capsys):
    assert _damage_judged(damaged, capsys) == []


def test_another_item_in_the_error_is_found(damaged, capsys):
    damaged[2]["error"]["item"] = 48
    assert _damage_judged(damaged, capsys) == ["The error names shard and item"]


def test_an_error_that_did_not_come_is_found(damaged, capsys):
    damaged[2]["error"] = None
    assert _damage_judged(damaged, capsys) == ["The error names shard and item"]


def test_damage_that_verifying_or_the_quarantine_misses_is_found(damaged, capsys):
    damaged[1].clear()
    damaged[2]["quarantine"].append({"shard": "shard_000000.tar", "item": 3})
    refused = ["Verify finds it, and nothing else", "Quarantine lists it, and nothing else"]
    assert _damage_judged(damaged, capsys) == refused


def test_a_batch_of_another_shape_is_found(damaged, capsys):
    damaged[2]["replaced"][2]["shapes"][0][0] -= 1
    assert _damage_judged(damaged, capsys) == ["Every batch keeps its shape"]


def test_another_item_that_differs_is_found(damaged, capsys):
    items = damaged[2]["replaced"][1]["items"]
    place = next(number for number, name in enumerate(items) if name not in ("digest-5", "digest-47"))
    items[place] = "digest-other"
    assert _damage_judged(damaged, capsys) == ["All other windows are bit-equal"]


def test_items_that_are_missing_at_the_end_are_found(damaged, capsys):
    damaged[2]["replaced"].pop()
    refused = _damage_judged(damaged, capsys)
    assert {"Every batch keeps its shape", "All other windows are bit-equal"} <= set(refused)


def test_a_bad_item_that_is_delivered_is_found(damaged, capsys):
    for batch in damaged[2]["replaced"]:
        batch["items"] = ["digest-broken" if at == "digest-47" else name for at, name in _paired(damaged[2], batch)]
    assert _damage_judged(damaged, capsys) == ["A healthy window takes its place"]


def _paired(found, batch):
    return zip(found["healthy"][found["replaced"].index(batch)]["items"], batch["items"], strict=True)


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_that_fails_is_told_in_one_line_and_ends(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = Task(str(tmp_path), "whole", 2, 1, _SCALE)
    with Processes(tmp_path) as processes:
        process = processes.start()
        said = rf"^Process {process.number} of the demo \(whole\) failed: ImportError: no torch today$"
        with pytest.raises(PenstockError, match=said):
            process.do(task, Story(quiet=True), steps=3)
        assert (tmp_path / "caches").exists()
    assert not (tmp_path / "caches").exists()


def test_caches_go_where_the_processes_have_theirs_and_settings_come_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    with Processes(tmp_path) as processes, processes.redirect_caches():
        assert os.environ["XDG_CACHE_HOME"] == os.environ["MPLCONFIGDIR"] == str(tmp_path / "caches")
    assert os.environ["XDG_CACHE_HOME"] == "/elsewhere"
    assert "MPLCONFIGDIR" not in os.environ
