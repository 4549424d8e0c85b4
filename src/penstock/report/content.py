"""All that a report says, before it is a page."""

from dataclasses import dataclass, field
from typing import Any

from penstock.observe.run_file import Run

__all__ = ["Drawn", "Report"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One item as a picture."""

    item: int
    png: bytes
    words: str
    """What is in the picture, for those who do not see it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a data set, of a run, or of both."""

    title: str
    dataset: dict[str, Any] | None
    run: Run | None
    shuffle: dict[str, Any] | None
    """The plan of the run, or the one that a shuffled loader of the data set would run; `unknown` says why there is
    none."""

    faults: list[dict[str, str]]
    """Of each: what, where, why."""

    made: dict[str, Any]
    drawn: list[Drawn] = field(default_factory=list)
    not_drawn: str = ""
    """Why no item was drawn."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the page says as plain JSON: totals, fields, mixing, figures, faults; no curves, no pictures."""
        shuffle = None
        if self.shuffle is not None:
            shuffle = {name: value for name, value in self.shuffle.items() if name != "access"}
        run = None
        if self.run is not None:
            run = {
                "path": str(self.run.path),
                "figures": self.run.figures,
                "stages": {
                    name: {"calls": entry["calls"], "seconds": entry["seconds"], "bytes": entry["bytes"]}
                    for name, entry in self.run.stages.items()
                },
                "dataset": self.run.dataset,
                "about": self.run.about,
            }
        return {
            "title": self.title,
            "dataset": self.dataset,
            "run": run,
            "shuffle": shuffle,
            "faults": self.faults,
            "drawn_items": [drawn.item for drawn in self.drawn],
            "made": self.made,
        }
