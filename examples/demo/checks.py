"""The comparisons of the demo, each of which could fail. Pure: what processes left in, what holds out."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.demo.settings import Settings, digest
from penstock import Plan
from penstock.shard.manifest import Manifest

__all__ = ["Check", "Damage", "check_damage", "check_decoding", "compare", "copy_damaged", "number_windows"]

_LEAST_R2 = 0.3  # clearly above chance, which is 0 at best


class Check(NamedTuple):
    """What was compared, whether it holds, and details."""

    what: str
    holds: bool
    detail: str


def check_decoding(subjects: dict[str, dict[str, float]]) -> Iterator[Check]:
    """Check how well the movement of held-out subjects is decoded."""
    if not subjects:
        yield Check("Subjects are held out", holds=False, detail="there are none")
    for subject, scores in subjects.items():
        # No minus sign before a zero.
        r2, mean, shuffled = (f"{round(scores[name], 2) + 0.0:.2f}" for name in ("r2", "mean", "shuffled"))
        yield Check(
            f"{subject} is decoded above chance",
            scores["r2"] > max(_LEAST_R2, scores["mean"], scores["shuffled"]),
            f"R² {r2} (predicting the mean: {mean}, shuffled predictions: {shuffled})",
        )


def number_windows(folder: Path) -> dict[str, int]:
    """Return the number of each window by its digest; read with Python's tarfile, not with the reader under test."""
    found: dict[str, int] = {}
    for shard in Manifest.read(folder / "dataset_metadata.json").shards:
        with tarfile.open(folder / shard.name) as archive:
            for member in archive:
                if member.name.endswith(".behavior.npy") and (file := archive.extractfile(member)) is not None:
                    found[digest(np.load(io.BytesIO(file.read())))] = len(found)
    return found


def compare(whole: Settings, killed: Settings, resumed: Settings, plan: Plan) -> Iterator[Check]:
    """Compare an interrupted training with the uninterrupted one, and both with the plan, bit for bit."""
    before, after, epochs = killed.steps(), resumed.steps(), range(whole.epochs)
    saved = after[0]["step"]
    joined, redone = before[:saved] + after, len(before) - saved
    items, losses = ([[step[key] for step in some] for some in (whole.steps(), joined)] for key in ("items", "loss"))
    yield Check("Same windows in every batch", items[0] == items[1], f"{len(joined):,} batches")
    yield Check("Same loss in every step", losses[0] == losses[1], "to the last bit")
    yield Check("Same steps when repeated", before[saved:] == after[:redone], f"{redone} steps")
    numbers = number_windows(whole.shards("train"))
    arrived = [[numbers.get(name, -1) for name in step] for step in items[1]]
    planned = [draw.items.tolist() for e in epochs for draw in plan.epoch(e).draws(range(plan.n_batches))]
    yield Check("Same windows as in the plan", arrived == planned, "identified by their content")
    passes = [np.concatenate([[], *arrived[e * plan.n_batches :][: plan.n_batches]]) for e in epochs]
    once = all(np.array_equal(np.sort(some), np.arange(len(numbers))) for some in passes)
    yield Check("Every window once per epoch", once, f"{len(numbers):,} windows, {len(epochs)} epochs")
    results, hashes = [whole.result(), resumed.result()], [plan.order_hash(epoch) for epoch in epochs]
    same = all(result["order_hashes"] == hashes for result in results)
    yield Check("Same hash of each epoch's order", same, ", ".join(entry[:8] for entry in hashes))
    weights = [np.load(settings.path("weights.npy")) for settings in (whole, resumed)]
    same = weights[0].tobytes() == weights[1].tobytes()
    yield Check("Same weights at the end", same, f"{weights[0].size:,} numbers, bit for bit")
    used, budget = max(result["private_bytes"] for result in results) / 1e6, whole.memory_bytes / 1e6
    detail = f"the trainings used {used:.0f} MB of private memory"  # 0: unknown without /proc
    yield Check(f"Within the budget of {budget:.0f} MB", used <= budget, detail)


@dataclass(frozen=True, slots=True)
class Damage:
    """Where the bit was flipped."""

    item: int
    shard: str
    byte: int
    """Offset in the shard."""


def copy_damaged(healthy: Path, copy: Path, item: int) -> Damage:
    """Copy a dataset, and flip one bit in the spikes of one item of the copy."""
    shutil.copytree(healthy, copy)
    row = item
    for shard in Manifest.read(copy / "dataset_metadata.json").shards:
        if row < shard.n_items:
            break
        row -= shard.n_items
    # Located with Python's tarfile, not with the reader under test.
    with tarfile.open(copy / shard.name) as archive:
        member = [entry for entry in archive if entry.name.endswith(".spikes.npy")][row]
    byte = member.offset_data + member.size - member.size // 4
    with (copy / shard.name).open("r+b") as file:
        (flipped,) = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([flipped ^ 1]), byte)
    return Damage(item, shard.name, byte)


def check_damage(damage: Damage, problems: list[Any], found: dict[str, Any], plan: Plan) -> Iterator[Check]:
    """Check what verification and two loaders reported about the damage, read in the order of a plan."""
    expected = [(damage.shard, damage.item)]
    listed = [(problem.shard, problem.item) for problem in problems]
    yield Check("Verify finds it, and nothing else", listed == expected, _describe(listed))
    error = found["error"] or {"shard": None, "item": None}
    named = [(error["shard"], error["item"])] == expected
    yield Check("The error names shard and item", named, "before any value is delivered")
    bad = [(entry["shard"], entry["item"]) for entry in found["quarantine"]]
    yield Check("Quarantine lists it, and nothing else", bad == expected, _describe(bad))
    shapes = [[batch["shapes"] for batch in found[name]] for name in ("healthy", "replaced")]
    yield Check("Every batch keeps its shape", shapes[0] == shapes[1], f"{len(shapes[0]):,} batches")
    order = np.concatenate([draw.items for draw in plan.epoch(0).draws(range(plan.n_batches))])
    healthy, replaced = (
        dict(zip(order.tolist(), (digest for batch in found[name] for digest in batch["items"]), strict=False))
        for name in ("healthy", "replaced")
    )
    differing = [item for item in sorted(healthy) if healthy[item] != replaced.get(item)]
    alike = differing == [damage.item] and len(healthy) == len(replaced) == len(order)
    yield Check("All other windows are bit-equal", alike, f"{len(order) - 1:,} windows")
    instead = [item for item in healthy if item != damage.item and healthy[item] == replaced.get(damage.item)]
    detail = f"window {instead[0]:,}" if instead else "none of the windows"
    yield Check("A healthy window takes its place", len(instead) == 1, detail)


def _describe(entries: list[tuple[str, int | None]]) -> str:
    if not entries:
        return "nothing"
    shard, item = entries[0]
    more = f", and {len(entries) - 1} more" if len(entries) > 1 else ""
    return (shard if item is None else f"window {item:,} in {shard}") + more
