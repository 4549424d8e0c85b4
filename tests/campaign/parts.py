"""The parts of the campaign, in the order in which they run, and their shares of the time."""

from tests.campaign.changes import CHANGES
from tests.campaign.disks import DISKS
from tests.campaign.flips import FLIPS
from tests.campaign.fuzz.part import run_fuzz
from tests.campaign.kills.all import KILLS
from tests.campaign.result import Part, Result, Say
from tests.campaign.trials import Trials

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
