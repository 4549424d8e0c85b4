"""The four things that others may implement."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.core.types import Arrangement, Block, Field, Span

__all__ = ["Observer", "Order", "Source", "Transform"]


class Source(Protocol):
    """Where items are. A picklable specification, opened lazily in each process; no order, no batches, no randomness.

    `read` and `take` may be called from several threads at once. `out` has an array for every field of fixed shape and
    for no other: both fill these arrays and return them, with the remaining fields beside them.
    """

    @property
    def index(self) -> Index:
        """How many items there are and where the borders of the chunks lie."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each item holds."""
        ...

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        ...

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order, repeats allowed."""
        ...

    def close(self) -> None:
        """Let go of files; the next read opens them again."""
        ...


class Order(Protocol):
    """In what sequence an epoch visits the items. A frozen value whose repr says all that the sequence depends on."""

    def check(self, index: Index) -> None:
        """Raise PlanError where this order cannot be run over `index`."""
        ...

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`: pure, and cheap enough to be made anew at every resume."""
        ...


class Transform(Protocol):
    """Item to item, randomness handed in."""

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the changed item; the argument may be changed in place."""
        ...


class Observer(Protocol):
    """Told, never asked. May be called from several threads at once."""

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Take note that `stage` took `seconds` and moved `nbytes`."""
        ...
