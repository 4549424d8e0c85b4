"""Keys and defaults of a training's config, check_real before anything is read."""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = ["DEFAULTS", "SINGLE_FOLD_DEFAULTS", "TRAINING_KEYS", "check_config"]

DEFAULTS: Mapping[str, Any] = {
    "k_folds": 4,
    "num_epochs": 220,
    "batch_size": 24,
    "learning_rate": 0.001,
    "use_class_weights": False,
    "early_stopping": 35,  # epochs without a smaller validation loss; 0 for never
    "standardize": True,
    "standardize_axis": None,  # one mean for all; -2 for one per frequency bin of (channel, frequency, time)
    "standardize_sample_size": None,  # training items to read; None for all
    "aggregate_predictions": True,
    "max_split_attempts": 30_000,
    "min_val_segments": 0,
    "min_test_segments": 0,
    "test_size": 0.2,
    "spec_augment": False,  # True, or arguments of SpecAugment
    "gaussian_noise": False,  # True, or arguments of GaussianNoise
    "aggressive_augmentation": False,
    "optimize_dataloaders": True,  # False for no worker processes and no pinned memory
    "loader_options": {},  # for OptimalDataLoaderFactory: how batches are made, never which ones
    "benchmark_performance": False,
    "mixed_precision": True,  # on a GPU; there is nothing to gain elsewhere
    "gradient_clipping": 1.0,  # 0 for none
    "use_adam": True,  # False for SGD with momentum
    "momentum": 0.9,
    "l2_regularization": 0.0,
    "lr_schedule": None,  # such as {"type": "plateau", "patience": 10}
    "seed": 42,
    "device": None,  # None for CUDA if available
    "checkpoint_dir": None,
    "progress": True,
}
"""Defaults of a cross-validation."""

SINGLE_FOLD_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "num_epochs": 250,
    "batch_size": 48,
    "max_split_attempts": 10_000,
    "min_test_segments": 5,
    "l2_regularization": 1e-4,
}
"""Defaults of a training on a single split."""

TRAINING_KEYS = (
    "batch_size",
    "learning_rate",
    "use_class_weights",
    "early_stopping",
    "standardize",
    "standardize_axis",
    "standardize_sample_size",
    "spec_augment",
    "gaussian_noise",
    "aggressive_augmentation",
    "mixed_precision",
    "gradient_clipping",
    "use_adam",
    "momentum",
    "l2_regularization",
    "lr_schedule",
    "seed",
)
"""Keys that the weights depend on; a checkpoint resumes only if they are the same."""

_LOADER_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "multiprocessing_context",
    "timeout",
    "tuning",
)
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "plateau": {"patience": 10, "factor": 0.2, "min_lr": 1e-6},
    "exponential": {"gamma": 0.95},
    "cosine": {"T_max": None, "eta_min": 1e-6},
}
_OTHER_NAMES = {
    "random_state": "use 'seed' instead",
    "estop_thresh": "use 'early_stopping' instead",
    "initial_lr": "use 'learning_rate' instead",
    "parallel_folds": "folds are trained one after the other; run one process for each to train them in parallel",
    "max_parallel_folds": "folds are trained one after the other; run one process for each to train them in parallel",
    "debug_dataloaders": "all loader settings are logged at level INFO of the logger 'penstock'",
}


def check_config(config: Mapping[str, Any] | None, defaults: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return all keys: the given ones, and `defaults` for the rest.

    Examples
    --------
    >>> check_config({"batch_size": 8})["batch_size"], check_config({})["num_epochs"]
    (8, 220)
    >>> try:
    ...     check_config({"batchsize": 8})
    ... except OptionError as error:
    ...     print(error)
    'batchsize' is not a key of the config; did you mean 'batch_size'?
    """
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(f"config must be a dict of settings by name, got {config!r}.")
    for key in config or {}:
        if key not in DEFAULTS:
            raise OptionError(f"{key!r} is not a key of the config; {_hint(str(key))}")
    full = {**defaults, **(config or {})}
    for key, check in _CHECKS.items():
        full[key] = check(key, full[key])
    if full["loader_options"] and not full["optimize_dataloaders"]:
        raise OptionError("loader_options needs optimize_dataloaders=True, got False. Leave out one of the two.")
    if full["standardize_axis"] is not None and not full["standardize"]:
        raise OptionError("standardize_axis needs standardize=True, got False. Leave out one of the two.")
    if full["lr_schedule"] is not None and full["lr_schedule"]["type"] == "cosine":
        full["lr_schedule"]["T_max"] = full["lr_schedule"]["T_max"] or full["num_epochs"]
    return full


def _hint(key: str) -> str:
    if key in _OTHER_NAMES:
        return f"{_OTHER_NAMES[key]}."
    near = get_close_matches(key, list(DEFAULTS), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(DEFAULTS)}."


def _whole(at_least: int) -> Callable[[str, Any], int]:
    return lambda key, value: check_integer(key, value, at_least=at_least)


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda key, value: None if value is None else check(key, value)


def _real(low: float, high: float = math.inf, *, without_low: bool = False) -> Callable[[str, Any], float]:
    def check_real(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise OptionError(f"{key} must be a number from {low:g} to {high:g}, got {value!r}.")
        if not math.isfinite(value) or (without_low and value == low):
            raise OptionError(f"{key} must be a finite number > {low:g}, got {value!r}.")
        return float(value)

    return check_real


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{key} must be True or False, got {value!r}.")
    return value


def _switch_or_arguments(key: str, value: Any) -> bool | dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else _switch(key, value)


def _axis(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{key} must be an integer, such as -2 for frequency bins, got {value!r}.")
    return value


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise OptionError(f"{key} must be a path, got {value!r}.")
    return Path(value)


def _device(key: str, value: Any) -> str:
    if not isinstance(value, str) and type(value).__name__ != "device":
        raise OptionError(f"{key} must be a name such as 'cpu' or 'cuda:0', got {value!r}.")
    return str(value)


def _loader_options(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not set(value) <= set(_LOADER_OPTIONS):
        raise OptionError(f"{key} must be a dict with keys of {', '.join(_LOADER_OPTIONS)}, got {value!r}.")
    return dict(value)


def _schedule(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.get("type") not in _SCHEDULES:
        raise OptionError(
            f"{key} must be a dict with a 'type' of {', '.join(map(repr, _SCHEDULES))} and its arguments, got "
            f"{value!r}."
        )
    known = _SCHEDULES[value["type"]]
    unknown = set(value) - set(known) - {"type"}
    if unknown:
        raise OptionError(
            f"{key} of type {value['type']!r} must have arguments of {', '.join(known)}, got "
            f"{', '.join(map(repr, sorted(unknown)))}."
        )
    return {"type": value["type"], **known, **value}


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "k_folds": _whole(2),
    "num_epochs": _whole(1),
    "batch_size": _whole(1),
    "learning_rate": _real(0, without_low=True),
    "use_class_weights": _switch,
    "early_stopping": _whole(0),
    "standardize": _switch,
    "standardize_axis": _optional(_axis),
    "standardize_sample_size": _optional(_whole(1)),
    "aggregate_predictions": _switch,
    "max_split_attempts": _whole(1),
    "min_val_segments": _whole(0),
    "min_test_segments": _whole(0),
    "test_size": _real(0.01, 0.99),
    "spec_augment": _switch_or_arguments,
    "gaussian_noise": _switch_or_arguments,
    "aggressive_augmentation": _switch,
    "optimize_dataloaders": _switch,
    "loader_options": _loader_options,
    "benchmark_performance": _switch,
    "mixed_precision": _switch,
    "gradient_clipping": _real(0),
    "use_adam": _switch,
    "momentum": _real(0, 1),
    "l2_regularization": _real(0),
    "lr_schedule": _optional(_schedule),
    "seed": _whole(0),
    "device": _optional(_device),
    "checkpoint_dir": _optional(_path),
    "progress": _switch,
}
