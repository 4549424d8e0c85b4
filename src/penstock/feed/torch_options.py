"""Keywords of torch's DataLoader, for loaders that stand in for one: what each means, and what to use instead.

`Loader` itself has options of its own. A recipe that takes the keywords of a DataLoader passes them through here, so
that they mean the same in all recipes.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.checks import check_integer, check_keys, check_number, option_names
from penstock.core.errors import OptionError
from penstock.run.options import RunOptions

__all__ = ["TorchOptions", "refuse_keywords"]

_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(DataLoader).parameters.items()}
_INSTEAD = {
    "batch_sampler": "Use batch_size; for batches of your own, Loader(source, Plan(source.index, Listed(items), n)).",
    "pin_memory_device": "Use device=: batches for a CUDA device are pinned.",
    "in_order": "Leave it out: batches come in the same order for any number of workers.",
}


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Keywords of torch's DataLoader, as they were given; `run_options` is what they mean for a `Loader`."""

    shuffle: bool | None = None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    generator: torch.Generator | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    persistent_workers: bool = True
    prefetch_factor: int | None = None
    timeout: float | None = None
    pin_memory: bool | None = None
    sampler: Any = None

    def __post_init__(self) -> None:
        for name in ("shuffle", "drop_last", "persistent_workers", "pin_memory"):
            value = getattr(self, name)
            if value is not None and value not in (True, False):
                raise OptionError(f"{name} must be True or False, got {value!r}.")
        for name in ("collate_fn", "worker_init_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function, or None, got {value!r}.")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise OptionError(f"generator must be a torch.Generator, or None, got {self.generator!r}.")
        if self.prefetch_factor is not None:
            check_integer("prefetch_factor", self.prefetch_factor, at_least=1)
        if self.timeout is not None:
            check_number("timeout", self.timeout, at_least=0)

    @classmethod
    def split(
        cls, given: Mapping[str, Any], caller: Callable[..., Any], *more: Callable[..., Any]
    ) -> tuple["TorchOptions", dict[str, Any]]:
        """Return the keywords of torch's DataLoader in `given`, and all others.

        Raises OptionError for those that mean nothing in `caller`, and those that neither it nor one of `more` has.
        """
        names = {field.name for field in fields(cls)}
        refuse_keywords(given, _INSTEAD, f"in {caller.__name__}")
        others = {name: value for name, value in given.items() if name not in names and name not in _INSTEAD}
        check_keys("Options", others, option_names(cls, caller, *more))
        return cls(**{name: value for name, value in given.items() if name in names}), others

    def seed(self, given: int | None, otherwise: int) -> int:
        """Return the seed of the order: `given`, the initial seed of the generator, or `otherwise`."""
        if self.generator is None:
            return otherwise if given is None else given
        if given is not None:
            raise OptionError(f"Either seed or generator must be given, got both: seed={given!r}.")
        return int(self.generator.initial_seed()) & (2**63 - 1)

    def run_options(self, num_workers: int) -> RunOptions:
        """Return the options of a `Loader` with this many workers.

        Workers are processes if they are to be started in a certain way, or to call a function when they start.
        """
        context = self.multiprocessing_context
        if context is not None and not num_workers:
            raise OptionError("multiprocessing_context needs num_workers >= 1, got 0.")
        method: Any = context if context is None or isinstance(context, str) else context.get_start_method()
        return RunOptions(
            executor="auto" if method is None else "processes",
            prefetch=self.prefetch_factor or 2,
            start_method=method,
            persistent=bool(self.persistent_workers),
            timeout_seconds=self.timeout or None,
            pin_memory=bool(self.pin_memory),
            worker_init=self.worker_init_fn,
        )


def refuse_keywords(given: Mapping[str, Any], instead: Mapping[str, str], where: str) -> None:
    """Raise OptionError if a keyword of `instead` is given; a value that is torch's default requests nothing."""
    for name, advice in instead.items():
        default = _DEFAULTS.get(name)
        if name in given and given[name] is not default and given[name] != default:
            raise OptionError(f"{name} must be {default!r} {where}, got {given[name]!r}. {advice}")
