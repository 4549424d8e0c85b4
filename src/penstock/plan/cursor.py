"""Cursor: the only state there is, and the saved form of it.

A saved state is plain JSON of a few hundred bytes, the same on every rank. It includes the identity of its plan by
name, so the error for a state of another plan names the difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import OptionError, ResumeError
from penstock.plan.plan import Plan

__all__ = ["Cursor", "check_count", "check_state", "is_same", "show_value"]

_VERSION = 1
_LIMIT = 1 << 62
_KEYS = {"version", "epoch", "batch", "origin", "plan"}

_NAMES = {
    "items": "the number of items",
    "data": "the data (fields, chunks, content or selection)",
    "order": "the order",
    "seed": "the seed",
    "lanes": "the number of lanes",
    "segment": "the segment length in batches",
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a loader: `batch` batches of `epoch` are done, over all ranks."""

    epoch: int = 0
    batch: int = 0
    origin: int = 0
    """Positions of the epoch that were done with another batch size, before batch 0."""

    def state(self, plan: Plan) -> dict[str, Any]:
        """Return this cursor as plain JSON, with the identity of `plan`."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.batch,
            "origin": self.origin,
            "plan": plan.identity(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], plan: Plan) -> "Cursor":
        """Return the cursor saved in `state`; raise ResumeError if it does not belong to `plan`."""
        check_state(state)
        saved, current = state["plan"], plan.identity()
        changes = [
            f"{name} changed from {show_value(saved.get(key))} to {current[key]!r}"
            for key, name in _NAMES.items()
            if not is_same(saved.get(key), current[key])
            and not (key == "data" and _is_same_content(saved.get(key), current[key]))
        ]
        changes += _list_lost_chunks(saved.get("data"), current["data"])
        if changes:
            raise ResumeError(
                f"This state belongs to another plan: {'; '.join(changes)}. "
                "Build the source and the plan as they were, or start again without the state."
            )
        epoch, batch, origin = state["epoch"], state["batch"], state["origin"]
        try:
            before = plan.with_batches(saved["batch_size"], saved["tail"])
            limit = before.epoch(epoch, origin).n_batches
        except OptionError as error:
            raise ResumeError(f"This state is damaged: its position does not exist: {error}") from error
        if batch > limit:
            raise ResumeError(f"This state is damaged: it is at batch {batch} of an epoch that has {limit}.")
        if before is not plan:
            batch, origin = plan.convert_position(before, epoch=epoch, batch=batch, origin=origin)
        return cls(epoch, batch, origin)


def _is_same_content(saved: Any, current: Any) -> bool:
    """Return whether two digests of an index agree, apart from which parts are stored."""
    return isinstance(saved, str) and saved.partition(".")[0] == str(current).partition(".")[0]


def _list_lost_chunks(saved: Any, current: Any) -> list[str]:
    """Return what to say if parts of the data are missing that were there, or the other way round."""
    if not _is_same_content(saved, current):
        return []
    before, now = saved.partition(".")[2], current.partition(".")[2]
    if before == now or not now:  # not now: all are there, or may be missing
        return []
    return [
        "chunks of the stored arrays are missing, or others than before: restore them, or open the source with "
        "missing_chunks='fill'"
    ]


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ResumeError if this is not the form of a state, of whatever plan."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(f"state must be what state_dict() returned, got {show_value(state)}.")
    if not is_same(state["version"], _VERSION):
        raise ResumeError(
            f"The version of a state must be {_VERSION}, got {show_value(state['version'])}. "
            "Resume with the version of Penstock that saved it."
        )
    missing = _KEYS - set(state)
    if missing or not isinstance(state["plan"], Mapping) or not {"batch_size", "tail"} <= set(state["plan"]):
        raise ResumeError(f"This state is damaged: {sorted(missing) or 'its plan'} is missing.")
    for key in ("epoch", "batch", "origin"):
        check_count(key, state[key])
    check_count("batch_size", state["plan"]["batch_size"], at_least=1)


def check_count(name: str, value: Any, at_least: int = 0) -> int:
    """Return a count of a state; raise ResumeError if it is no integer that a loader can have reached."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ResumeError(f"This state is damaged: {name} must be an integer >= {at_least}, got {show_value(value)}.")
    if value >= _LIMIT:
        raise ResumeError(f"This state is damaged: {name} must be less than 2^62, got {show_value(value)}.")
    return value


def is_same(saved: Any, current: Any) -> bool:
    """Return whether two values of states are equal; a saved one may be anything, such as an array."""
    try:
        return isinstance(saved, bool) is isinstance(current, bool) and bool(saved == current)
    except Exception:  # whatever its class does
        return False


def show_value(value: Any) -> str:
    """Return a value of a state for an error message: its first 80 characters."""
    try:
        return repr(value)[:80]
    except Exception:  # an integer of more than 4,300 digits, or whatever its class does
        return f"a value of type {type(value).__name__}"
