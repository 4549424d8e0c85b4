"""The sizes of a demo, the task of a child process, and the files it writes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.files.durable import write_aside
from penstock.files.regular import read_regular
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
"""A window is one second of spikes and movement."""

FIELDS = ("spikes", "behavior")
"""Fields of the decoder. The LFP is in the same shards, and its bytes are not read."""

ALL_FIELDS = ("spikes", "lfp", "behavior")


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a demo."""

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
    """Steps from the last checkpoint to the kill, which are repeated."""

    memory_bytes: int
    """Memory limit of the loader."""

    @property
    def recorded_bytes(self) -> int:
        """Approximate size of the recordings: mostly the integers of the LFP."""
        return self.subjects * self.sessions * self.seconds * (2 * 1000 * self.channels + 8 * 12 * self.units)

    @property
    def disk_bytes(self) -> int:
        """Approximate size of all files: recordings, overlapping windows, and a copy of some of these."""
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
    """A task for a child process."""

    folder: str
    name: str
    workers: int
    seed: int
    scale: Scale
    resume: str | None = None
    """Name of the training whose checkpoint to resume from."""

    hold_at: int | None = None
    """Step after which to wait for the kill, so that even a late kill comes before the next checkpoint."""

    kind: Literal["train", "damage", "measure"] = "train"
    """Train; read a damaged copy; or measure the loader and write the report."""

    def path(self, suffix: str) -> Path:
        """Return a file of this process."""
        return Path(self.folder) / "runs" / f"{self.name}.{suffix}"

    @property
    def damaged(self) -> Path:
        """Folder of the damaged copy."""
        return Path(self.folder) / "damaged"

    @property
    def page(self) -> Path:
        """The file of the report."""
        return Path(self.folder) / "report.html"

    def shards(self, split: str) -> Path:
        """Return the folder of a split."""
        return Path(self.folder) / "shards" / split

    def steps(self) -> list[dict[str, Any]]:
        """Return the log of the training: number, item digests and loss of each step."""
        # A kill in the middle of a write leaves half a line, which does not count.
        return [json.loads(line) for line in read_regular(self.path("steps")).split(b"\n")[:-1]]

    @property
    def report_path(self) -> Path:
        """File with the results; it exists when the task is done."""
        return self.path("report.json")

    def report(self) -> dict[str, Any]:
        """Return the results."""
        return dict(json.loads(read_regular(self.report_path)))

    def write_report(self, found: dict[str, Any]) -> None:
        """Write the results, atomically: the task is done."""
        write_aside(self.report_path, json.dumps(found, indent=1).encode(), lasting=False)

    def to_json(self) -> str:
        """Return the task as JSON, for `task_from_json`."""
        return json.dumps(asdict(self))


def task_from_json(text: str) -> Task:
    """Return the task from the output of `to_json`."""
    fields = json.loads(text)
    return Task(**{**fields, "scale": Scale(**fields["scale"])})


def source_and_plan(task: Task, fields: tuple[str, ...] = FIELDS) -> tuple[TarSource, Plan]:
    """Return the source and the plan of the training split."""
    source = TarSource(task.shards("train"), fields=fields)
    return source, plan_over(source, task)


def plan_over(source: TarSource, task: Task) -> Plan:
    """Return the plan: an exact shuffle, with a short last batch."""
    return Plan(source.index, Shuffle(), batch_size=task.scale.batch_size, seed=task.seed, tail="short")


def digest(movement: NDArray[Any]) -> str:
    """Return a hash that identifies a window, from its movement, which is unique."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(movement).tobytes())
