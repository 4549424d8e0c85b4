"""Checks that the interrupted training of the demo equals the uninterrupted one, and that it has learned."""

import io
import tarfile
from pathlib import Path

import numpy as np

from penstock.demo.story import Story
from penstock.demo.task import Task, digest
from penstock.files.regular import open_regular, read_regular
from penstock.plan.plan import Plan
from penstock.shard.manifest import Manifest, manifest_path

__all__ = ["compare", "judge_decoding", "numbers_by_digest"]

_LEAST_R2 = 0.3  # clearly above chance, which is 0 at best


def numbers_by_digest(folder: Path) -> dict[str, int]:
    """Return the number of each window by its digest; read with Python's tarfile, not with the reader under test."""
    found: dict[str, int] = {}
    count = 0
    for shard in Manifest.read(manifest_path(folder)).shards:
        with open_regular(folder / shard.name) as shard_file, tarfile.open(fileobj=shard_file) as archive:
            for member in archive:
                if member.name.endswith(".behavior.npy") and (file := archive.extractfile(member)) is not None:
                    found[digest(np.load(io.BytesIO(file.read())))] = count
                    count += 1
    return found


def judge_decoding(task: Task, story: Story) -> None:
    """Check how well the movement of held-out subjects is decoded."""
    subjects = task.report()["subjects"]
    if not subjects:
        story.check("Subjects are held out", holds=False, detail="there are none")
    for subject, scores in subjects.items():
        guesses = max(scores["mean"], scores["shuffled"])
        story.check(
            f"{subject} is decoded above chance",
            holds=scores["r2"] > max(_LEAST_R2, guesses),
            detail=f"R² {_format_score(scores['r2'])} (predicting the mean: {_format_score(scores['mean'])}, "
            f"shuffled predictions: {_format_score(scores['shuffled'])})",
        )


def _format_score(score: float) -> str:
    return f"{round(score, 2) + 0.0:.2f}"  # no minus sign before a zero


def compare(whole: Task, killed: Task, resumed: Task, plan: Plan, story: Story) -> None:
    """Compare an interrupted training with the uninterrupted one, and both with the plan, bit for bit."""
    before, after, epochs = killed.steps(), resumed.steps(), range(whole.scale.epochs)
    saved = after[0]["step"]
    joined, redone = before[:saved] + after, len(before) - saved
    items, losses = ([[step[key] for step in some] for some in (whole.steps(), joined)] for key in ("items", "loss"))
    story.check("Same windows in every batch", holds=items[0] == items[1], detail=f"{len(joined):,} batches")
    story.check("Same loss in every step", holds=losses[0] == losses[1], detail="to the last bit")
    story.check("Same steps when repeated", holds=before[saved:] == after[:redone], detail=f"{redone} steps")
    numbers = numbers_by_digest(whole.shards("train"))
    arrived = [[numbers.get(name, -1) for name in step] for step in items[1]]
    planned = [draw.items.tolist() for e in epochs for draw in plan.epoch(e).draws(range(plan.n_batches))]
    story.check("Same windows as in the plan", holds=arrived == planned, detail="identified by their content")
    passes = [np.concatenate([[], *arrived[e * plan.n_batches :][: plan.n_batches]]) for e in epochs]
    once = all(np.array_equal(np.sort(some), np.arange(len(numbers))) for some in passes)
    story.check("Every window once per epoch", holds=once, detail=f"{len(numbers):,} windows, {len(epochs)} epochs")
    reports, hashes = [whole.report(), resumed.report()], [plan.order_hash(epoch) for epoch in epochs]
    holds = all(report["order_hashes"] == hashes for report in reports)
    story.check("Same hash of each epoch's order", holds=holds, detail=", ".join(entry[:8] for entry in hashes))
    weights = [np.load(io.BytesIO(read_regular(task.path("weights.npy")))) for task in (whole, resumed)]
    holds = weights[0].tobytes() == weights[1].tobytes()
    story.check("Same weights at the end", holds=holds, detail=f"{weights[0].size:,} numbers, bit for bit")
    used, budget = max(report["private_bytes"] for report in reports) / 1e6, whole.scale.memory_bytes / 1e6
    if used:  # unknown on systems without /proc
        detail = f"the trainings used {used:.0f} MB of private memory"
        story.check(f"Within the budget of {budget:.0f} MB", holds=used <= budget, detail=detail)
