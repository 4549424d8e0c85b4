"""Simulations of the fly's visual system, on disk as two zarr arrays.

DIR/metadata.zarr     (neurons, 5) float32: static columns
DIR/timeseries.zarr   (time, neurons, 4) float32: dynamic columns, in chunks of 2000 × neurons × 1
DIR/.writing          the same of a simulation that is being written; it appears at once, by the rename of the second
"""

import os
import weakref
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_choice, check_integer
from penstock.core.errors import MissingDependency, OptionError, SourceError, WriteError
from penstock.core.text import cause
from penstock.core.types import Span
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.staging import STARTS_OVER, WRITING, Staging, describe_unfinished
from penstock.files.stores.url import Url, is_url
from penstock.recipes.streams.rows import SourceFunction
from penstock.source.stored.folders import RemoteArguments
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
_SERIES, _STATIC_FILE = "timeseries.zarr", "metadata.zarr"
_CHUNK_STEPS = 2000
_COMPLETE = "is complete"
_MAX_NEURONS = ((1 << 31) - 17) // (4 * _CHUNK_STEPS)  # of a chunk that blosc accepts


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
_STATIC = (FlyVisSim.INDEX, FlyVisSim.XPOS, FlyVisSim.YPOS, FlyVisSim.GROUP_TYPE, FlyVisSim.TYPE)


class SimulationWriter:
    """Writes a simulation, one time range after the other.

    It is written to `.writing` in its folder. `close`, or the end of a `with` block, moves it into place once all steps
    are there; readers refuse it until then. Damage of its chunks is found when they are read, by their checksums.

    1. The process is killed at any moment: there is no simulation, the previous one, or the new one. Write it again.
    2. The disk is full: WriteError, and nothing is published.
    3. An exception ends the `with` block: as 1.
    4. A second writer on the same folder: WriteError while the first one is open.
    5. A simulation in the folder: WriteError, unless `overwrite`; it stays until the new one is complete.

    Parameters
    ----------
    path
        The folder, which is created.
    metadata
        (neurons, 5): index, x, y, group and type.
    total_timesteps
        Time steps to write in total.
    overwrite
        Replace the simulation in the folder when this one is complete.
    zarr_format
        3; or 2, for programs that read nothing newer: its chunks have no checksums.

    Examples
    --------
    >>> import tempfile
    >>> writer = SimulationWriter(tempfile.mkdtemp() + "/sim", np.zeros((3, 5)), total_timesteps=4)
    >>> writer.append(np.ones((4, 3, 4)))
    >>> writer.close()
    """

    def __init__(
        self,
        path: _Path,
        metadata: NDArray[Any],
        total_timesteps: int,
        *,
        overwrite: bool = False,
        zarr_format: Literal[2, 3] = 3,
    ) -> None:
        static, n_columns = np.asarray(metadata, np.float32), len(_STATIC)
        if static.ndim != 2 or static.shape[1] != n_columns or not 1 <= len(static) <= _MAX_NEURONS:
            raise OptionError(
                f"metadata must have shape (neurons, {n_columns}), of 1 to {_MAX_NEURONS} neurons, got {static.shape}."
            )
        self._total = check_integer("total_timesteps", total_timesteps, at_least=1)
        self._shape = (len(static), len(_DYNAMIC))
        check_choice("zarr_format", zarr_format, (2, 3))
        self.folder = local_path(path)
        self._staging = Staging(self.folder / WRITING, self.folder / _SERIES, _SERIES)
        # The steps of one chunk of each column, which is written once.
        self._waiting = np.empty((min(_CHUNK_STEPS, self._total), *self._shape), np.float32)
        self._n_waiting, self._stored, self._ended = 0, 0, ""
        self._lock = FolderLock(self.folder)
        weakref.finalize(self, self._lock.release)
        try:
            self._begin(overwrite=overwrite)
            _create_array(self._staging.folder / _STATIC_FILE, static.shape, static.shape, zarr_format)[:] = static
            shape, chunks = (self._total, *self._shape), (_CHUNK_STEPS, len(static), 1)
            self._series = _create_array(self._staging.commit, shape, chunks, zarr_format)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise WriteError(f"Could not write to {self.folder}: {cause(error)}.") from error
            raise

    def append(self, frames: NDArray[Any]) -> None:
        """Append time steps: (time, neurons, 4), of voltage, stimulus, calcium and fluorescence."""
        if self._ended:
            raise WriteError(f"Could not append: this writer of {self.folder} {self._ended}. Create another one.")
        given = np.asarray(frames, np.float32)
        if given.ndim != 3 or given.shape[1:] != self._shape:
            raise OptionError(f"frames must have shape (time, {self._shape[0]}, {self._shape[1]}), got {given.shape}.")
        end = self._stored + self._n_waiting + len(given)
        if end > self._total:
            raise OptionError(f"At most total_timesteps={self._total} steps can be appended, got {end}.")
        while len(given):
            part = given[: len(self._waiting) - self._n_waiting]
            self._waiting[self._n_waiting : self._n_waiting + len(part)] = part
            self._n_waiting, given = self._n_waiting + len(part), given[len(part) :]
            if self._n_waiting in (len(self._waiting), self._total - self._stored):
                try:
                    self._series[self._stored : self._stored + self._n_waiting] = self._waiting[: self._n_waiting]
                except OSError as error:
                    raise self._fail(error) from error
                self._stored, self._n_waiting = self._stored + self._n_waiting, 0

    def close(self) -> None:
        """Publish the simulation; raise OptionError if steps are missing. Idempotent."""
        if self._ended == _COMPLETE:
            return
        if self._ended:
            raise WriteError(f"Could not publish: this writer of {self.folder} {self._ended}. Create another one.")
        if self._stored < self._total:
            raise OptionError(
                f"total_timesteps={self._total} steps must be appended before close(), got "
                f"{self._stored + self._n_waiting}. Nothing is published; append the rest."
            )
        try:
            self._staging.prepare([*self._staging.folder.rglob("*"), self._staging.folder])
            self._staging.publish([_STATIC_FILE])
        except OSError as error:
            raise self._fail(error) from error
        self._end(_COMPLETE)

    def __enter__(self) -> "SimulationWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if not self._ended:
                self._end("was closed before it was complete")

    def _begin(self, *, overwrite: bool) -> None:
        staging = self._staging
        staging.clean_up()
        if staging.progress == "publishing":  # killed between renames: the simulation is complete
            staging.publish([_STATIC_FILE])
        if os.path.lexists(staging.target) and not overwrite:
            raise WriteError(
                f"{self.folder} holds a simulation already. Replace it with overwrite=True, or use another folder."
            )
        staging.clear()
        staging.begin(STARTS_OVER)

    def _end(self, why: str) -> None:
        self._ended, self._waiting = why, self._waiting[:0].copy()
        self._lock.release()

    def _fail(self, error: OSError) -> WriteError:
        """End this writer, and return the error to raise."""
        self._end("has failed")
        return WriteError(f"Could not write to {self.folder}: {cause(error)}. Fix the cause, and write it again.")


def _create_array(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], zarr_format: int) -> Any:
    try:
        zarr: Any = import_module("zarr")
        codecs: Any = import_module("zarr.codecs")
        numcodecs: Any = import_module("numcodecs")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", "Writing a simulation") from error
    compressors: Any = numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE)
    if zarr_format == 3:
        compressors = [codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"), codecs.Crc32cCodec()]
    return zarr.create_array(
        path,
        shape=shape,
        chunks=chunks,
        dtype="<f4",
        compressors=compressors,
        fill_value=0.0,
        zarr_format=zarr_format,
        config={"write_empty_chunks": True},  # a chunk that is missing is lost, never zero
    )


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
    fields = {"data": (_SERIES, _neurons("neuron_limit", neuron_limit), _column(column))}
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
    source = ZarrSource(_folder(path), {"data": _STATIC_FILE}, **remote)
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
        (_SERIES, slice(None), _column(column_idx)),
        (_SERIES, _neurons("num_stim_dims", num_stim_dims), _column(stim_column_idx)),
    )
    limit = ("num_stim_dims", num_stim_dims)
    return SourceFunction(_open_series(folder, {"data": data, "stim": stim}, limit, **remote))


def _folder(path: _Path) -> str | Path:
    if is_url(path):  # opening it says what is there
        return str(Url(os.fspath(path))).removesuffix(".npy").removesuffix(".zarr")
    folder = Path(path)
    folder = folder.with_suffix("") if folder.suffix in (".npy", ".zarr") else folder
    if not (folder / _SERIES).exists():
        raise SourceError(
            f"No simulation in {folder}: "
            f"{describe_unfinished(folder) or f'{_SERIES} is missing. Pass the folder of a simulation.'}"
        )
    return folder


def _column(column: int) -> int:
    try:
        return _DYNAMIC.index(FlyVisSim(column))
    except ValueError as error:
        names = ", ".join(f"{entry.name} ({entry.value})" for entry in _DYNAMIC)
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
        (neurons,) = ZarrSource(folder, {"data": (_SERIES, slice(None), 0)}, **remote).fields["data"].shape or (0,)
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
        columns = {column: metadata[:, place] for place, column in enumerate(_STATIC)}
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
