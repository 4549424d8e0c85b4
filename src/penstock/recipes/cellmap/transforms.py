"""Transforms applied to a patch after reading: one spatial transform for all arrays, then one of the values of each."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.spatial.spatial import Spatial

__all__ = ["PatchTransform", "ValueTransform"]


class ValueTransform:
    """A transform of values, random or not, of arrays or of tensors.

    Parameters
    ----------
    transform
        Called with a tensor. It also gets a numpy Generator if its second parameter is required, as in
        `penstock.transform.GaussianNoise`, or is called `rng` or `generator`.
    """

    def __init__(self, transform: Callable[..., Any], name: str) -> None:
        if not callable(transform):
            raise OptionError(f"{name} must be a function of a tensor that returns one, got {transform!r}.")
        self._transform, self._name = transform, name
        self._is_random = _takes_generator(transform)

    def __call__(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """Return the transformed values."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))  # a mirrored patch has negative strides
        found = self._transform(tensor, rng) if self._is_random else self._transform(tensor)
        if not isinstance(found, torch.Tensor | np.ndarray):
            raise OptionError(f"{self._name} must return a tensor, got a {type(found).__name__}.")
        return np.ascontiguousarray(found if isinstance(found, np.ndarray) else found.numpy())

    def __repr__(self) -> str:
        return f"{self._name}={self._transform!r}"


@dataclass(frozen=True, slots=True)
class PatchTransform:
    """A `Transform` of the patches of a dataset."""

    names: tuple[tuple[str, ...], tuple[str, ...]]
    """Inputs and targets."""
    spatial: Spatial | None
    values: tuple[ValueTransform | None, ValueTransform | None]
    """Transforms of the values of inputs and of targets."""
    relations: tuple[tuple[int, tuple[int, ...]], ...]
    """Pairs of a class that may be unknown and the classes that exclude it, as channel numbers."""

    @classmethod
    def make(
        cls,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        spatial: Spatial | None,
        values: tuple[Callable[..., Any] | None, Callable[..., Any] | None],
        relations: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> "PatchTransform | None":
        """Return a transform of patches; None if there is nothing to do."""
        raw, target = values
        if not any((spatial, raw is not None, target is not None, relations)):
            return None
        of_raw = None if raw is None else ValueTransform(raw, "raw_value_transforms")
        of_target = None if target is None else ValueTransform(target, "target_value_transforms")
        return cls(names, spatial, (of_raw, of_target), relations)

    @classmethod
    def number_relations(
        cls, classes: Sequence[str], given: Mapping[str, Sequence[str]] | None
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return `class_relation_dict` with channel numbers instead of names."""
        channels = {name: number for number, name in enumerate(classes)}
        found = []
        for name, others in (given or {}).items():
            unknown = [other for other in (name, *others) if other not in channels]
            if name in channels and len(unknown) < len(others):  # the dict may name classes that are not asked for
                found.append((channels[name], tuple(channels[other] for other in others if other in channels)))
        return tuple(found)

    def __call__(self, item: Mapping[str, Any], rng: np.random.Generator, /) -> dict[str, Any]:
        """Return the transformed patch; `item` is not modified."""
        inputs, targets = self.names
        arrays = {name: item[name] for name in (*inputs, *targets)}
        if self.spatial is not None:
            arrays = dict(self.spatial(arrays, rng))
        if self.relations:
            arrays |= {name: self._mark_absent(arrays[name]) for name in targets}
        for names, transform in zip(self.names, self.values, strict=True):
            if transform is not None:
                arrays |= {name: transform(arrays[name], rng) for name in names}
        return {**item, **arrays}

    def _mark_absent(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return labels where an unknown class is 0 wherever a class that excludes it is present."""
        found = labels.copy()
        for number, others in self.relations:
            taken = (labels[list(others)] > 0).any(axis=0)
            found[number][np.isnan(found[number]) & taken] = 0
        return found


def _takes_generator(transform: Callable[..., Any]) -> bool:
    # torch modules accept any arguments in __call__; the signature is that of forward.
    called = transform.forward if isinstance(transform, torch.nn.Module) else transform
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # built in C, without a signature
        return False
    positional = [entry for entry in parameters if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is second.empty or second.name in ("rng", "generator")
