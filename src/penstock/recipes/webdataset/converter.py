"""Converts NWB recordings to WebDataset-compatible shards."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.convert.scan import ConvertOptions
from penstock.convert.to_shards import convert_to_shards
from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import OptionError
from penstock.files.progress import track_progress
from penstock.shard.compression import Compression
from penstock.shard.outputs.write_options import WriteOptions

__all__ = ["NWBToWebDatasetConverter"]

_Path = str | os.PathLike[str]


class NWBToWebDatasetConverter:
    """Converts NWB files to shards of windows.

    Files are opened and checked when they are added; `finalize` writes the shards of all files, in parallel with
    `workers`, and publishes the dataset.

    Parameters
    ----------
    output_dir
        The folder of the dataset.
    shard_size
        Windows per shard.
    modalities
        `"spikes"`, `"lfp"`, `"behavior"`, `"stimulus"`, `"ophys"`, or the name of any series in the files.
    bin_size_ms, sequence_length, overlap
        Width of a bin, bins per window, and the fraction of a window that the next one repeats.
    missing
        If a file lacks a modality: `"refuse"`, `"skip"` it in all files, or `"allow"` it, with a mask `has_<modality>`.
    compression
        Compression of whole shards.
    workers
        Processes that write shards in parallel.
    options
        All options of writing, instead of `shard_size` and `compression`.
    resume
        Resume an interrupted conversion.
    overwrite
        Replace an existing dataset once the new one is complete; False: raise an error.
    nwb_options
        Other options of `NWBOptions`: `fields`, `units`, `fill`, `rate_hz`, `unit_filter`, `align`, and others.
    """

    def __init__(
        self,
        output_dir: _Path,
        shard_size: int = 1000,
        modalities: Sequence[str] = ("spikes", "lfp", "behavior"),
        bin_size_ms: float = 10.0,
        sequence_length: int = 100,
        overlap: float = 0.5,
        *,
        compression: Compression = "none",
        workers: int = 1,
        options: ConvertOptions | None = None,
        resume: bool = False,
        overwrite: bool = False,
        **nwb_options: Any,
    ) -> None:
        check_keys("Options", nwb_options, option_names(NWBOptions, type(self)))
        self._nwb = NWBOptions(
            modalities=tuple(modalities),
            bin_size_ms=bin_size_ms,
            sequence_length=sequence_length,
            overlap=overlap,
            **nwb_options,
        )
        if options is not None and (shard_size, compression) != (1000, "none"):
            raise OptionError("shard_size and compression must be set in options, if that is given: WriteOptions(...).")
        self._options = options or ConvertOptions(WriteOptions(shard_size, compression=compression))
        self._output, self._workers = Path(output_dir), check_integer("workers", workers, at_least=1)
        self._resume, self._overwrite = resume, overwrite
        self._inputs: list[NWBInput] = []
        self._summary: dict[str, Any] | None = None

    def convert_nwb_file(self, path: _Path, show_progress: bool = True) -> int:
        """Add a file and return its number of windows; `finalize` writes them."""
        return self.convert_nwb_files([path], show_progress)

    def convert_nwb_files(self, paths: Sequence[_Path], show_progress: bool = True) -> int:
        """Add files and return their number of windows; `finalize` writes them."""
        if self._summary is not None:
            raise OptionError(
                f"Files must be added before finalize(), which wrote {self._output}. Use a new converter."
            )
        known, added, windows = {Path(str(given.path)).resolve() for given in self._inputs}, [], 0
        with track_progress("Looking at inputs", len(paths), "inputs", show=show_progress) as progress:
            for path in map(Path, paths):
                if path.resolve() in known:
                    raise OptionError(f"Each file must be added once, got {path} twice.")
                known.add(path.resolve())
                added.append(NWBInput(path, self._nwb))
                recording = added[-1].open()
                windows += recording.n_samples
                recording.close()
                progress.advance()
        self._inputs += added
        return windows

    def finalize(self, show_progress: bool = True) -> dict[str, Any]:
        """Write the shards of all files, publish the dataset, and return the summary of its manifest; idempotent."""
        if self._summary is None:
            self._summary = convert_to_shards(
                self._inputs,
                self._output,
                options=self._options,
                workers=self._workers,
                resume=self._resume,
                overwrite=self._overwrite,
                show_progress=show_progress,
            )
        return self._summary
