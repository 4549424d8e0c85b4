"""The damage of the demo: flips one bit in a copy of a dataset, and checks how loaders handle it."""

import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.demo.story import Story
from penstock.files.durable import write_aside
from penstock.files.regular import open_regular, read_regular
from penstock.plan.plan import Plan
from penstock.shard.index_tars import Problem
from penstock.shard.manifest import Manifest, manifest_path

__all__ = ["Damage", "copy_damaged", "judge_damage"]

_FIELD = "spikes"


@dataclass(frozen=True, slots=True)
class Damage:
    """Location of the flipped bit."""

    item: int
    shard: str
    member: str
    byte: int
    """Offset in the shard."""


def copy_damaged(healthy: Path, copy: Path, item: int) -> Damage:
    """Copy a dataset, and flip one bit in the spikes of one item of the copy."""
    shutil.copytree(healthy, copy, copy_function=_link_or_copy)
    manifest, row = Manifest.read(manifest_path(copy)), item
    for shard in manifest.shards:
        if row < shard.n_items:
            break
        row -= shard.n_items
    path = copy / shard.name
    # Located with Python's tarfile, not with the reader under test.
    with open_regular(path) as file, tarfile.open(fileobj=file) as archive:
        member = [entry for entry in archive if entry.name.endswith(f".{_FIELD}.npy")][row]
    content = bytearray(read_regular(path))
    byte = member.offset_data + member.size - member.size // 4
    content[byte] ^= 1
    write_aside(path, bytes(content), lasting=False)  # another file: the healthy dataset may share this one
    return Damage(item, shard.name, member.name, byte)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file to save space; copy it if the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def judge_damage(damage: Damage, problems: list[Problem], found: dict[str, Any], plan: Plan, story: Story) -> None:
    """Check what verification and two loaders reported about the damage.

    Parameters
    ----------
    problems
        The problems listed by `penstock verify`.
    found
        The report of the process that read the copy: the error, the quarantine, and the shapes and item digests of each
        batch, from the healthy dataset and from the copy.
    plan
        The order in which both were read.
    """
    listed = [(problem.shard, problem.item) for problem in problems]
    story.check(
        "Verify finds it, and nothing else",
        holds=listed == [(damage.shard, damage.item)],
        detail=_describe_entries(listed),
    )
    error = found["error"]
    named = error is not None and (error["shard"], error["item"]) == (damage.shard, damage.item)
    story.check("The error names shard and item", holds=named, detail="before any value is delivered")
    bad = [(entry["shard"], entry["item"]) for entry in found["quarantine"]]
    story.check(
        "Quarantine lists it, and nothing else",
        holds=bad == [(damage.shard, damage.item)],
        detail=_describe_entries(bad),
    )
    shapes = [[batch["shapes"] for batch in found[name]] for name in ("healthy", "replaced")]
    story.check("Every batch keeps its shape", holds=shapes[0] == shapes[1], detail=f"{len(shapes[0]):,} batches")
    order = np.concatenate([draw.items for draw in plan.epoch(0).draws(range(plan.n_batches))])
    healthy, replaced = (
        dict(zip(order.tolist(), (digest for batch in found[name] for digest in batch["items"]), strict=False))
        for name in ("healthy", "replaced")
    )
    differing = [item for item in sorted(healthy) if healthy[item] != replaced.get(item)]
    others = differing == [damage.item] and len(healthy) == len(replaced) == len(order)
    story.check("All other windows are bit-equal", holds=others, detail=f"{len(order) - 1:,} windows")
    instead = [item for item in healthy if item != damage.item and healthy[item] == replaced.get(damage.item)]
    detail = f"window {instead[0]:,}" if instead else "none of the windows"
    story.check("A healthy window takes its place", holds=len(instead) == 1, detail=detail)


def _describe_entries(entries: list[tuple[str, int | None]]) -> str:
    """Return a short description of listed problems."""
    if not entries:
        return "nothing"
    shard, item = entries[0]
    more = f", and {len(entries) - 1} more" if len(entries) > 1 else ""
    return (shard if item is None else f"window {item:,} in {shard}") + more
