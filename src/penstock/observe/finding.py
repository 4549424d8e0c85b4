"""A finding: what is so, how bad it is, and what to do. Rules make them of facts; text, JSON and pages show them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["LEVELS", "Finding", "Level", "Progress", "worst"]

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""From harmless to harmful."""

Progress = Callable[[str, str, int, int, str], None]
"""Progress callback `(phase, unit, done, total, current)`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    """What was looked at, as `area.name`; never changes, so that programs can look for it."""

    level: Level
    """`ok`; `note`: good to know; `warning`: works, but look at it; `problem`: does not work, or loses data."""

    text: str
    """What is so, in a sentence."""

    advice: str = ""
    """What to do; empty if there is nothing to do."""

    command: str = ""
    """The line of a shell or of Python that does it; empty if no single line does."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """The values behind the text, as plain JSON."""

    def __post_init__(self) -> None:
        assert self.advice or self.level in ("ok", "note"), f"{self.name} must say what to do"

    @property
    def area(self) -> str:
        """The part of the name before the dot: `installation`, `machine`, `storage`, `data`, `run` or `tune`."""
        return self.name.partition(".")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        shown = {"name": self.name, "level": self.level, "text": self.text, "advice": self.advice}
        return {**shown, "command": self.command, "facts": dict(self.facts)}

    def __str__(self) -> str:
        return " ".join(filter(None, (self.text, self.advice)))


def worst(findings: Iterable[Finding]) -> Level:
    """Return the level of the worst finding."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
