"""A finding: what was looked at, how it is, and what to do. Plain data; the command line only prints it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.core.version import __version__
from penstock.files.stores.url import Url

__all__ = ["LEVELS", "Examination", "Finding", "Level", "Progress"]

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""From harmless to harmful."""

Progress = Callable[[str, str, int, int, str], None]
"""Progress callback `(phase, unit, done, total, current)`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at, as `area.name`; never changes, so that programs can look for it."""

    level: Level
    """`ok`; `note`: good to know; `warning`: works, but look at it; `problem`: does not work, or loses data."""

    found: str
    """What was found, in a sentence."""

    advice: str = ""
    """What to do; empty if there is nothing to do."""

    command: str = ""
    """The command that does it, for a shell; empty if no single command does."""

    where: str = ""
    """The file or folder that it is about; empty if it is about the machine."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """The values behind `found`, as plain JSON."""

    def __post_init__(self) -> None:
        assert self.advice or self.level in ("ok", "note"), f"{self.check} must say what to do"

    @property
    def area(self) -> str:
        """The part of `check` before the dot: `installation`, `machine`, `storage` or `data`."""
        return self.check.partition(".")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return {
            "check": self.check,
            "level": self.level,
            "found": self.found,
            "advice": self.advice,
            "command": self.command,
            "where": self.where,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    where: Path | Url | None
    """The folder or URL that was examined; None if it was the machine alone."""

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Level:
        """The level of the worst finding."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    def count(self, level: Level) -> int:
        """Return how many findings have a level."""
        return sum(finding.level == level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as plain JSON, for a bug report or a program."""
        return {
            "penstock": __version__,
            "where": None if self.where is None else str(self.where),
            "worst": self.worst,
            "counts": {level: self.count(level) for level in LEVELS},
            "findings": [finding.to_dict() for finding in self.findings],
        }
