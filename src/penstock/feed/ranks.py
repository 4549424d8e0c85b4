"""Find the rank of this process, and agree with other ranks."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.core.errors import OptionError
from penstock.plan.world import World

__all__ = ["agree", "current_world"]

_T = TypeVar("_T")


def current_world() -> World:
    """Return the rank and world size of `torch.distributed` if it is initialised, else of the environment, else 0 of 1.

    The environment is what launchers such as `torchrun` set: RANK and WORLD_SIZE.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        return World()
    try:
        return World(int(rank or ""), int(size or ""))
    except ValueError as error:
        raise OptionError(
            f"The environment must give a valid rank and world size, got RANK={rank!r} and WORLD_SIZE={size!r}. "
            "Set both as torchrun does, unset both, or pass world=World(rank, size)."
        ) from error


def agree(choose: Callable[[], _T], world: World, what: str) -> _T:
    """Return what rank 0 chooses, on every rank. With several ranks, all of them must call it.

    Parameters
    ----------
    choose
        Called on rank 0 only; an error that it raises is raised on every rank. What it returns must be picklable.
    what
        What is chosen, for the error if ranks cannot talk to each other.
    """
    if world.size == 1:
        return choose()
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            f"{what} with {world.size} ranks needs torch.distributed, because all ranks must have the same order. Call "
            "torch.distributed.init_process_group() before the loader is made, or leave it out."
        )
    answer: list[Any] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = choose()
        except Exception as error:  # the other ranks wait for an answer
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    chosen: _T = answer[0]
    return chosen
