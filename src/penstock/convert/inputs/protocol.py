"""What a conversion reads: inputs, each of which gives a known number of samples, any of them at any time.

An `Input` is a specification, small and picklable; workers open it for themselves. What it opens to, a `Recording`, is
the same in every process: sample `i` depends on the file and on the options, and on nothing else. So shards can be
written by anybody, in any order, and come out the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Input", "Recording", "Sample"]

Sample = tuple[dict[str, Any], dict[str, Any]]
"""The fields of a sample, and its metadata: where it came from."""


class Recording(Protocol):
    """An input that is open.

    1. Bytes that cannot be read, or are not there: ReadError, which names the file and the place.
    2. The file changes while it is open: not noticed here; whoever opened it compares its fingerprint.
    """

    n_samples: int
    """At least one."""

    about: Mapping[str, Any]
    """What is known of the recording, as JSON: identifier, subject, session, rates, units. Kept in the manifest."""

    groups: Mapping[str, str]
    """What it belongs to, where that is known: `"subject"`, `"session"`."""

    notes: Sequence[str]
    """What was left out, each with its reason, for a person to read."""

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return begin and end of samples in the recording, one row each, in seconds or rows."""
        ...

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield samples, in the order of `numbers`; consecutive ones are cheaper."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Input(Protocol):
    """A recording that can be opened: a frozen dataclass of a path and options."""

    @property
    def path(self) -> Path:
        """The file, or the folder of a zarr store."""
        ...

    def open(self) -> Recording:
        """Open it; raise SourceError where it is not such a recording or lacks what is asked for."""
        ...
