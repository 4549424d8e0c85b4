"""What a fault case is."""

from dataclasses import dataclass

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A fault, the tests that cause it, and what of it cannot be caused on one Linux machine."""

    number: int
    group: str
    title: str
    tests: tuple[str, ...]
    why_not: str | None = None
    """Why the case, or a part of it, cannot be run here, and what holds instead."""
