"""Messages between the consumer's process and its workers: requests for batches, and answers."""

import io
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import reduction
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import OptionError, WorkerError
from penstock.core.transfers import Transfers
from penstock.plan.cursor import Cursor
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.make_batch import BatchMaker
from penstock.run.processes.ring import Packed
from penstock.run.processes.shared_pages import SharedPages

__all__ = ["Answer", "NewPlan", "RemoteError", "Request", "Specification", "name_unpicklable"]


class Request(NamedTuple):
    """Batches requested from a worker, which makes them together."""

    number: int
    """Requests of a pool are numbered 1, 2, 3 …"""

    start: Cursor
    """Where the rank began or resumed; steps are counted from here."""

    steps: range
    slot: int
    """Slot of the ring that the batches are written to."""


class NewPlan(NamedTuple):
    """The plan of all requests that follow."""

    plan: Plan


class Answer(NamedTuple):
    """What a worker made of a request."""

    number: int
    """The request; 0 if the worker could not start."""

    batches: Packed | None
    """A list of batches; None if it skipped the request, because nobody waits for it any more."""

    error: "RemoteError | None"
    """Why there are fewer batches than requested."""

    records: list[tuple[str, float, int]]
    transfers: Transfers | None = None
    """What the worker has downloaded since its last answer; None if its source downloads nothing."""


class RemoteError(NamedTuple):
    """An exception on its way out of a worker process."""

    pickled: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Return the error with its traceback as text."""
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            return cls(None, text)
        return cls(pickled, text)

    def error(self) -> BaseException:
        """Return the exception, with the worker's traceback as a note."""
        found = (
            pickle.loads(self.pickled)
            if self.pickled is not None
            else WorkerError("A worker raised an error that cannot be pickled.")
        )
        assert isinstance(found, BaseException), "only exceptions are put in"
        found.add_note(f"[penstock] in a worker process:\n{self.text}")
        return found


@dataclass(frozen=True)
class Specification:
    """All that a worker needs. On its way to a process that is not forked, it stays pickled until `unpickle`."""

    plan: Plan
    world: World
    maker: BatchMaker
    method: str
    worker_init: Callable[[int], None] | None = None
    _pages: SharedPages = field(init=False, repr=False, compare=False)

    def unpickle(self) -> "Specification":
        """Return the specification itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled in here, the error of a part that the worker cannot unpickle reaches the consumer.
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        try:
            pickler.dump((self.plan, self.world, self.maker, self.method, self.worker_init))
        except Exception as error:
            raise self._find_unpicklable(error) from error
        if pickler.names_in_main and not _can_import_main():
            names = ", ".join(sorted(pickler.names_in_main))
            raise OptionError(
                f"start_method={self.method!r} imports what a worker needs, but {names} is defined in __main__, which "
                "workers cannot import: a notebook or an interactive session. Define it in a module, or use "
                "start_method='fork' or executor='threads'."
            )
        # Not through the pipe by which a process receives its arguments: if it is killed meanwhile, the other side may
        # wait for ever until it has read them. The memory is kept until the process has inherited it.
        pickled = np.frombuffer(stream.getbuffer(), np.uint8)
        object.__setattr__(self, "_pages", SharedPages(len(pickled)))
        self._pages.memory[:] = pickled
        return _PickledSpecification, (self._pages,)

    def _find_unpicklable(self, error: Exception) -> OptionError:
        parts = {
            "source": self.maker.source,
            "transform": self.maker.transform,
            "collate": self.maker.collate_items,
            "plan": self.plan,
            "worker_init": self.worker_init,
        }
        for name, part in parts.items():
            try:
                reduction.ForkingPickler.dumps(part)
            except Exception as found:
                return OptionError(
                    f"start_method={self.method!r} needs to pickle the {name}, but {part!r} cannot be pickled: {found}."
                    " Define it at the top of a module (no lambda, no local function), or use executor='threads'."
                )
        return OptionError(f"start_method={self.method!r} could not pickle what a worker needs: {error}")


@dataclass(frozen=True, slots=True)
class _PickledSpecification:
    """A specification in a process that was not forked."""

    pickled: SharedPages

    def unpickle(self) -> Specification:
        return Specification(*pickle.loads(self.pickled.memory.data))


class _Pickler(reduction.ForkingPickler):
    """Pickles for a process that is being started, and notes what is defined in `__main__`."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.names_in_main: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        """Note a class or function of `__main__`; it is pickled as any other."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.names_in_main.add(value.__qualname__)


def name_unpicklable(*parts: Any) -> str | None:
    """Return why parts cannot be sent to a process that is not forked; None if they can."""
    pickler = _Pickler(io.BytesIO())
    try:
        pickler.dump(parts)
    except Exception as error:
        return str(error)
    if pickler.names_in_main and not _can_import_main():
        return f"{', '.join(sorted(pickler.names_in_main))} is defined in __main__, which workers cannot import"
    return None


def _can_import_main() -> bool:
    main = sys.modules["__main__"]
    # The file of a program that is read from stdin is called "<stdin>", and does not exist.
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "<none>").exists()
