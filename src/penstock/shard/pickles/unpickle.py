"""Pickles of data, and files of `torch.save`, as values.

A pickle is a program. Existing shards hold `.pyd` members, which are pickled arrays and tensors, and `.pt` members,
whose structure is a pickle. Accepted are numpy arrays, dtypes and scalars, torch tensors and plain containers. Any
other name is refused before it is imported.
"""

from collections.abc import Callable
from typing import Any

from penstock.shard.pickles.resolve import resolve
from penstock.shard.pickles.tensors import ALL_NAMES, load_saved
from penstock.shard.pickles.unpickler import Budget, PickleRefused, Unpickler

__all__ = ["load_tensors", "unpickle"]

_MAX_LETTERS = 200


def unpickle(payload: bytes) -> Any:
    """Return the data in a pickle; raise PickleRefused if it holds anything else, or more than an item may take."""
    return _read(payload, lambda budget: Unpickler(payload, budget, ALL_NAMES).load())


def load_tensors(payload: bytes) -> Any:
    """Return what `torch.save` wrote, on the CPU; raise PickleRefused as `unpickle` does."""
    return _read(payload, lambda budget: load_saved(payload, budget, ALL_NAMES))


def _read(payload: bytes, load: Callable[[Budget], Any]) -> Any:
    budget = Budget(len(payload))
    try:
        return resolve(load(budget), len(payload))
    except PickleRefused:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        # Some errors hold a value of the pickle, which may be too large to print.
        text = error.args[0] if len(error.args) == 1 and type(error.args[0]) is str else ""
        reason = f"{type(error).__name__}: {text[:_MAX_LETTERS]}".removesuffix(": ")
        raise PickleRefused(f"not a valid pickle of data: {reason}") from error
