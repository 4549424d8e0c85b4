"""Simulations of the fly's visual system, on disk as two zarr arrays.

DIR/metadata.zarr     (neurons, 5) float32: static columns
DIR/timeseries.zarr   (time, neurons, 4) float32: dynamic columns, in chunks of 2000 × neurons × 1
"""

import os
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import MissingDependency, OptionError, SourceError
from penstock.core.types import Span
from penstock.recipes.streams.rows import SourceFunction
from penstock.source.stored.source import ZarrSource

__all__ = [
    "DataSplit",
    "FlyVisSim",
    "NeuronData",
    "SimulationWriter",
    "create_zarr_loader",
    "load_column_slice",
    "load_metadata",
]

_Path = str | os.PathLike[str]
_CHUNK_ROWS = 2000
_SERIES, _STATIC = "timeseries.zarr", "metadata.zarr"


class FlyVisSim(IntEnum):
    """The columns of a simulation."""

    INDEX = 0
    XPOS = 1
    YPOS = 2
    VOLTAGE = 3
    STIMULUS = 4
    GROUP_TYPE = 5
    TYPE = 6
    CALCIUM = 7
    FLUORESCENCE = 8


_DYNAMIC = (FlyVisSim.VOLTAGE, FlyVisSim.STIMULUS, FlyVisSim.CALCIUM, FlyVisSim.FLUORESCENCE)
_FIXED = (FlyVisSim.INDEX, FlyVisSim.XPOS, FlyVisSim.YPOS, FlyVisSim.GROUP_TYPE, FlyVisSim.TYPE)


def load_column_slice(
    path: _Path, column: int, time_start: int, time_end: int, neuron_limit: int | None = None
) -> NDArray[np.float32]:
    """Return one column of a time range, (time, neurons).

    Parameters
    ----------
    path
        The folder of the simulation; a trailing `.npy` or `.zarr` is removed.
    column
        A dynamic column.
    neuron_limit
        Return the first `neuron_limit` neurons; None: all.
    """
    source = ZarrSource(_folder(path), {"data": (_SERIES, _neurons(neuron_limit), _column(column))})
    try:
        if not 0 <= time_start <= time_end <= len(source.index):
            raise OptionError(
                f"time_start and time_end must be within the {len(source.index)} steps of {path}, got {time_start} to "
                f"{time_end}."
            )
        found: NDArray[np.float32] = np.asarray(source.read(Span(time_start, time_end))["data"])
        return found
    finally:
        source.close()


def load_metadata(path: _Path) -> NDArray[np.float32]:
    """Return the static columns, (neurons, 5): index, x, y, group and type."""
    source = ZarrSource(_folder(path), {"data": _STATIC})
    try:
        found: NDArray[np.float32] = np.asarray(source.read(Span(0, len(source.index)))["data"])
        return found
    finally:
        source.close()


def create_zarr_loader(data_path: _Path, column_idx: int, stim_column_idx: int, num_stim_dims: int) -> SourceFunction:
    """Return a function of start and end that reads two columns of a time range into reused memory.

    Its `source` is the `ZarrSource` behind it, which the chunk loaders read directly.

    Parameters
    ----------
    data_path
        The folder of the simulation.
    column_idx, stim_column_idx
        The modelled column, and the column of the stimulus.
    num_stim_dims
        Neurons of the stimulus: the first `num_stim_dims`.
    """
    folder = _folder(data_path)
    data, stim = (
        (_SERIES, slice(None), _column(column_idx)),
        (_SERIES, _neurons(num_stim_dims), _column(stim_column_idx)),
    )
    return SourceFunction(ZarrSource(folder, {"data": data, "stim": stim}))


def _folder(path: _Path) -> Path:
    folder = Path(path)
    folder = folder.with_suffix("") if folder.suffix in (".npy", ".zarr") else folder
    if not (folder / _SERIES).exists():
        raise SourceError(f"No simulation in {folder}: {_SERIES} is missing. Pass the folder of a simulation.")
    return folder


def _column(column: int) -> int:
    try:
        return _DYNAMIC.index(FlyVisSim(column))
    except ValueError as error:
        names = ", ".join(f"{entry.name} ({entry.value})" for entry in _DYNAMIC)
        raise OptionError(
            f"column must be one of {names}, got {column!r}. For static columns, use load_metadata()."
        ) from error


def _neurons(limit: int | None) -> slice:
    return slice(None) if limit is None else slice(0, check_integer("neuron_limit", limit, at_least=0))


@dataclass(frozen=True, slots=True)
class NeuronData:
    """The static columns of a simulation."""

    ix: NDArray[np.int32]
    pos: NDArray[np.float32]
    """(neurons, 2)."""

    group_type: NDArray[np.uint8]
    type: NDArray[np.uint8]
    indices_per_type: list[NDArray[np.int64]]
    """The neurons of each type."""

    @classmethod
    def from_metadata(cls, metadata: NDArray[Any]) -> "NeuronData":
        """Return the neurons of the array from `load_metadata`."""
        columns = {column: metadata[:, place] for place, column in enumerate(_FIXED)}
        types = columns[FlyVisSim.TYPE].astype(np.uint8)
        present = np.unique(types)
        if not np.array_equal(present, np.arange(len(present))):
            raise SourceError(f"The types of neurons must be 0, 1, 2, … without gaps, got {present.tolist()}.")
        return cls(
            columns[FlyVisSim.INDEX].astype(np.int32),
            np.stack([columns[FlyVisSim.XPOS], columns[FlyVisSim.YPOS]], axis=1),
            columns[FlyVisSim.GROUP_TYPE].astype(np.uint8),
            types,
            [np.flatnonzero(types == number) for number in present],
        )


@dataclass(frozen=True, slots=True)
class DataSplit:
    """Time ranges for training and validation."""

    train_start: int
    train_end: int
    validation_start: int
    validation_end: int

    def __post_init__(self) -> None:
        for name in ("train_start", "train_end", "validation_start", "validation_end"):
            check_integer(name, getattr(self, name), at_least=0)
        for part in ("train", "validation"):
            start, end = getattr(self, f"{part}_start"), getattr(self, f"{part}_end")
            if end <= start:
                raise OptionError(f"{part}_end must be > {part}_start={start}, got {end}.")
        if self.train_start < self.validation_end and self.validation_start < self.train_end:
            raise OptionError(
                f"Training and validation must not overlap, got {self.train_start} to {self.train_end} and "
                f"{self.validation_start} to {self.validation_end}."
            )


class SimulationWriter:
    """Writes a simulation, one time range after the other.

    Parameters
    ----------
    path
        The folder, which is created.
    metadata
        (neurons, 5): index, x, y, group and type.
    total_timesteps
        Time steps to write in total.

    Examples
    --------
    >>> import tempfile
    >>> writer = SimulationWriter(tempfile.mkdtemp() + "/sim", np.zeros((3, 5)), total_timesteps=4)
    >>> writer.append(np.ones((4, 3, 4)))
    >>> writer.close()
    """

    def __init__(self, path: _Path, metadata: NDArray[Any], total_timesteps: int) -> None:
        try:
            zarr, numcodecs = import_module("zarr"), import_module("numcodecs")
        except ImportError as error:
            raise MissingDependency("zarr", "zarr", "Writing zarr stores") from error
        metadata = np.asarray(metadata, np.float32)
        if metadata.ndim != 2 or metadata.shape[1] != len(_FIXED):
            raise OptionError(f"metadata must have shape (neurons, {len(_FIXED)}), got {metadata.shape}.")
        self._n_neurons, self._total = len(metadata), check_integer("total_timesteps", total_timesteps, at_least=1)
        folder = Path(path)
        shared: Any = {"dtype": "float32", "zarr_format": 2, "compressors": numcodecs.Blosc("zstd", 3, 2)}
        static = zarr.create_array(folder / _STATIC, shape=metadata.shape, chunks=metadata.shape, **shared)
        static[:] = metadata
        shape, chunks = (self._total, self._n_neurons, len(_DYNAMIC)), (_CHUNK_ROWS, self._n_neurons, 1)
        self._array: Any = zarr.create_array(folder / _SERIES, shape=shape, chunks=chunks, **shared)
        self._waiting: list[NDArray[np.float32]] = []
        self._written = 0

    def append(self, frames: NDArray[Any]) -> None:
        """Append time steps: (time, neurons, 4), of voltage, stimulus, calcium and fluorescence."""
        frames = np.asarray(frames, np.float32)
        if frames.ndim != 3 or frames.shape[1:] != (self._n_neurons, len(_DYNAMIC)):
            raise OptionError(f"frames must have shape (time, {self._n_neurons}, {len(_DYNAMIC)}), got {frames.shape}.")
        waiting = sum(map(len, self._waiting))
        if self._written + waiting + len(frames) > self._total:
            raise OptionError(
                f"At most total_timesteps={self._total} steps can be appended, got "
                f"{self._written + waiting + len(frames)}."
            )
        self._waiting.append(frames)
        if waiting + len(frames) >= _CHUNK_ROWS:
            self._flush(whole=True)

    def _flush(self, *, whole: bool) -> None:
        """Write the buffered steps; with `whole`, only whole chunks, so that no chunk is written twice."""
        empty = np.empty((0, self._n_neurons, len(_DYNAMIC)), np.float32)
        frames = np.concatenate([empty, *self._waiting])
        count = len(frames) - len(frames) % _CHUNK_ROWS if whole else len(frames)
        self._array[self._written : self._written + count] = frames[:count]
        self._written += count
        self._waiting = [frames[count:]] if count < len(frames) else []

    def close(self) -> None:
        """Write the rest; raise OptionError if steps are missing."""
        self._flush(whole=False)
        if self._written < self._total:
            raise OptionError(
                f"total_timesteps={self._total} steps must be appended before close(), got {self._written}. The rest "
                "is zeros."
            )

    def __enter__(self) -> "SimulationWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
