"""The demo's own judgement: it must say no wherever anything differs. The whole story runs in tests/test_cli.py."""

import json

import numpy as np
import pytest

from penstock import PenstockError
from penstock.recipes import demo

_SCALE = demo._Scale(256, width=32, hidden=4, batch_size=16, checkpoint_steps=5, memory_bytes=1_000_000)
_SAVED, _KILLED = 20, 23


@pytest.fixture
def tasks(tmp_path, capsys):
    """The files of a whole, a killed and a resumed training that agree."""
    demo._generate(tmp_path, _SCALE, seed=1, story=demo._Story())
    _, plan = demo._source_and_plan(tmp_path, _SCALE, seed=1)
    whole = demo._Task(str(tmp_path), "whole", 2, 1, _SCALE)
    killed, resumed = (demo.replace(whole, name=name) for name in ("killed", "resumed"))
    draws = [draw for epoch in range(2) for draw in plan.epoch(epoch).draws(range(plan.n_batches))]
    steps = [
        {"step": number, "items": draw.items.tolist(), "loss": (1 / (1 + number)).hex()}
        for number, draw in enumerate(draws)
    ]
    for task, some in ((whole, steps), (killed, steps[:_KILLED]), (resumed, steps[_SAVED:])):
        _write_steps(task, some)
        report = {"private_bytes": 500_000, "order_hashes": [plan.order_hash(epoch) for epoch in range(2)]}
        task.path("report").write_text(json.dumps(report))
        np.save(task.path("weights.npy"), np.arange(5, dtype=np.float32))
    return whole, killed, resumed, plan


def _write_steps(task, steps):
    task.path("steps").write_text("".join(json.dumps(step) + "\n" for step in steps))


def _judged(tasks, capsys):
    story = demo._Story()
    demo._compare(*tasks, story)
    refused = [line[8:43].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("   NO ")]
    assert story.holds == (not refused)
    return refused


def test_equal_trainings_are_found_equal(tasks, capsys):
    assert _judged(tasks, capsys) == []


def test_an_item_that_differs_is_found(tasks, capsys):
    resumed = tasks[2]
    steps = resumed.steps()
    steps[-1]["items"][3] += 1
    _write_steps(resumed, steps)
    assert "Same items in every batch" in _judged(tasks, capsys)


def test_a_batch_that_is_left_out_is_found(tasks, capsys):
    resumed = tasks[2]
    _write_steps(resumed, resumed.steps()[:-1])
    assert "Same items in every batch" in _judged(tasks, capsys)


def test_a_last_bit_of_a_loss_is_found(tasks, capsys):
    resumed = tasks[2]
    steps = resumed.steps()
    steps[5]["loss"] = float(np.nextafter(float.fromhex(steps[5]["loss"]), 1)).hex()
    _write_steps(resumed, steps)
    assert _judged(tasks, capsys) == ["Same loss in every step"]


def test_a_redone_step_that_comes_out_differently_is_found(tasks, capsys):
    killed = tasks[1]
    steps = killed.steps()
    steps[_KILLED - 1]["loss"] = (0.5).hex()
    _write_steps(killed, steps)
    assert _judged(tasks, capsys) == ["Same steps when done again"]


def test_a_last_bit_of_a_weight_is_found(tasks, capsys):
    weights = np.arange(5, dtype=np.float32)
    weights[2] = np.nextafter(weights[2], np.float32(9))
    np.save(tasks[2].path("weights.npy"), weights)
    assert _judged(tasks, capsys) == ["Same weights at the end"]


def test_another_order_and_too_much_memory_are_found(tasks, capsys):
    report = {"private_bytes": 1_500_000, "order_hashes": ["0", "1"]}
    tasks[2].path("report").write_text(json.dumps(report))
    assert _judged(tasks, capsys) == ["Same hash of each epoch's order", "Within the budget of 1 MB"]


def test_half_a_line_in_the_log_of_a_killed_training_does_not_count(tasks):
    killed = tasks[1]
    with killed.path("steps").open("a") as log:
        log.write('{"step": 23, "ite')
    assert [step["step"] for step in killed.steps()] == list(range(_KILLED))


def test_items_carry_their_number_and_a_label(tasks):
    folder = tasks[0].folder
    source, _ = demo._source_and_plan(folder, _SCALE, seed=1)
    block = source.take(np.array([0, 255, 77]))
    import torch

    assert demo._item_numbers(torch.from_numpy(block["x"])) == [0, 255, 77]
    assert set(np.load(f"{folder}/y.npy").tolist()) == set(range(10))


def test_a_training_that_fails_is_told_in_one_line(tmp_path):
    task = demo._Task(str(tmp_path), "whole", 2, 1, _SCALE)
    with pytest.raises(PenstockError, match=r"Training process \d+ \(whole\) failed: FileNotFoundError: .*x\.npy"):
        demo._run_process(task, demo._Story())
