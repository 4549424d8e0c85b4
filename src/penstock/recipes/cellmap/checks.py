"""Checks the arguments of datasets: item numbers, shapes and scales of arrays, names, and options of URLs."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.source.stored.folders import Folders

__all__ = ["check_array", "check_names", "check_numbers", "make_folders"]


def check_numbers(dataset: Any, indices: Sequence[int]) -> list[int]:
    """Return item numbers as integers; raise IndexError for one that the dataset does not have."""
    numbers = [operator.index(index) for index in indices]
    for number in numbers:
        if not 0 <= number < len(dataset):
            raise IndexError(f"Item numbers of {dataset!r} must be from 0 to {len(dataset) - 1}, got {number}.")
    return numbers


def check_array(name: str, array: Mapping[str, Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return shape and scale of an array of `input_arrays` or `target_arrays`."""
    if not isinstance(array, Mapping) or set(array) != {"shape", "scale"}:
        raise OptionError(f"Array {name!r} must be {{'shape': (z, y, x) voxels, 'scale': world units}}, got {array!r}.")
    shape, scale = tuple(array["shape"]), tuple(float(size) for size in array["scale"])
    if len(shape) != len(scale) or len(shape) not in (2, 3):
        raise OptionError(
            f"Array {name!r} must have three numbers, or two, as shape and scale, got {shape} and {scale}."
        )
    return tuple(check_integer(f"shape of {name!r}", size, at_least=1) for size in shape), scale


def check_names(inputs: Mapping[str, Any], targets: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Raise OptionError unless arrays and classes have unique names, and there are inputs."""
    if not inputs:
        raise OptionError(
            "input_arrays must have at least one array, such as {'raw': {'shape': ..., 'scale': ...}}, got none."
        )
    repeated = sorted(set(inputs) & set(targets))
    if repeated or "idx" in {*inputs, *targets}:
        raise OptionError(f"Names of arrays must be unique, and not 'idx', got {repeated or ['idx']}. Rename them.")
    if targets and not classes:
        raise OptionError("target_arrays need classes, got none; name the classes.")
    if len(set(classes)) < len(classes):
        raise OptionError(f"classes must be unique, got {list(classes)}.")


def make_folders(options: Mapping[str, Any]) -> Folders:
    """Return what opens the paths and URLs of a dataset, by its options `store`, `cache` and `cache_bytes`."""
    if options.get("cache") is None and options.get("cache_bytes") is not None:
        raise OptionError(
            f"cache_bytes={options['cache_bytes']} needs cache, the folder to keep them in. The memory of decoded "
            "chunks is memory_bytes."
        )
    return Folders(store=options.get("store"), cache=options.get("cache"), cache_bytes=options.get("cache_bytes"))
