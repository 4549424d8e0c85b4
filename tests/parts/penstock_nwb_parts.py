"""NWB files with known contents, written by pynwb."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pynwb import NWBHDF5IO, NWBFile, TimeSeries
from pynwb.behavior import BehavioralTimeSeries, Position, SpatialSeries
from pynwb.ecephys import LFP, ElectricalSeries
from pynwb.file import Subject

from penstock.convert.inputs.protocol import Sample
from penstock.convert.nwb.input import NWBInput, NWBOptions

__all__ = [
    "add_behavior",
    "add_lfp",
    "add_units",
    "electrodes",
    "new_file",
    "one_by_one",
    "open_nwb",
    "save_nwb",
    "series",
]


def new_file(**changes: Any) -> NWBFile:
    """A file of one mouse, without data."""
    said = {
        "session_description": "a test",
        "identifier": "id-1",
        "session_start_time": datetime(2024, 5, 1, 12, tzinfo=UTC),
        "session_id": "session-7",
    }
    nwb = NWBFile(**(said | changes))
    nwb.subject = Subject(subject_id="mouse-3", species="Mus musculus")
    return nwb


def electrodes(nwb: NWBFile, locations: Sequence[str]) -> None:
    """One electrode per location."""
    device = nwb.create_device(name="probe")
    group = nwb.create_electrode_group(name="shank", description="one", location="brain", device=device)
    for location in locations:
        nwb.add_electrode(group=group, location=location)


def add_units(nwb: NWBFile, trains: Sequence[Sequence[float]], **columns: Sequence[Any]) -> None:
    """Units with these spike times, and with further columns, one value per unit."""
    for name in columns:
        if name not in ("electrodes", "obs_intervals"):
            nwb.add_unit_column(name=name, description=name)
    for number, train in enumerate(trains):
        said = {name: values[number] for name, values in columns.items()}
        nwb.add_unit(spike_times=np.asarray(train, np.float64), id=10 + number, **said)


def series(name: str, data: NDArray[Any], **timing: Any) -> TimeSeries:
    """A plain series."""
    return TimeSeries(name=name, data=data, unit="m", **timing)


def add_lfp(nwb: NWBFile, data: NDArray[Any], name: str = "lfp", place: str = "LFP", **settings: Any) -> None:
    """An ElectricalSeries in an LFP container of module ecephys, or in acquisition."""
    if nwb.electrodes is None:
        electrodes(nwb, ["CA1", "V1", "CA1", "V1"][: data.shape[1]])
    region = nwb.create_electrode_table_region(region=list(range(data.shape[1])), description="all")
    electrical = ElectricalSeries(name=name, data=data, electrodes=region, **settings)
    if place == "acquisition":
        nwb.add_acquisition(electrical)
        return
    if "ecephys" not in nwb.processing:
        nwb.create_processing_module(name="ecephys", description="voltages")
    module = nwb.processing["ecephys"]
    if place not in module.data_interfaces:
        module.add(LFP(name=place))
    module[place].add_electrical_series(electrical)


def add_behavior(nwb: NWBFile, *all_series: TimeSeries) -> None:
    """Series in module behavior: spatial ones in a Position, others in BehavioralTimeSeries."""
    module = nwb.create_processing_module(name="behavior", description="what it did")
    spatial = [one for one in all_series if isinstance(one, SpatialSeries)]
    plain = [one for one in all_series if not isinstance(one, SpatialSeries)]
    if spatial:
        module.add(Position(spatial_series=spatial))
    if plain:
        module.add(BehavioralTimeSeries(time_series=plain))


def save_nwb(nwb: NWBFile, path: Path) -> Path:
    """Write the file."""
    with NWBHDF5IO(str(path), "w") as io:
        io.write(nwb)
    return path


def open_nwb(path: Path, **options: Any) -> Any:
    """The recording in a file."""
    return NWBInput(path, NWBOptions(**options)).open()


def one_by_one(path: Path, **options: Any) -> list[Sample]:
    """All items, in order."""
    recording = open_nwb(path, **options)
    try:
        found = list(recording.samples(np.arange(recording.n_samples)))
    finally:
        recording.close()
    assert all(isinstance(fields, Mapping) for fields, _ in found)
    return found
