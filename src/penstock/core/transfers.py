"""What was downloaded so far: counts of a remote source, which can be added and subtracted."""

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Transfers"]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Counts of downloads. Those of several processes are added; those of a stretch of time are a difference.

    Examples
    --------
    >>> before, after = Transfers(requests=2, n_bytes=100), Transfers(requests=5, n_bytes=700, hits=1, misses=3)
    >>> (after - before).n_bytes, (after + before).requests, (after - before).hit_fraction
    (600, 7, 0.25)
    """

    requests: int = 0
    """Requests that were answered."""

    n_bytes: int = 0
    """Bytes of their answers."""

    retries: int = 0
    """Requests that failed and were sent again."""

    hits: int = 0
    """Spans that were asked for and found: in the cache folder, or in memory because of an earlier use."""

    misses: int = 0
    """Spans that had to be downloaded."""

    hidden_seconds: float = 0.0
    """Time of downloads during which no batch waited for them."""

    waited_seconds: float = 0.0
    """Time that reads waited for downloads."""

    @classmethod
    def of(cls, *sources: Any) -> "Transfers | None":
        """Return the counts of sources up to now, added; None if they download nothing.

        A source that does has an attribute `transfers`, with numbers of these names.
        """
        counts = [found for source in sources if (found := getattr(source, "transfers", None)) is not None]
        if not counts:
            return None
        return cls(*(sum(getattr(each, field.name) for each in counts) for field in fields(cls)))

    def __add__(self, other: "Transfers") -> "Transfers":
        return Transfers(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: "Transfers") -> "Transfers":
        return Transfers(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def hit_fraction(self) -> float | None:
        """Fraction of the spans asked for that were found; None if none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None
