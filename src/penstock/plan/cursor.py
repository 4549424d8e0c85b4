"""Cursor: the only state there is, and the saved form of it.

A saved state is plain JSON of a few hundred bytes, the same on every rank. It includes the identity of its plan by
name, so the error for a state of another plan names the difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import PlanError, ResumeError
from penstock.plan.batch_plan import BatchPlan

__all__ = ["Cursor"]

_VERSION = 1
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

    def state(self, plan: BatchPlan) -> dict[str, Any]:
        """Return this cursor as plain JSON, with the identity of `plan`."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.batch,
            "origin": self.origin,
            "plan": plan.identity(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], plan: BatchPlan) -> "Cursor":
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
        epoch, batch, origin = state["epoch"], state["batch"], state["origin"]
        try:
            before = plan.with_batches(saved["batch_size"], saved["tail"])
            limit = before.epoch(epoch, origin).n_batches
        except PlanError as error:
            raise ResumeError(f"This state is damaged: its position does not exist: {error}") from error
        if batch > limit:
            raise ResumeError(f"This state is damaged: it is at batch {batch} of an epoch that has {limit}.")
        if before is not plan:
            batch, origin = plan.convert_position(before, epoch=epoch, batch=batch, origin=origin)
        return cls(epoch, batch, origin)


def _check_form(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(f"state must be what state_dict() returned, got {str(state)[:80]!r}.")
    if state["version"] != _VERSION:
        raise ResumeError(
            f"The version of a state must be {_VERSION}, got {state['version']!r}. "
            "Resume with the version of Penstock that saved it."
        )
    missing = _KEYS - set(state)
    if missing or not isinstance(state["plan"], Mapping) or not {"batch_size", "tail"} <= set(state["plan"]):
        raise ResumeError(f"This state is damaged: {sorted(missing) or 'its plan'} is missing.")
    counts = {key: state[key] for key in ("epoch", "batch", "origin")}
    for key, value in {**counts, "batch_size": state["plan"]["batch_size"]}.items():
        least = 1 if key == "batch_size" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ResumeError(f"This state is damaged: {key} must be an integer >= {least}, got {value!r}.")
