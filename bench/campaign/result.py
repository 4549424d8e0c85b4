"""What a part of the campaign found out: how often something was tried, and how often it went wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Part", "Result", "Say", "to_json"]


@dataclass(frozen=True)
class Result:
    """One line of the account.

    Parameters
    ----------
    part
        Name of the part of the campaign.
    cases
        Numbers of the fault cases that the trials are about.
    what
        What was tried, in a few words: "kill -9 of a ShardWriter".
    trials
        How often.
    failures
        One text for each trial that went wrong, with the command that repeats it.
    """

    part: str
    cases: tuple[int, ...]
    what: str
    trials: int
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Say(Protocol):
    """Reports progress. Lines that come quickly one after the other are left out, but for those with `always`."""

    def __call__(self, text: str, *, always: bool = False) -> None: ...


Part = Callable[[float, int, Say], list[Result]]
"""`part(budget_seconds, seed, say)` tries as much as the budget allows."""


def to_json(result: Result) -> dict[str, Any]:
    """Return a result as it is stored."""
    return {
        "part": result.part,
        "cases": sorted(result.cases),
        "what": result.what,
        "trials": result.trials,
        "failures": result.failures,
        "seconds": round(result.seconds),
    }
