"""How large a demo is, what a process of it is told, and which files that process leaves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.plan.orders import Shuffle
from penstock.plan.plan import Plan
from penstock.source.tar.source import TarSource

__all__ = [
    "ALL_FIELDS",
    "FIELDS",
    "FULL",
    "QUICK",
    "Scale",
    "Task",
    "digest",
    "plan_over",
    "source_and_plan",
    "task_from_json",
]

BIN_MS, BINS = 50.0, 20
"""A window is a second of spikes and movement."""

FIELDS = ("spikes", "behavior")
"""What the decoder reads. The volts lie in the same shards, and their bytes are not touched."""

ALL_FIELDS = ("spikes", "lfp", "behavior")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a demo is."""

    subjects: int
    sessions: int
    """Recordings of each subject."""

    seconds: int
    """Length of a recording."""

    units: int
    channels: int
    shard_size: int
    epochs: int
    batch_size: int
    hidden: int
    checkpoint_steps: int
    lost_steps: int
    """From the last checkpoint to the kill: what has to come out the same when it is done again."""

    memory_bytes: int
    """What the loader may take."""

    @property
    def recorded_bytes(self) -> int:
        """The recordings, about: whole numbers for the volts, and next to them little else."""
        return self.subjects * self.sessions * self.seconds * (2 * 1000 * self.channels + 8 * 12 * self.units)

    @property
    def disk_bytes(self) -> int:
        """All that the demo writes, about: the recordings, the windows, which overlap, and a copy of some of them."""
        windows = 2 * self.subjects * self.sessions * self.seconds
        window_bytes = 4 * 1000 * self.channels + 4 * BINS * self.units + 8_000
        return int(self.recorded_bytes + 1.5 * windows * window_bytes) + 20_000_000


FULL = Scale(
    subjects=6,
    sessions=2,
    seconds=240,
    units=48,
    channels=16,
    shard_size=240,
    epochs=4,
    batch_size=32,
    hidden=64,
    checkpoint_steps=60,
    lost_steps=30,
    memory_bytes=48_000_000,
)
QUICK = Scale(
    subjects=4,
    sessions=1,
    seconds=120,
    units=32,
    channels=8,
    shard_size=80,
    epochs=5,
    batch_size=32,
    hidden=32,
    checkpoint_steps=18,
    lost_steps=9,
    memory_bytes=24_000_000,
)


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is told."""

    folder: str
    name: str
    workers: int
    seed: int
    scale: Scale
    resume: str | None = None
    """The name of the training whose checkpoint it goes on from."""

    hold_at: int | None = None
    """The step after which it waits to be killed, so that a late kill still comes before the next checkpoint."""

    kind: Literal["train", "damage", "measure"] = "train"
    """Train; read a damaged copy; or measure the loader and write the report."""

    def path(self, suffix: str) -> Path:
        """Return a file of this process."""
        return Path(self.folder) / "runs" / f"{self.name}.{suffix}"

    @property
    def damaged(self) -> Path:
        """The folder of the copy that is damaged."""
        return Path(self.folder) / "damaged"

    @property
    def page(self) -> Path:
        """The file of the report."""
        return Path(self.folder) / "report.html"

    def shards(self, split: str) -> Path:
        """Return the folder of a split."""
        return Path(self.folder) / "shards" / split

    def steps(self) -> list[dict[str, Any]]:
        """Return what the training did: of each step its number, the digests of its items, and its loss."""
        # A kill in the middle of a write leaves half a line, of a step that does not count.
        return [json.loads(line) for line in self.path("steps").read_bytes().split(b"\n")[:-1]]

    @property
    def report_path(self) -> Path:
        """The file that says that the task is done, and what was found out."""
        return self.path("report.json")

    def report(self) -> dict[str, Any]:
        """Return what was found out."""
        return dict(json.loads(self.report_path.read_text()))

    def write_report(self, found: dict[str, Any]) -> None:
        """Say that the task is done: whole, or not at all."""
        self.path("aside").write_text(json.dumps(found, indent=1))
        self.path("aside").replace(self.report_path)

    def to_json(self) -> str:
        """Return what `task_from_json` reads."""
        return json.dumps(asdict(self))


def task_from_json(text: str) -> Task:
    """Return the task that `to_json` wrote."""
    told = json.loads(text)
    return Task(**{**told, "scale": Scale(**told["scale"])})


def source_and_plan(task: Task, fields: tuple[str, ...] = FIELDS) -> tuple[TarSource, Plan]:
    """Return the training split and the order of its batches."""
    source = TarSource(task.shards("train"), fields=fields)
    return source, plan_over(source, task)


def plan_over(source: TarSource, task: Task) -> Plan:
    """Return the order of batches: an exact shuffle, in which a last batch that is not full is one, too."""
    return Plan(source.index, Shuffle(), batch_size=task.scale.batch_size, seed=task.seed, tail="short")


def digest(movement: NDArray[Any]) -> str:
    """Return what stands for one window: a hash of the bytes of its movement, in which no two windows are alike."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(movement).tobytes())
