"""Neurophysiology recordings in NWB files: HDF5 through pynwb, zarr folders through hdmf-zarr."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.convert.nwb.file import open_nwb
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.recording import NWBRecording

__all__ = ["NWBInput", "NWBOptions"]


@dataclass(frozen=True)
class NWBInput:
    """An NWB file, and the options that say what is read from it."""

    path: Path
    options: NWBOptions = field(default_factory=NWBOptions)

    def open(self) -> NWBRecording:
        """Open the file.

        1. It is not NWB, or it lacks a modality: SourceError.
        2. It is truncated, or another process is writing to it: ReadError.
        3. pynwb, or hdmf-zarr for a folder, is not installed: MissingDependency.
        """
        file = open_nwb(self.path)
        try:
            return NWBRecording(file, self.options)
        except BaseException:
            file.close()
            raise
