"""Neurophysiology recordings in NWB files: HDF5 through pynwb, zarr folders through hdmf-zarr."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.convert.inputs.protocol import input_place
from penstock.convert.nwb.agree import agree
from penstock.convert.nwb.complete import Common
from penstock.convert.nwb.file import open_nwb
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.recording import NWBRecording
from penstock.convert.plan import Alignment, Scan
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url, is_url

__all__ = ["NWBInput", "NWBOptions"]


@dataclass(frozen=True)
class NWBInput:
    """An NWB file, and the options that say what is read from it. Of one at a URL, only what is needed is read."""

    path: Path | Url
    options: NWBOptions = field(default_factory=NWBOptions)
    common: Common | None = field(default=None, metadata={"is_recorded": False})
    """What the other recordings of a dataset have; a conversion sets it."""
    remote: RemoteOptions | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if is_url(self.path):
            object.__setattr__(self, "path", input_place(self.path))

    def __repr__(self) -> str:
        """Return what identifies the input in a conversion."""
        shown = f"path={self.path!r}, options={self.options!r}"
        return f"NWBInput({shown}{'' if self.common is None else f', common={self.common!r}'})"

    def open(self) -> NWBRecording:
        """Open the file.

        1. It is not NWB, or it lacks a modality: SourceError.
        2. It is truncated, or another process is writing to it: ReadError.
        3. pynwb, or hdmf-zarr for a folder, is not installed: MissingDependency.
        """
        file = open_nwb(self.path, self.remote)
        try:
            return NWBRecording(file, self.options, self.common or Common())
        except BaseException:
            file.close()
            raise

    def align(self, scans: Sequence[Scan]) -> Alignment:
        """Return scans of NWB files with inputs that have the same fields, units and columns; see `NWBOptions`."""
        return agree(scans, self.options)
