"""The content of a report, before it is rendered as a page."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.observe.run_file import Run

__all__ = ["ItemPicture", "Report"]


class ItemPicture(NamedTuple):
    """A picture of one item."""

    item: int
    light: bytes
    """A PNG file, black on white."""

    dark: bytes
    narrow: bytes
    """As `light`, for windows as narrow as a phone."""

    narrow_dark: bytes
    words: str
    """Alternative text of the picture."""


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a report about a dataset, a run, or both."""

    title: str
    dataset: dict[str, Any] | None
    run: Run | None
    shuffle: dict[str, Any] | None
    """The plan of the run, or of a shuffled loader over the dataset; `unknown` says why there is none."""

    faults: list[dict[str, str]]
    """Each with `what`, `where` and `why`."""

    provenance: dict[str, Any]
    """Version, command, date, seed and order hash."""

    pictures: list[ItemPicture] = field(default_factory=list)
    no_pictures: str = ""
    """Why no item was plotted."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as plain JSON: totals, fields, mixing, figures, faults; without curves and pictures."""
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
            "drawn_items": [picture.item for picture in self.pictures],
            "made": self.provenance,
        }
