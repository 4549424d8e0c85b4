"""The parts of the campaign, in the order in which they run, and their shares of the time."""

from bench.campaign.changes import CHANGES
from bench.campaign.disks import DISKS
from bench.campaign.flips import FLIPS
from bench.campaign.fuzz.part import run_fuzz
from bench.campaign.kills.all import KILLS
from bench.campaign.result import Part, Result, Say
from bench.campaign.trials import Trials

__all__ = ["PARTS", "SHARES", "run_selection"]

PARTS: dict[str, Part] = {"kills": KILLS, "disks": DISKS, "changes": CHANGES, "flips": FLIPS, "fuzz": run_fuzz}
"""A part is `(budget_seconds, seed, say) -> list[Result]`."""

SHARES: dict[str, float] = {"kills": 10, "disks": 3, "changes": 3, "flips": 2, "fuzz": 8}
"""Parts of the time; 1 if it is not named."""


def run_selection(name: str, budget_seconds: float, seed: int, say: Say) -> list[Result]:
    """Run a part ("kills"), or the trials of one kind ("kills/training-fork"), or one trial (".../17")."""
    part, _, rest = name.partition("/")
    chosen = PARTS[part]
    if rest:
        if not isinstance(chosen, Trials):
            raise SystemExit(f"{part} has no trials to choose from; leave out /{rest}.")
        chosen = chosen.select(rest)
    return chosen(budget_seconds, seed, say)
