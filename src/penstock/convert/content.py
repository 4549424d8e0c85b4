"""Content: one thing in a recording, with what a conversion needs to know about it."""

from dataclasses import dataclass

__all__ = ["Content"]


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
    """Seconds of the first and the last frame, spike or row."""

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
