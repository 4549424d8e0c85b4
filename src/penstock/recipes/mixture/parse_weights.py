"""Weights as a user writes them: by name, by temperature, by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.plan.mixed.weights import count_weights
from penstock.recipes.mixture.names import check_names

__all__ = ["Phases", "Weights", "parse_weights"]

Weights = Mapping[str, float] | Sequence[float]

Phases = tuple[tuple[int, tuple[int, ...]], ...]
"""First step, and weight of each source from there on."""


def parse_weights(
    weights: Weights | Mapping[int, Weights] | None, temperature: float | None, sizes: Mapping[str, int]
) -> Phases:
    """Return the weights of each phase as integers.

    Parameters
    ----------
    sizes
        Items of each source, by name.
    """
    if weights is None:
        exponent = 1.0 if temperature is None else 1 / _check_temperature(temperature)
        logs = exponent * np.log(np.array(list(sizes.values()), np.float64))
        return ((0, count_weights(list(sizes.values()) if exponent == 1 else np.exp(logs - logs.max()).tolist())),)
    if temperature is not None:
        raise PlanError(
            f"temperature={temperature!r} makes the weights from the sizes of the sources. Use it without weights=..."
        )
    if not isinstance(weights, Mapping) or not any(_is_schedule(weight) for weight in weights.values()):
        return ((0, _count(weights, sizes)),)
    steps = [check_integer("A step of weights", step, at_least=0, error=PlanError) for step in weights]
    if min(steps) > 0:
        raise PlanError(f"weights by step must begin at step 0, got {min(steps)} as the first one.")
    given = dict(zip(steps, weights.values(), strict=True))
    return tuple((step, _count(given[step], sizes, f" from step {step} on")) for step in sorted(steps))


def _is_schedule(weight: Any) -> bool:
    """Return whether what is given for a key are weights of all sources, and the key is a step therefore."""
    return isinstance(weight, Mapping | list | tuple) or np.ndim(weight) > 0


def _check_temperature(temperature: Any) -> float:
    number = float(temperature) if isinstance(temperature, int | float | np.number) else float("nan")
    if isinstance(temperature, bool) or not number > 0:
        raise PlanError(
            f"temperature must be a number > 0, got {temperature!r}: 1 gives weights in proportion to the sizes of the "
            "sources, larger ones make them more equal."
        )
    return number


def _count(weights: Any, sizes: Mapping[str, int], when: str = "") -> tuple[int, ...]:
    names = list(sizes)
    if isinstance(weights, Mapping):
        check_names(f"weights{when}", weights, names, error=PlanError)
        missing = [name for name in names if name not in weights]
        if missing:
            raise PlanError(f"weights{when} must have one weight per source, but {missing[0]!r} has none.")
        weights = [weights[name] for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray) or len(weights) != len(names):
        raise PlanError(
            f"weights{when} must have one weight per source ({', '.join(map(repr, names))}), by name or in their "
            f"order, got {weights!r}."
        )
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, bool | str | bytes) or not _is_positive(weight):
            raise PlanError(
                f"weights{when} must be finite numbers > 0, got {weight!r} for {name!r}. To leave a source out, do not "
                "name it among the sources."
            )
    return count_weights([float(weight) for weight in weights])


def _is_positive(weight: Any) -> bool:
    try:
        return bool(0 < float(weight) < float("inf"))
    except (TypeError, ValueError, OverflowError):
        return False
