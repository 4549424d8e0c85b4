"""Simulations of the fly's visual system, on disk as two zarr arrays.

DIR/metadata.zarr     (neurons, 5) float32: static columns
DIR/timeseries.zarr   (time, neurons, 4) float32: dynamic columns, in chunks of 2000 × neurons × 1
"""

import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.types import Span
from penstock.files.staging import describe_unfinished
from penstock.files.stores.url import Url, is_url
from penstock.recipes.streams.rows import SourceFunction
from penstock.source.stored.folders import RemoteArguments
from penstock.source.stored.source import ZarrSource

__all__ = [
    "DYNAMIC",
    "SERIES",
    "STATIC",
    "STATIC_FILE",
    "DataSplit",
    "FlyVisSim",
    "NeuronData",
    "create_zarr_loader",
    "load_column_slice",
    "load_metadata",
]

_Path = str | os.PathLike[str]
SERIES, STATIC_FILE = "timeseries.zarr", "metadata.zarr"


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


DYNAMIC = (FlyVisSim.VOLTAGE, FlyVisSim.STIMULUS, FlyVisSim.CALCIUM, FlyVisSim.FLUORESCENCE)
STATIC = (FlyVisSim.INDEX, FlyVisSim.XPOS, FlyVisSim.YPOS, FlyVisSim.GROUP_TYPE, FlyVisSim.TYPE)


def load_column_slice(
    path: _Path,
    column: int,
    time_start: int,
    time_end: int,
    neuron_limit: int | None = None,
    **remote: Unpack[RemoteArguments],
) -> NDArray[np.float32]:
    """Return one column of a time range, (time, neurons).

    Parameters
    ----------
    path
        The folder of the simulation, or its URL; a trailing `.npy` or `.zarr` is removed.
    column
        A dynamic column.
    neuron_limit
        Return the first `neuron_limit` neurons; None: all.
    remote
        `store`, `cache` and `cache_bytes` of a URL, as in `ZarrSource`.
    """
    fields = {"data": (SERIES, _neurons("neuron_limit", neuron_limit), _column(column))}
    source = _open_series(_folder(path), fields, ("neuron_limit", neuron_limit), **remote)
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


def load_metadata(path: _Path, **remote: Unpack[RemoteArguments]) -> NDArray[np.float32]:
    """Return the static columns, (neurons, 5): index, x, y, group and type; `remote` as in `load_column_slice`."""
    source = ZarrSource(_folder(path), {"data": STATIC_FILE}, **remote)
    try:
        found: NDArray[np.float32] = np.asarray(source.read(Span(0, len(source.index)))["data"])
        return found
    finally:
        source.close()


def create_zarr_loader(
    data_path: _Path,
    column_idx: int,
    stim_column_idx: int,
    num_stim_dims: int,
    **remote: Unpack[RemoteArguments],
) -> SourceFunction:
    """Return a function of start and end that reads two columns of a time range into reused memory.

    Its `source` is the `ZarrSource` behind it, which the chunk loaders read directly.

    Parameters
    ----------
    data_path
        The folder of the simulation, or its URL.
    column_idx, stim_column_idx
        The modelled column, and the column of the stimulus.
    num_stim_dims
        Neurons of the stimulus: the first `num_stim_dims`.
    remote
        `store`, `cache` and `cache_bytes` of a URL, as in `ZarrSource`.
    """
    folder = _folder(data_path)
    data, stim = (
        (SERIES, slice(None), _column(column_idx)),
        (SERIES, _neurons("num_stim_dims", num_stim_dims), _column(stim_column_idx)),
    )
    limit = ("num_stim_dims", num_stim_dims)
    return SourceFunction(_open_series(folder, {"data": data, "stim": stim}, limit, **remote))


def _folder(path: _Path) -> str | Path:
    if is_url(path):  # opening it says what is there
        return str(Url(os.fspath(path))).removesuffix(".npy").removesuffix(".zarr")
    folder = Path(path)
    folder = folder.with_suffix("") if folder.suffix in (".npy", ".zarr") else folder
    if not (folder / SERIES).exists():
        raise SourceError(
            f"No simulation in {folder}: "
            f"{describe_unfinished(folder) or f'{SERIES} is missing. Pass the folder of a simulation.'}"
        )
    return folder


def _column(column: int) -> int:
    try:
        return DYNAMIC.index(FlyVisSim(column))
    except ValueError as error:
        names = ", ".join(f"{entry.name} ({entry.value})" for entry in DYNAMIC)
        raise OptionError(
            f"column must be one of {names}, got {column!r}. For static columns, use load_metadata()."
        ) from error


def _neurons(name: str, limit: int | None) -> slice:
    return slice(None) if limit is None else slice(0, check_integer(name, limit, at_least=0))


def _open_series(
    folder: str | Path,
    fields: dict[str, tuple[str, slice, int]],
    limit: tuple[str, int | None],
    **remote: Unpack[RemoteArguments],
) -> ZarrSource:
    """Open fields of the time series; `limit` is the option that says how many neurons, for the error."""
    try:
        return ZarrSource(folder, fields, **remote)
    except OptionError as error:
        (neurons,) = ZarrSource(folder, {"data": (SERIES, slice(None), 0)}, **remote).fields["data"].shape or (0,)
        if limit[1] is None or limit[1] <= neurons:
            raise
        raise OptionError(f"{limit[0]} must be <= {neurons}, the neurons of {folder}, got {limit[1]}.") from error


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
        columns = {column: metadata[:, place] for place, column in enumerate(STATIC)}
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
