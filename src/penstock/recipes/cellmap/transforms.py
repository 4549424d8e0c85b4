"""Seed 003: what is done to a patch after it was read: one geometric change for all arrays, then their values."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.spatial.spatial import Spatial

__all__ = ["PatchChanges", "ValueChange"]


class ValueChange:
    """A function of values, with or without randomness, of arrays or of tensors.

    Parameters
    ----------
    change
        Called with a tensor. One that must be given a second argument, such as
        `penstock.transform.GaussianNoise`, or that calls it `rng` or `generator`, is given a numpy Generator.
    """

    def __init__(self, change: Callable[..., Any], name: str) -> None:
        if not callable(change):
            raise OptionError(f"{name}={change!r}; give what is called with a tensor and returns one.")
        self._change, self._name = change, name
        self._random = _takes_two(change)

    def __call__(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """Return other values."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))  # a mirrored patch runs backwards
        found = self._change(tensor, rng) if self._random else self._change(tensor)
        if not isinstance(found, torch.Tensor | np.ndarray):
            raise OptionError(f"{self._name} returned a {type(found).__name__}; it takes a tensor and returns one.")
        return np.ascontiguousarray(found if isinstance(found, np.ndarray) else found.numpy())

    def __repr__(self) -> str:
        return f"{self._name}={self._change!r}"


@dataclass(frozen=True, slots=True)
class PatchChanges:
    """A `Transform` of the patches of a data set."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    classes: tuple[str, ...]
    spatial: Spatial | None = None
    raw: ValueChange | None = None
    target: ValueChange | None = None
    relations: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """A class that may be unknown, and those whose voxels it cannot have."""

    @classmethod
    def related(
        cls, classes: Sequence[str], given: Mapping[str, Sequence[str]] | None
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the relations of `class_relation_dict` by number."""
        places = {name: number for number, name in enumerate(classes)}
        found = []
        for name, others in (given or {}).items():
            unknown = [other for other in (name, *others) if other not in places]
            if name in places and len(unknown) < len(others):  # the dict may be about more classes than are asked for
                found.append((places[name], tuple(places[other] for other in others if other in places)))
        return tuple(found)

    @property
    def needed(self) -> bool:
        """Whether anything is done at all."""
        return any((self.spatial, self.raw, self.target, self.relations))

    def __call__(self, item: Mapping[str, Any], rng: np.random.Generator, /) -> dict[str, Any]:
        """Return the changed patch; what was read is left as it is."""
        arrays = {name: item[name] for name in (*self.inputs, *self.targets)}
        if self.spatial is not None:
            arrays = dict(self.spatial(arrays, rng))
        for name in self.targets:
            if self.relations:
                arrays[name] = self._known(arrays[name])
        for names, change in ((self.inputs, self.raw), (self.targets, self.target)):
            if change is not None:
                arrays |= {name: change(arrays[name], rng) for name in names}
        return {**item, **arrays}

    def _known(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return labels in which a voxel of one class is no voxel of those that exclude it: 0 in place of unknown."""
        found = labels.copy()
        for number, others in self.relations:
            taken = (labels[list(others)] > 0).any(axis=0)
            found[number][np.isnan(found[number]) & taken] = 0
        return found


def _takes_two(change: Callable[..., Any]) -> bool:
    # A module of torch is called with anything; what it takes is said by its forward.
    called = change.forward if isinstance(change, torch.nn.Module) else change
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # of C, without a signature
        return False
    places = [entry for entry in parameters if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].default is places[1].empty or places[1].name in ("rng", "generator"))
