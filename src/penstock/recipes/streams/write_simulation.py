"""Write a simulation so that it appears all at once, by the protocol of `files.staging`.

DIR/.writing/options.json             a write has begun
DIR/.writing/timeseries.zarr/T.0.C    a finished chunk: 2000 steps of one column
DIR/.writing/metadata.zarr            the static columns
DIR/.writing/timeseries.zarr/.zarray  all steps are written: from here on, only renames are left
DIR/metadata.zarr, timeseries.zarr    the simulation is published, with the rename of the second
"""

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ResumeError, WriteError
from penstock.files.durable import write_aside
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.regular import read_regular
from penstock.files.staging import WRITING, Staging
from penstock.recipes.streams.simulations import DYNAMIC, SERIES, STATIC, STATIC_FILE, load_metadata
from penstock.source.stored.zarr.chunk_files import (
    MAX_CHUNK_BYTES,
    array_metadata,
    is_whole_chunk,
    write_chunk,
    write_json,
)

__all__ = ["SimulationWriter"]

_CHUNK_STEPS = 2000
_MAX_NEURONS = MAX_CHUNK_BYTES // (4 * _CHUNK_STEPS)
_METADATA = ".zarray"
_COMPLETE = "is complete"


class SimulationWriter:
    """Writes a simulation, one time range after the other.

    It is written to `.writing` in its folder. `close`, or the end of a `with` block, moves it into place once all steps
    are there; readers refuse it until then.

    1. The process is killed at any moment: there is no simulation, the previous one, or the new one. A writer with
       `resume=True` continues: `written` steps are stored, and all from that one on must be appended again.
    2. The disk is full: WriteError, and nothing is published. `resume=True` continues.
    3. An exception ends the `with` block: as 1.
    4. A second writer on the same folder: WriteError while the first one is open.
    5. A simulation in the folder: WriteError, unless `overwrite` or `resume`; it stays until the new one is complete.

    Parameters
    ----------
    path
        The folder, which is created.
    metadata
        (neurons, 5): index, x, y, group and type.
    total_timesteps
        Time steps to write in total.
    resume
        Continue an unfinished write, which must have the same `metadata` and `total_timesteps`; begin if there is none.
    overwrite
        Replace the simulation in the folder when this one is complete; an unfinished write is discarded.

    Examples
    --------
    >>> import tempfile
    >>> writer = SimulationWriter(tempfile.mkdtemp() + "/sim", np.zeros((3, 5)), total_timesteps=4)
    >>> writer.append(np.ones((4, 3, 4)))
    >>> writer.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: NDArray[Any],
        total_timesteps: int,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        if resume and overwrite:
            raise OptionError(
                "At most one of resume and overwrite must be set, got both. Resume an interrupted write, or start over."
            )
        self._static = _check_metadata(metadata)
        self._n_neurons, self._total = len(self._static), check_integer("total_timesteps", total_timesteps, at_least=1)
        self.folder = local_path(path)
        self._staging = Staging(self.folder / WRITING, self.folder / SERIES, SERIES)
        self._waiting: list[NDArray[np.float32]] = []
        self._stored = 0
        self._ended = ""
        self._lock = FolderLock(self.folder)
        weakref.finalize(self, self._lock.release)
        try:
            self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self._lock.release()
            raise
        self._resumed_at = self._stored
        # The step after the last one that was given; None if the caller has to say where it begins.
        self._next_step: int | None = None if self._resumed_at else 0

    @property
    def written(self) -> int:
        """Steps that are stored: a multiple of 2000, or all. With `resume=True`, append those from here on."""
        return self._stored

    def append(self, frames: NDArray[Any], start: int | None = None) -> None:
        """Append time steps: (time, neurons, 4), of voltage, stimulus, calcium and fluorescence.

        Parameters
        ----------
        start
            Number of the first of these steps; None: they follow the last ones. The first call of a writer that resumes
            must say it: `start=writer.written` to continue there, or `start=0` to give all steps again; those that are
            stored are skipped.
        """
        if self._ended and self._resumed_at < self._total:
            raise WriteError(f"Could not append: this writer of {self.folder} {self._ended}. Create another one.")
        frames = np.asarray(frames, np.float32)
        if frames.ndim != 3 or frames.shape[1:] != (self._n_neurons, len(DYNAMIC)):
            raise OptionError(f"frames must have shape (time, {self._n_neurons}, {len(DYNAMIC)}), got {frames.shape}.")
        first = self._check_start(start)
        end = first + len(frames)
        if end > self._total:
            raise OptionError(f"At most total_timesteps={self._total} steps can be appended, got {end}.")
        self._next_step = end
        fresh = frames[max(0, self._resumed_at - first) :]
        self._waiting.append(np.array(fresh))  # a copy: the caller may reuse its memory
        if sum(map(len, self._waiting)) >= _CHUNK_STEPS:
            self._write_waiting(whole=True)

    def close(self) -> None:
        """Write the rest and publish the simulation; raise OptionError if steps are missing. Idempotent."""
        if self._ended == _COMPLETE:
            return
        if self._ended:
            raise WriteError(
                f"Could not publish the simulation: this writer of {self.folder} {self._ended}. Continue with "
                "resume=True."
            )
        waiting = sum(map(len, self._waiting))
        if self._stored + waiting < self._total:
            raise OptionError(
                f"total_timesteps={self._total} steps must be appended before close(), got {self._stored + waiting}. "
                "Nothing is published; append the rest, also later with resume=True."
            )
        self._write_waiting(whole=False)
        try:
            self._complete()
            self._publish()
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

    # -- start and end -------------------------------------------------------------------------------------------------

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        staging = self._staging
        if (staging.commit / _METADATA).exists():  # killed in the publication: the simulation is complete
            self._publish()
        staging.clean_up()
        is_published = os.path.lexists(staging.target)
        if resume and is_published and not staging.folder.exists():
            self._check_same()
            self._stored = self._total
            self._end(_COMPLETE)
            return
        options = self._options()
        if resume and staging.options is not None:
            if staging.options != options:
                raise ResumeError(
                    f"To resume the simulation in {self.folder}, metadata and total_timesteps must be those that it "
                    "was begun with. Use the same, or start over with resume=False."
                )
            self._stored = self._count_stored()
        elif is_published and not overwrite:
            raise WriteError(
                f"{self.folder} holds a simulation already. Replace it with overwrite=True, or use another folder."
            )
        else:
            staging.clear()
        staging.begin(options)

    def _options(self) -> str:
        digest = hashlib.sha256(self._static.astype("<f4").tobytes()).hexdigest()
        return json.dumps({"total_timesteps": self._total, "neurons": self._n_neurons, "metadata": digest})

    def _count_stored(self) -> int:
        """Return the number of steps whose chunks are all there."""
        n_steps = 0
        while n_steps < self._total and all(
            is_whole_chunk(self._chunk_path(n_steps, column)) for column in range(len(DYNAMIC))
        ):
            n_steps += _CHUNK_STEPS
        return min(n_steps, self._total)

    def _check_same(self) -> None:
        try:
            shape = json.loads(read_regular(self._staging.target / _METADATA))["shape"]
            is_same = shape[0] == self._total and np.array_equal(
                load_metadata(self.folder), self._static, equal_nan=True
            )
        except (OSError, ValueError, LookupError, TypeError):
            is_same = False
        if not is_same:
            raise ResumeError(
                f"{self.folder} holds a complete simulation with other metadata or total_timesteps. Use overwrite=True "
                "instead to replace it, or another folder."
            )

    def _complete(self) -> None:
        """Write the static columns, make everything durable, then mark the simulation as complete."""
        folder, aside = self._staging.folder / STATIC_FILE, self._staging.folder
        shape = self._static.shape
        write_chunk(folder / "0.0", self._static, aside)
        write_json(folder / _METADATA, array_metadata(shape, shape, "float32", fill=0.0, separator="."), aside)
        files = [path for folder in (folder, self._staging.commit) for path in (*folder.iterdir(), folder)]
        self._staging.prepare([*files, aside])
        shape, chunks = (self._total, self._n_neurons, len(DYNAMIC)), (_CHUNK_STEPS, self._n_neurons, 1)
        about = array_metadata(shape, chunks, "float32", fill=0.0, separator=".")
        write_aside(self._staging.commit / _METADATA, json.dumps(about, indent=1).encode(), folder=aside)

    def _publish(self) -> None:
        self._staging.publish([STATIC_FILE])

    def _end(self, why: str) -> None:
        self._ended = why
        self._waiting = []
        self._lock.release()

    def _fail(self, error: OSError) -> WriteError:
        """End this writer, and return the error to raise."""
        self._end("has failed")
        message = str(error) if isinstance(error, WriteError) else f"Could not write to {self.folder}: {error}"
        advice = "" if "resume=True" in message else " Fix the cause and continue with resume=True."
        return WriteError(f"{message.removesuffix('.')}.{advice}")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _check_start(self, start: int | None) -> int:
        """Return the number of the first step of an append."""
        following = self._next_step
        if start is None:
            if following is None:
                raise OptionError(
                    f"This writer resumes: {self._stored} of {self._total} steps are stored. Give the number of the "
                    f"first step with the first append(): start={self._stored} to continue, or start=0 to give all "
                    "steps again; those that are stored are skipped."
                )
            return following
        first = check_integer("start", start, at_least=0)
        if following is None and first > self._stored:
            raise OptionError(f"start must be <= {self._stored}, the number of steps that are stored, got {first}.")
        if following is not None and first != following:
            raise OptionError(f"start must be {following}, the step after the last one that was appended, got {first}.")
        return first

    def _write_waiting(self, *, whole: bool) -> None:
        """Write the buffered steps; with `whole`, only whole chunks, so that no chunk is written twice."""
        frames = np.concatenate([np.empty((0, self._n_neurons, len(DYNAMIC)), np.float32), *self._waiting])
        count = len(frames) - len(frames) % _CHUNK_STEPS if whole else len(frames)
        try:
            for begin in range(0, count, _CHUNK_STEPS):
                self._write_chunks(frames[begin : min(begin + _CHUNK_STEPS, count)])
        except OSError as error:
            raise self._fail(error) from error
        self._waiting = [frames[count:]] if count < len(frames) else []

    def _write_chunks(self, frames: NDArray[np.float32]) -> None:
        """Write one chunk of each column; the last one of the simulation is filled up with zeros."""
        for column in range(len(DYNAMIC)):
            values = np.zeros((_CHUNK_STEPS, self._n_neurons), "<f4")
            values[: len(frames)] = frames[..., column]
            write_chunk(self._chunk_path(self._stored, column), values, self._staging.folder)
        self._stored += len(frames)

    def _chunk_path(self, step: int, column: int) -> Path:
        return self._staging.commit / f"{step // _CHUNK_STEPS}.0.{column}"


def _check_metadata(given: NDArray[Any]) -> NDArray[np.float32]:
    metadata = np.asarray(given, np.float32)
    if metadata.ndim != 2 or metadata.shape[1] != len(STATIC) or not 1 <= len(metadata) <= _MAX_NEURONS:
        raise OptionError(
            f"metadata must have shape (neurons, {len(STATIC)}), of 1 to {_MAX_NEURONS} neurons, got {metadata.shape}."
        )
    return metadata
