"""Find the rank of this process."""

import os

import torch.distributed as dist

from penstock.core.errors import OptionError
from penstock.plan.world import World

__all__ = ["current_world"]


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
