"""Cursor: the only state there is, and the saved form of it.

A saved state is plain JSON of a few hundred bytes, the same on every rank. It includes the identity of its plan by
name, so the error for a state of another plan names the difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.errors import PlanError, ResumeError
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.plan.world import slots

__all__ = ["Cursor"]

_VERSION = 1
_KEYS = {"version", "epoch", "batch", "origin", "plan"}

_NAMES = {
    "items": "the number of items",
    "data": "the data (fields, chunks, content or selection)",
    "order": "the order",
    "seed": "the seed",
    "lanes": "the number of lanes",
    "tail": "the tail",
    "segment": "the segment length in batches",
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a loader: `batch` batches of `epoch` are done, over all ranks."""

    epoch: int = 0
    batch: int = 0
    origin: int = 0
    """Positions of the epoch that were done with another batch size, before batch 0."""

    def state(self, plan: Plan | Segments) -> dict[str, Any]:
        """Return this cursor as plain JSON, with the identity of `plan`."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.batch,
            "origin": self.origin,
            "plan": plan.identity(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], plan: Plan | Segments) -> "Cursor":
        """Return the cursor saved in `state`; raise ResumeError if it does not belong to `plan`."""
        _check_form(state)
        saved, current = state["plan"], plan.identity()
        changes = [
            f"{name} changed from {saved.get(key)!r} to {current[key]!r}"
            for key, name in _NAMES.items()
            if saved.get(key) != current[key]
        ]
        if changes:
            raise ResumeError(
                f"This state belongs to another plan: {'; '.join(changes)}. "
                "Build the source and the plan as they were, or start again without the state."
            )
        cursor = cls(state["epoch"], state["batch"], state["origin"])
        before = _with_batch_size(plan, saved["batch_size"])
        try:
            limit = before.epoch(cursor.epoch, cursor.origin).n_batches
        except PlanError as error:
            raise ResumeError(f"This state is damaged: its position does not exist: {error}") from error
        if cursor.batch > limit:
            raise ResumeError(f"This state is damaged: it is at batch {cursor.batch} of an epoch that has {limit}.")
        return cursor if before.batch_size == plan.batch_size else _change_batch_size(cursor, before, plan, limit)


def _with_batch_size(plan: Plan | Segments, batch_size: int) -> Plan | Segments:
    if isinstance(plan, Segments):
        return replace(plan, plan=replace(plan.plan, batch_size=batch_size))
    return replace(plan, batch_size=batch_size)


def _check_form(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(f"state must be what state_dict() returned, got {str(state)[:80]!r}.")
    if state["version"] != _VERSION:
        raise ResumeError(
            f"The version of a state must be {_VERSION}, got {state['version']!r}. "
            "Resume with the version of Penstock that saved it."
        )
    missing = _KEYS - set(state)
    if missing or not isinstance(state["plan"], Mapping) or "batch_size" not in state["plan"]:
        raise ResumeError(f"This state is damaged: {sorted(missing) or 'its plan'} is missing.")
    counts = {key: state[key] for key in ("epoch", "batch", "origin")}
    for key, value in {**counts, "batch_size": state["plan"]["batch_size"]}.items():
        least = 1 if key == "batch_size" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ResumeError(f"This state is damaged: {key} must be an integer >= {least}, got {value!r}.")


def _change_batch_size(cursor: Cursor, before: Plan | Segments, plan: Plan | Segments, limit: int) -> Cursor:
    """Return the cursor that resumes at the item where `cursor` stopped, with the batch size of `plan`."""
    change = f"batch_size changed from {before.batch_size} to {plan.batch_size} in the middle of epoch {cursor.epoch}"
    if isinstance(plan, Segments) or isinstance(before, Segments):
        if cursor == Cursor():
            return cursor
        raise ResumeError(
            f"{change}, but segments are counted in batches and would start at other items. Keep batch_size."
        )
    if cursor.batch == 0 and cursor.origin == 0:
        return cursor
    if cursor.batch == limit:
        return Cursor(cursor.epoch, 0, plan.length)
    if plan.lanes > 1:
        return Cursor(cursor.epoch, _lane_batch(cursor, before, plan, change))
    done = cursor.origin + cursor.batch * before.batch_size
    batches, rest = divmod(done, plan.batch_size)
    return Cursor(cursor.epoch, batches) if rest == 0 else Cursor(cursor.epoch, 0, done)


def _lane_batch(cursor: Cursor, before: Plan, plan: Plan, change: str) -> int:
    """Return the batch at which all lanes of `plan` are where those of `before` are; raise ResumeError if none is."""
    rounds, over = divmod(cursor.batch, plan.lanes)
    done, rest = divmod(rounds * before.batch_size, plan.batch_size)
    same_lanes = _lane_starts(before) == _lane_starts(plan)
    if over or rest or cursor.origin or not same_lanes:
        raise ResumeError(
            f"{change}, which {plan.lanes} lanes do not allow: each lane is a run of consecutive batches, and it would "
            "start or resume at other items. Finish the epoch with the old batch_size, or use lanes=1."
        )
    return done * plan.lanes


def _lane_starts(plan: Plan) -> list[int]:
    n_lanes = min(plan.lanes, plan.n_batches)
    starts: list[int] = (slots(np.arange(n_lanes), plan.n_batches, plan.lanes) * plan.batch_size).tolist()
    return starts
