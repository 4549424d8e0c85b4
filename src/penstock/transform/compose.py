"""Chain transforms, in an order that destroys no data."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.core.protocols import Transform

__all__ = ["Compose", "OfItem", "as_transform", "check_order"]


class Compose:
    """Applies transforms one after the other, with one random generator.

    Raises OptionError if a transform would clip the output of an earlier one. Transforms, also your own, declare this
    by two optional attributes: `clips_to`, the (low, high) that the output is clipped to, and `output_range`, the
    (low, high) that contains nearly all of the output.

    Examples
    --------
    >>> from penstock.transform.noise import Clip
    >>> from penstock.transform.standardize import Standardize
    >>> Compose([Clip(0, 1), Standardize(0.5, 0.25)])(np.array([0.5, 3.0]), np.random.default_rng()).tolist()
    [0.0, 2.0]
    >>> try:
    ...     Compose([Standardize(0.5, 0.25), Clip(0, 1)])
    ... except OptionError as error:
    ...     print(str(error)[:82])
    Clip(low=0, high=1, field=None) after Standardize(0.5, 0.25) would destroy data: i
    """

    __slots__ = ("steps",)

    def __init__(self, steps: Iterable[Transform]) -> None:
        given = tuple(steps) if isinstance(steps, Iterable) else None
        if given is None:
            raise OptionError(f"steps must be a list of transforms, got {type(steps).__name__}. Put it in [ ].")
        for step in given:
            if not callable(step):
                raise OptionError(f"A transform must be callable as transform(item, rng), got {step!r}.")
        self.steps: tuple[Transform, ...] = tuple(inner for step in given for inner in getattr(step, "steps", (step,)))
        """All transforms; a nested Compose is replaced by its transforms."""
        check_order(self.steps)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item after all transforms."""
        for step in self.steps:
            item = step(item, rng)
        return item

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.steps))}])"


class OfItem:
    """A function of an item alone, as a transform."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, item: Any, _: np.random.Generator, /) -> Any:
        """Return what the function makes of the item."""
        return self.function(item)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__qualname__", repr(self.function)))


def as_transform(given: "Transform | Callable[[Any], Any]") -> Transform:
    """Return a transform: what needs an item and a generator as it is, and any other function as one of the item."""
    if not callable(given) or isinstance(given, type):
        raise OptionError(f"A transform must be a function of an item, or transform(item, rng), got {given!r}.")
    try:
        parameters = list(inspect.signature(given).parameters.values())
    except (TypeError, ValueError):  # of a built-in
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind in positional]
    transform: Any = given
    return transform if len(needed) == 2 else OfItem(transform)


def check_order(steps: Iterable[Any]) -> None:
    """Raise OptionError if a step would clip the output of an earlier step on the same field."""
    made: dict[Any, tuple[Any, tuple[float, float]]] = {}
    for step in steps:
        field = getattr(step, "field", None) or 0  # None and 0 are the same element of a tuple
        clips_to = getattr(step, "clips_to", None)
        if clips_to is not None and field in made:
            maker, (low, high) = made[field]
            if clips_to[0] > low or clips_to[1] < high:
                raise OptionError(
                    f"{step!r} after {maker!r} would destroy data: its input is mostly within {low:.3g} … {high:.3g}, "
                    f"and it clips to {clips_to[0]:g} … {clips_to[1]:g}. Put it before {type(maker).__name__}, or use "
                    "a range in the units that the data has there."
                )
        output_range = getattr(step, "output_range", None)
        if output_range is not None:
            made[field] = (step, output_range)
