"""What a training says of itself, batch by batch: a few named curves in bounded memory."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import OptionError
from penstock.observe.durations import Trace

__all__ = ["Recorded"]

_MOST_NAMES, _MOST_LETTERS = 16, 80  # a run file stays below 1 MB


class Recorded:
    """Values by name, over the number of batches.

    Examples
    --------
    >>> recorded = Recorded()
    >>> recorded.add(1, {"loss": 0.5})
    >>> recorded.add(2, {"loss": float("nan")})
    >>> recorded.last, recorded.not_finite
    ({'loss': 0.5}, {'loss': (1, 2)})
    """

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}
        self.last: dict[str, float] = {}
        """The last finite value of each name."""

        self.not_finite: dict[str, tuple[int, int]] = {}
        """How many values of a name were NaN or infinite, and the batch of the first."""

    def __len__(self) -> int:
        return len(self.traces)

    def add(self, batch: int, values: Mapping[str, Any]) -> None:
        """Add values of one batch."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        if len(self.traces.keys() | numbers.keys()) > _MOST_NAMES:
            raise OptionError(
                f"record() keeps at most {_MOST_NAMES} names, and {sorted(numbers.keys() - self.traces.keys())} would "
                f"be more than {sorted(self.traces)}; log the others elsewhere."
            )
        for name, value in numbers.items():
            trace = self.traces.setdefault(name, Trace())
            if math.isfinite(value):
                trace.add(batch, value)
                self.last[name] = value
            else:
                count, first = self.not_finite.get(name, (0, batch))
                self.not_finite[name] = count + 1, first


def _number(name: str, value: Any) -> float:
    if len(name) > _MOST_LETTERS:
        raise OptionError(f"record({name[:20]}…) has a name of {len(name)} letters; use at most {_MOST_LETTERS}.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"record({name}={value!r}) takes numbers, such as loss.item(): {error}") from error
