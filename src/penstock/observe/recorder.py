"""Values that a training records, batch by batch: a few named curves in bounded memory."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import OptionError
from penstock.observe.durations import Trace

__all__ = ["Recorder"]

_MAX_NAMES, _MAX_LETTERS = 16, 80  # a run file stays below 1 MB


class Recorder:
    """Keeps values by name, over the number of batches.

    Examples
    --------
    >>> recorder = Recorder()
    >>> recorder.add(1, {"loss": 0.5})
    >>> recorder.add(2, {"loss": float("nan")})
    >>> recorder.last, recorder.not_finite
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
        """Add the values of one batch."""
        numbers = {name: _to_number(name, value) for name, value in values.items()}
        if len(self.traces.keys() | numbers.keys()) > _MAX_NAMES:
            raise OptionError(
                f"record() takes at most {_MAX_NAMES} names, got {sorted(numbers.keys() - self.traces.keys())} in "
                f"addition to {sorted(self.traces)}. Log the others elsewhere."
            )
        for name, value in numbers.items():
            trace = self.traces.setdefault(name, Trace())
            if math.isfinite(value):
                trace.add(batch, value)
                self.last[name] = value
            else:
                count, first = self.not_finite.get(name, (0, batch))
                self.not_finite[name] = count + 1, first


def _to_number(name: str, value: Any) -> float:
    if len(name) > _MAX_LETTERS:
        raise OptionError(
            f"Names in record() must have at most {_MAX_LETTERS} letters, got {name[:20]}… of {len(name)}."
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"record() takes numbers, such as loss.item(), got {name}={value!r}: {error}") from error
