"""The sizes of a demo and where its files are: what its processes share."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock import Plan, Shuffle, TarSource

__all__ = ["ALL_FIELDS", "BINS", "BIN_MS", "FIELDS", "Settings", "digest"]

BIN_MS, BINS = 50.0, 20  # a window is one second of spikes and movement
FIELDS = ("spikes", "behavior")  # of the decoder; the LFP is in the same shards, and its bytes are not read
ALL_FIELDS = ("spikes", "lfp", "behavior")


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of a demo, and one of its trainings."""

    folder: str
    seed: int = 0
    subjects: int = 6
    sessions: int = 2
    seconds: int = 240
    units: int = 48
    channels: int = 16
    shard_size: int = 240
    epochs: int = 4
    batch_size: int = 32
    hidden: int = 64
    checkpoint_steps: int = 60
    lost_steps: int = 30
    """Steps from the last checkpoint to the kill, which are repeated."""

    memory_bytes: int = 48_000_000
    """Memory limit of the loader."""

    name: str = "whole"
    workers: int = 2
    resume: str = ""
    """The training whose checkpoint to resume from."""

    hold_at: int = 0
    """Step after which to wait for the kill, so that even a late one comes before the next checkpoint."""

    def quick(self) -> "Settings":
        """Return these settings with small sizes."""
        small = {"subjects": 4, "sessions": 1, "seconds": 120, "units": 32, "channels": 8, "shard_size": 80}
        return replace(self, **small, epochs=5, hidden=32, checkpoint_steps=18, lost_steps=9, memory_bytes=24_000_000)

    @property
    def recordings(self) -> Path:
        """Folder of the NWB files."""
        return Path(self.folder) / "recordings"

    @property
    def damaged(self) -> Path:
        """Folder of the damaged copy."""
        return Path(self.folder) / "damaged"

    def shards(self, split: str) -> Path:
        """Return the folder of a split."""
        return Path(self.folder) / "shards" / split

    def path(self, suffix: str) -> Path:
        """Return a file of this training."""
        return Path(self.folder) / "runs" / f"{self.name}.{suffix}"

    def save(self) -> Path:
        """Write the settings for another process."""
        self.path("json").write_text(json.dumps(asdict(self)))
        return self.path("json")

    def steps(self) -> list[dict[str, Any]]:
        """Return the log of the training; a kill in the middle of a write leaves half a line, which does not count."""
        return [json.loads(line) for line in self.path("steps").read_bytes().split(b"\n")[:-1]]

    def result(self) -> dict[str, Any]:
        """Return what the process of this name has found."""
        return dict(json.loads(self.path("result.json").read_text()))

    def open(self, fields: tuple[str, ...] = FIELDS) -> tuple[TarSource, Plan]:
        """Return the source and the plan of the training split: an exact shuffle, with a short last batch."""
        source = TarSource(self.shards("train"), fields=fields)
        return source, self.plan(source)

    def plan(self, source: TarSource) -> Plan:
        """Return the order in which the training visits a source."""
        return Plan(source.index, Shuffle(), batch_size=self.batch_size, seed=self.seed, tail="short")


def digest(movement: NDArray[Any]) -> str:
    """Return a hash that identifies a window, from its movement, which is unique."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(movement).tobytes())
