"""Content: one thing in a recording, with what a conversion needs to know about it."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from penstock.files.stores.url import Url

__all__ = ["Content", "write_command"]


@dataclass(frozen=True, slots=True)
class Content:
    """A series, a table or an image of a file."""

    path: str
    """Its path in the file or store; empty for the only content of a file."""

    kind: str
    """In an NWB file, the name of its type, such as "ElectricalSeries"; else the type of its values or its encoding."""

    shape: tuple[int, ...]
    """Frames first; rows of a table; height and width of an image. Empty if the file has no array."""

    rate_hz: float | None = None
    """Frames per second, gaps excluded, estimated from timestamps if need be; None for tables, images and events."""

    unit: str | None = None
    span: tuple[float, float] | None = None
    """Seconds of the first and the last frame, spike or row; of units, those in which they were observed."""

    n_gaps: int = 0
    columns: tuple[str, ...] = ()
    """The columns of a table. `PATH/COLUMN` names one of them."""

    modality: str | None = None
    """The modality that includes it: "spikes", "lfp", "behavior", "stimulus" or "ophys"; None if none does."""

    problem: str | None = None
    """Why it cannot become a field; None if it can."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


def write_command(path: Path | Url, *options: str) -> str:
    """Return the command that converts a recording, as it is typed."""
    return shlex.join(["penstock", "convert", str(path), "--output", "shards", *options])
