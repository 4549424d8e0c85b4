"""Batches sampled within a chunk in memory, and the chunk arithmetic of a training loop.

Sampling happens on the device of the chunk, without synchronizing, and is reproducible: the chunks of a loader carry a
generator that depends on seed, epoch and chunk only.
"""

import random
import sys
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Literal, TextIO, get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for

__all__ = [
    "ChunkLatencyStats",
    "calculate_chunk_params",
    "compute_neuron_phases",
    "generate_random_chunks",
    "sample_batch_indices",
    "sample_batch_within_chunk",
    "set_default_generator",
]

_Device = str | torch.device

# The generator of each tensor of a chunk, for as long as the tensor exists.
_GENERATORS: MutableMapping[torch.Tensor, torch.Generator] = WeakTensorKeyDictionary()
AcquisitionMode = Literal["all_time_points", "time_aligned", "staggered_random"]


def set_default_generator(tensors: Iterable[torch.Tensor], generator: torch.Generator) -> None:
    """Let `sample_batch_within_chunk` sample from any of `tensors` with `generator` if it is given none."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):  # fields of strings are lists
            _GENERATORS[tensor] = generator


def sample_batch_within_chunk(
    chunk_data: torch.Tensor,
    chunk_stim: torch.Tensor | None = None,  # noqa: ARG001  # part of the signature; frames are those of chunk_data
    wmat_indices: torch.Tensor | None = None,
    wmat_indptr: torch.Tensor | None = None,
    batch_size: int = 1,
    total_steps: int = 1,
    num_neurons_to_zero: int = 0,
    device: _Device | None = None,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first frames of a batch, the neurons to zero, and those neurons with all their inputs.

    Parameters
    ----------
    chunk_data
        The chunk, frames first.
    wmat_indices, wmat_indptr
        The connectivity in CSR form: the columns of row `i` are `indices[indptr[i]:indptr[i + 1]]`.
    total_steps
        Steps of a sample after its first frame; all of them lie within the chunk.
    num_neurons_to_zero
        Neurons to sample, with replacement.
    device
        Device of the results; None: that of the chunk.
    generator
        Source of randomness; None: the generator of the chunk, so that a chunk gives the same batches every time, or
        torch's default if it has none.
    """
    frames = len(chunk_data)
    if frames <= total_steps:
        raise OptionError(
            f"chunk_data must have more than total_steps={total_steps} frames, got {frames}. Use a larger chunk_size "
            "or fewer steps."
        )
    target = torch.device(device) if device is not None else chunk_data.device
    own = generator or _GENERATORS.get(chunk_data)
    made_on = own.device if own is not None else target
    batch = torch.randint(0, frames - total_steps, (batch_size,), generator=own, device=made_on).to(target)
    if not num_neurons_to_zero:
        return batch, torch.empty(0, dtype=torch.int64, device=target), torch.empty(0, dtype=torch.int64, device=target)
    if wmat_indices is None or wmat_indptr is None:
        raise OptionError(
            "num_neurons_to_zero requires the connectivity in CSR form. Pass wmat_indices and wmat_indptr."
        )
    n_neurons = chunk_data.shape[1]
    selected = torch.randint(0, n_neurons, (num_neurons_to_zero,), generator=own, device=made_on).to(target)
    return batch, selected, _add_inputs(selected, wmat_indices.to(target), wmat_indptr.to(target), n_neurons)


def _add_inputs(selected: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, n_neurons: int) -> torch.Tensor:
    """Return the selected neurons and the columns of their rows, sorted and unique; vectorized over neurons."""
    wanted = torch.zeros(n_neurons, dtype=torch.bool, device=selected.device)
    wanted[selected] = True
    rows = torch.repeat_interleave(
        torch.arange(n_neurons, device=selected.device), (indptr[1:] - indptr[:-1]).to(torch.int64)
    )
    wanted[indices[wanted[rows]].to(torch.int64)] = True
    return wanted.nonzero().reshape(-1)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        check_integer(name, value, at_least=1)


def calculate_chunk_params(
    total_timesteps: int, chunk_size: int, batch_size: int, data_passes_per_epoch: int
) -> tuple[int, int, int]:
    """Return chunks per epoch, batches per chunk, and batches per epoch, which is their product.

    Examples
    --------
    >>> calculate_chunk_params(967_680, 65_536, 256, 1)
    (14, 256, 3584)
    """
    _check_sizes(total_timesteps=total_timesteps, chunk_size=chunk_size, batch_size=batch_size)
    check_integer("data_passes_per_epoch", data_passes_per_epoch, at_least=1)
    size = min(chunk_size, total_timesteps)
    if size < batch_size:
        raise OptionError(
            f"batch_size must be <= the {size} rows of a chunk, got {batch_size}. Use larger chunks or smaller batches."
        )
    per_chunk = size // batch_size
    if total_timesteps < chunk_size:
        chunks = data_passes_per_epoch
    else:
        chunks = (total_timesteps // batch_size) * data_passes_per_epoch // per_chunk
    return chunks, per_chunk, chunks * per_chunk


def generate_random_chunks(
    total_timesteps: int,
    chunk_size: int,
    num_chunks: int,
    time_units: int = 1,
    rng: random.Random | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
) -> list[tuple[int, int]]:
    """Return the (start, end) of random windows, chosen with replacement.

    Parameters
    ----------
    time_units
        Windows start at multiples of this many rows.
    rng
        Source of randomness; None: the windows depend on `seed` and `epoch` only.

    Examples
    --------
    >>> generate_random_chunks(100, 10, 2, seed=7) == generate_random_chunks(100, 10, 2, seed=7)
    True
    """
    _check_sizes(total_timesteps=total_timesteps, chunk_size=chunk_size, num_chunks=num_chunks, time_units=time_units)
    length = min(chunk_size, total_timesteps)
    choices = (total_timesteps - length) // time_units + 1
    if rng is not None:
        starts = [rng.randrange(choices) * time_units for _ in range(num_chunks)]
    else:
        starts = (generator_for(seed, "chunks", epoch).integers(0, choices, num_chunks) * time_units).tolist()
    return [(start, start + length) for start in starts]


def compute_neuron_phases(
    num_neurons: int,
    time_units: int,
    mode: AcquisitionMode,
    device: _Device = "cpu",
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor | None:
    """Return the frame within a time unit at which each neuron is observed; None if all are observed at every frame.

    Parameters
    ----------
    mode
        `"all_time_points"`: at every frame. `"time_aligned"`: all at the first frame of a unit. `"staggered_random"`:
        each at its own random frame.
    """
    _check_sizes(num_neurons=num_neurons, time_units=time_units)
    if mode == "all_time_points":
        return None
    if mode == "time_aligned":
        return torch.zeros(num_neurons, dtype=torch.int64, device=device)
    if mode != "staggered_random":
        raise OptionError(f"mode must be one of {', '.join(map(repr, get_args(AcquisitionMode)))}, got {mode!r}.")
    made_on = generator.device if generator is not None else torch.device(device)
    return torch.randint(0, time_units, (num_neurons,), generator=generator, device=made_on).to(device)


def sample_batch_indices(
    chunk_size: int,
    total_steps: int,
    time_units: int,
    batch_size: int,
    num_neurons: int,
    neuron_phases: torch.Tensor | None,
    device: _Device = "cpu",
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the first frame of each neuron in each sample of a batch: (batch_size, num_neurons), within a chunk.

    In a chunk that starts at a multiple of `time_units`, neuron `n` is observed at the frames whose remainder is its
    phase. Without phases, all neurons of a sample start at the same frame, anywhere.
    """
    _check_sizes(chunk_size=chunk_size, time_units=time_units, batch_size=batch_size)
    made_on = generator.device if generator is not None else torch.device(device)
    latest = chunk_size - total_steps - 1
    if neuron_phases is not None:
        if neuron_phases.shape != (num_neurons,):
            raise OptionError(f"neuron_phases must have shape ({num_neurons},), got {tuple(neuron_phases.shape)}.")
        latest = (latest - (time_units - 1)) // time_units
    if latest < 0:
        raise OptionError(
            f"chunk_size must hold {total_steps} steps in units of {time_units} frames, got {chunk_size}. Use a larger "
            "chunk_size."
        )
    starts = torch.randint(0, latest + 1, (batch_size, 1), generator=generator, device=made_on).to(device)
    if neuron_phases is None:
        return starts.expand(batch_size, num_neurons)
    return starts * time_units + neuron_phases.to(device)


@dataclass
class _Times:
    """Running totals of durations, in seconds: constant memory, however long the training."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    smallest: float = float("inf")

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)
        self.smallest = min(self.smallest, seconds)

    @property
    def mean_ms(self) -> float:
        return 1000 * self.total / self.count if self.count else 0.0


@dataclass
class ChunkLatencyStats:
    """How long the training waited for chunks, and how long its steps took.

    Examples
    --------
    >>> stats = ChunkLatencyStats()
    >>> stats.record_chunk_get(0.004)
    >>> stats.get_summary()["chunk_get_mean_ms"]
    4.0
    """

    chunk_get_times: _Times = field(default_factory=_Times)
    batch_forward_times: _Times = field(default_factory=_Times)
    batch_backward_times: _Times = field(default_factory=_Times)
    batch_step_times: _Times = field(default_factory=_Times)

    def record_chunk_get(self, seconds: float) -> None:
        """Record how long the training waited for a chunk."""
        self.chunk_get_times.add(seconds)

    def record_batch_times(self, forward: float, backward: float, step: float) -> None:
        """Record the parts of a training step, in seconds."""
        self.batch_forward_times.add(forward)
        self.batch_backward_times.add(backward)
        self.batch_step_times.add(step)

    def get_summary(self) -> dict[str, float]:
        """Return means and extremes in milliseconds, and counts; 0 if nothing was recorded."""
        got = self.chunk_get_times
        return {
            "chunk_get_mean_ms": got.mean_ms,
            "chunk_get_max_ms": 1000 * got.largest,
            "chunk_get_min_ms": 1000 * got.smallest if got.count else 0.0,
            "batch_forward_mean_ms": self.batch_forward_times.mean_ms,
            "batch_backward_mean_ms": self.batch_backward_times.mean_ms,
            "batch_step_mean_ms": self.batch_step_times.mean_ms,
            "num_chunks": float(got.count),
            "num_batches_sampled": float(self.batch_forward_times.count),
        }

    def print_summary(self, out: TextIO | None = None) -> None:
        """Print the summary."""
        found = self.get_summary()
        lines = [
            f"Chunks: {found['num_chunks']:.0f}, wait mean {found['chunk_get_mean_ms']:.2f} ms, "
            f"min {found['chunk_get_min_ms']:.2f} ms, max {found['chunk_get_max_ms']:.2f} ms",
            f"Batches timed: {found['num_batches_sampled']:.0f}, forward {found['batch_forward_mean_ms']:.2f} ms, "
            f"backward {found['batch_backward_mean_ms']:.2f} ms, step {found['batch_step_mean_ms']:.2f} ms",
        ]
        (out or sys.stdout).write("\n".join(lines) + "\n")
