"""Protocols that users may implement."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.core.types import Arrangement, Block, Field, Span

__all__ = ["Observer", "Order", "Source", "Transform"]


class Source(Protocol):
    """Reads items. Picklable, and opens its files lazily in each process; knows no order, batches or randomness.

    `read` and `take` may be called from several threads at once. `out` has one array for each field of fixed shape and
    none for other fields. Both methods fill these arrays and return them together with the remaining fields.

    A source may have more, which the loader uses if it is there:

    - `memory_bytes`: an upper bound of what it keeps between reads in each process, such as a cache.
    - `prepare(items)`: these items are read soon. It starts reading them from the disk, such as with
      `os.posix_fadvise(..., os.POSIX_FADV_WILLNEED)`, and returns without waiting. It returns the bytes that were not
      in memory, or None if it does not know. Other threads read meanwhile.
    - `release(items)`: these items were read, and are not read again for longer than memory holds them. It gives the
      pages that hold nothing else back to the system.
    - `stored_bytes`: the bytes of all its local files; None if it does not know, and then nothing is given back.
    - `fill(items, rows, out)`: reads any items into rows of `out`, which has an array for every field. Sources that are
      made of several call it; without it, they call `take` and copy the items to their rows.
    - `is_remote`: True if items come over a network; `prepare` is called for all of them, from the first batch on, and
      starts downloads.
    - `cache_bytes`: of a remote source, how much it keeps from one epoch to the next; 0: nothing. `release` is called
      for what the next epoch does not need within so many bytes.
    - `transfers`: of a remote source, what was downloaded in this process so far.

    Errors of `prepare` and `release` are ignored: the read meets the same fault as `prepare`, and `release` comes
    after it.
    """

    @property
    def index(self) -> Index:
        """Number of items and chunk borders."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """Fields of every item, by name."""
        ...

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        ...

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; repeats are allowed."""
        ...

    def close(self) -> None:
        """Close files; the next read opens them again."""
        ...


class Order(Protocol):
    """Sequence in which an epoch visits the items. A frozen value whose repr names all that the sequence depends on.

    An order that depends on the size of batches has `with_batch_size(batch_size)`, too, which returns the order for
    batches of that size; a `Plan` calls it.
    """

    def check(self, index: Index) -> None:
        """Raise PlanError if this order does not fit `index`."""
        ...

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`. Must be pure, and cheap enough to call again at every resume."""
        ...


class Transform(Protocol):
    """Maps an item to an item. Randomness comes from the generator that is passed in."""

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the transformed item; the argument may be modified in place."""
        ...


class Observer(Protocol):
    """Receives timings; never influences what is loaded. May be called from several threads at once."""

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Record that `stage` took `seconds` and moved `nbytes`."""
        ...
