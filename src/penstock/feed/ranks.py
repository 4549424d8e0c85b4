"""Find the rank of this process, and agree with other ranks."""

import gc
import logging
import os
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.core.errors import OptionError
from penstock.plan.world import World

__all__ = ["check_equal", "current_world"]

_LOG = logging.getLogger("penstock")


def current_world() -> World:
    """Return the rank and world size of `torch.distributed` if it is initialised, else of the environment, else 0 of 1.

    The environment is what launchers set: RANK and WORLD_SIZE, as `torchrun` does, or else the variables of a Slurm
    step, which `srun` starts. With a device mesh of several dimensions, ranks that hold parts of one model need the
    same batches: OptionError asks for a world.
    """
    if dist.is_available() and dist.is_initialized():
        _check_no_mesh()
        return World(dist.get_rank(), dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        return _slurm_world()
    try:
        return World(int(rank or ""), int(size or ""))
    except ValueError as error:
        raise OptionError(
            f"The environment must give a valid rank and world size, got RANK={rank!r} and WORLD_SIZE={size!r}. "
            "Set both as torchrun does, unset both, or pass world=World(rank, size)."
        ) from error


def _check_no_mesh() -> None:
    # torch has no list of meshes, and most programs have none: 10 ms to find out.
    for mesh in gc.get_referrers(DeviceMesh):
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 and mesh.size() > 1:
            names = mesh.mesh_dim_names
            # Not that of a pipeline or of a model's parts, if one is named after data.
            name = None if names is None else repr(next((each for each in names if each[0] == "d"), names[0]))
            line = (
                "World(mesh.get_local_rank(0), mesh.size(0))"
                if name is None
                else f"World(mesh[{name}].get_local_rank(), mesh[{name}].size())"
            )
            raise OptionError(
                f"world must be given with a mesh of {mesh.ndim} dimensions {names or ''}: ranks that hold parts of "
                "one model, as in tensor parallelism, need the same batches. Name the dimension of the others, such "
                f"as world={line}; if all differ, world=World(dist.get_rank(), dist.get_world_size())."
            )


def _slurm_world() -> World:
    """Return the rank of this process in a Slurm step; 0 of 1 in a batch script, which is no step of several tasks."""
    rank, size = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_STEP_NUM_TASKS")
    if rank is None or size in (None, "", "0", "1"):
        return World()
    try:
        world = World(int(rank), int(size or ""))
    except ValueError as error:
        raise OptionError(
            "The environment must give a valid rank and world size, got "
            f"SLURM_PROCID={rank!r} and SLURM_STEP_NUM_TASKS={size!r}. Set RANK and WORLD_SIZE as torchrun does."
        ) from error
    if world.rank == 0:
        _report_slurm(world.size)
    return world


@cache
def _report_slurm(size: int) -> None:
    _LOG.warning(
        "The %s tasks of this Slurm step share the batches. If each task trains on all of them, set RANK=0 and "
        "WORLD_SIZE=1.",
        size,
    )


def check_equal(number: int, world: World, what: str) -> None:
    """Raise OptionError on every rank if they have different numbers; all ranks of `torch.distributed` must call it."""
    if world.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    if len(set(numbers)) > 1:
        raise OptionError(
            f"{what} must be as many on all ranks, got {', '.join(map(str, numbers))}: the others would wait for ever."
        )
