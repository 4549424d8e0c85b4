"""Neurophysiology recordings, in NWB files: HDF5 through pynwb, zarr folders through hdmf-zarr."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.convert.nwb.file import opened
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.recording import NWBRecording

__all__ = ["NWBInput", "NWBOptions"]


@dataclass(frozen=True)
class NWBInput:
    """An NWB file, and what is taken from it."""

    path: Path
    options: NWBOptions = field(default_factory=NWBOptions)

    def open(self) -> NWBRecording:
        """Open it.

        1. No NWB file, or a modality that it lacks: SourceError.
        2. Truncated, or being written by another process: ReadError.
        3. pynwb, or hdmf-zarr for a folder, is not installed: MissingDependency.
        """
        file = opened(self.path)
        try:
            return NWBRecording(file, self.options)
        except BaseException:
            file.close()
            raise
