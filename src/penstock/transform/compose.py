"""Several transforms as one, in an order that destroys nothing."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.core.protocols import Transform

__all__ = ["Compose", "check_order"]


class Compose:
    """One transform after the other, each with the randomness that the ones before it have left.

    An order in which one transform would cut off what another has made is refused: what clips to a range, after what
    moves the data out of it. A transform says so itself, by two attributes that it may have (`Transform`s of your own
    as well): `clips_to`, the (low, high) outside of which nothing is left, and `output_range`, the (low, high) where
    nearly all of its output lies.

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
    Clip(low=0, high=1, field=None) after Standardize(0.5, 0.25) would destroy data: w
    """

    __slots__ = ("steps",)

    def __init__(self, steps: Iterable[Transform]) -> None:
        given = tuple(steps) if isinstance(steps, Iterable) else None
        if given is None:
            raise OptionError(f"Compose takes a list of transforms, got {type(steps).__name__}; put it in [ ].")
        for step in given:
            if not callable(step):
                raise OptionError(f"{step!r} is no transform; give what is called as transform(item, rng).")
        self.steps: tuple[Transform, ...] = tuple(inner for step in given for inner in getattr(step, "steps", (step,)))
        """All of them; those of a Compose within this one stand for themselves."""
        check_order(self.steps)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return what the last of them gives."""
        for step in self.steps:
            item = step(item, rng)
        return item

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.steps))}])"


def check_order(steps: Iterable[Any]) -> None:
    """Raise OptionError where a step cuts off what one before it has made, of the same part of an item."""
    made: dict[Any, tuple[Any, tuple[float, float]]] = {}
    for step in steps:
        part = getattr(step, "field", None) or 0  # None and 0 are the same part of a tuple
        clips_to = getattr(step, "clips_to", None)
        if clips_to is not None and part in made:
            maker, (low, high) = made[part]
            if clips_to[0] > low or clips_to[1] < high:
                raise OptionError(
                    f"{step!r} after {maker!r} would destroy data: what comes in lies mostly within {low:.3g} … "
                    f"{high:.3g}, and all of it outside of {clips_to[0]:g} … {clips_to[1]:g} would be cut off. Put it "
                    f"before {type(maker).__name__}, or use a range in the units that the data has there."
                )
        output_range = getattr(step, "output_range", None)
        if output_range is not None:
            made[part] = (step, output_range)
