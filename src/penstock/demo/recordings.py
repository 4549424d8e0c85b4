"""Recordings for the demo: simulated subjects whose latent dynamics drive spikes, LFP and movement, in NWB files.

Two damped oscillations driven by noise, four numbers in all, are the state of the motor cortex. The subjects share how
the state drives each unit and the joystick, as if their units had been matched. They differ in the frequencies of the
oscillations, the gain and base rate of each unit, the noise and the movement.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import generator_for
from penstock.demo.task import Scale

__all__ = ["Session", "list_sessions", "write_recording"]

_STEP_SECONDS = 0.01  # of the simulation, and of the joystick
_LFP_HZ = 1000
_VOLTS_PER_BIT = 1.95e-7  # as in an Intan amplifier
_FREQUENCIES_HZ, _DECAY_SECONDS = (0.35, 0.8), 1.5
_MOST_HZ = 120  # firing rates saturate here
_METRES = 0.03  # a joystick moves by a few centimetres

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Session:
    """One recording of one subject, both counted from 0."""

    folder: str
    subject: int
    session: int
    seed: int
    scale: Scale

    @property
    def subject_id(self) -> str:
        """Identifier of the subject."""
        return f"sim-{self.subject + 1:02d}"

    @property
    def path(self) -> Path:
        """Path of the NWB file."""
        return Path(self.folder) / f"sub-{self.subject_id}_ses-{self.session + 1}.nwb"


def list_sessions(folder: Path, scale: Scale, seed: int) -> list[Session]:
    """Return the recordings of the demo."""
    numbers = [(subject, session) for subject in range(scale.subjects) for session in range(scale.sessions)]
    return [Session(str(folder), subject, session, seed, scale) for subject, session in numbers]


def write_recording(session: Session) -> int:
    """Simulate a recording, write it, and return the size of the file in bytes."""
    pynwb = import_module("pynwb")
    latents = _latents(session)
    file = _make_file(pynwb, session)
    _add_volts(pynwb, file, session, latents)
    _add_units(pynwb, file, session, latents)
    _add_movement(pynwb, file, session, latents)
    with pynwb.NWBHDF5IO(str(session.path), "w") as io:
        io.write(file)
    return session.path.stat().st_size


def _latents(session: Session) -> _Floats:
    """Return the state at each step, of shape (steps, 4); each component has a standard deviation of about 1."""
    lfilter = import_module("scipy.signal").lfilter
    steps = round(session.scale.seconds / _STEP_SECONDS)
    pace = generator_for(session.seed, "demo", "pace", session.subject).uniform(0.9, 1.1)
    rng = generator_for(session.seed, "demo", "latents", session.subject, session.session)
    parts = []
    for frequency in _FREQUENCIES_HZ:
        turn = np.exp((-1 / _DECAY_SECONDS + 2j * np.pi * pace * frequency) * _STEP_SECONDS)
        kicks = rng.standard_normal((2, steps)) * np.sqrt(1 - abs(turn) ** 2)
        state = lfilter([1.0], [1.0, -turn], kicks[0] + 1j * kicks[1])
        parts += [state.real, state.imag]
    return np.stack(parts, axis=1)


def _make_file(pynwb: Any, session: Session) -> Any:
    """Return an NWB file with session, subject and electrodes."""
    begin = datetime(2026, 1, 5, 9, tzinfo=UTC) + timedelta(days=session.session, hours=session.subject)
    file = pynwb.NWBFile(
        session_description="Simulated: latent dynamics drive spikes, LFP and a joystick. No animal was involved.",
        identifier=f"penstock-demo-{session.seed}-{session.path.stem}",
        session_id=f"{session.subject_id}-{session.session + 1}",
        session_start_time=begin,
        institution="Penstock demo",
        keywords=["simulation", "motor cortex"],
    )
    file.subject = pynwb.file.Subject(
        subject_id=session.subject_id, species="Mus musculus", sex="U", age="P90D", description="simulated"
    )
    device = file.create_device(name="probe", description="simulated")
    group = file.create_electrode_group(name="shank", description="simulated", location="M1", device=device)
    for _ in range(session.scale.channels):
        file.add_electrode(group=group, location="M1")
    return file


def _add_volts(pynwb: Any, file: Any, session: Session, latents: _Floats) -> None:
    """Add the LFP: the state mixed onto the channels, in slow, strong noise as in tissue."""
    lfilter, channels = import_module("scipy.signal").lfilter, session.scale.channels
    mixing = generator_for(session.seed, "demo", "mixing").standard_normal((latents.shape[1], channels), np.float32)
    rng = generator_for(session.seed, "demo", "volts", session.subject, session.session)
    noise = rng.standard_normal((session.scale.seconds * _LFP_HZ, channels), np.float32)
    slow = lfilter(np.array([0.25], np.float32), np.array([1.0, -0.97], np.float32), noise, axis=0)
    driven = np.repeat((latents.astype(np.float32) @ mixing), round(_STEP_SECONDS * _LFP_HZ), axis=0)
    microvolts = 40 * driven + 60 * slow
    file.create_processing_module("ecephys", "volts").add(lfp := pynwb.ecephys.LFP(name="LFP"))
    lfp.add_electrical_series(
        pynwb.ecephys.ElectricalSeries(
            name="lfp",
            data=np.clip(microvolts * 1e-6 / _VOLTS_PER_BIT, -32768, 32767).astype(np.int16),
            electrodes=file.create_electrode_table_region(list(range(channels)), "all"),
            rate=float(_LFP_HZ),
            conversion=_VOLTS_PER_BIT,
        )
    )


def _add_units(pynwb: Any, file: Any, session: Session, latents: _Floats) -> None:
    """Add the spikes: each unit is a Poisson process whose rate follows the state."""
    units = session.scale.units
    drive = generator_for(session.seed, "demo", "drive").standard_normal((latents.shape[1], units)) * 0.35
    own = generator_for(session.seed, "demo", "units", session.subject)
    base_hz, gain = 8 * np.exp(0.3 * own.standard_normal(units)), own.uniform(0.7, 1.3, units)
    rng = generator_for(session.seed, "demo", "spikes", session.subject, session.session)
    driven_hz = base_hz * np.exp(gain * (latents @ drive))
    counts = rng.poisson(driven_hz / (1 + driven_hz / _MOST_HZ) * _STEP_SECONDS)
    trains = []
    for unit in range(units):
        steps = np.repeat(np.arange(len(counts)), counts[:, unit])
        trains.append(np.sort(steps + rng.random(len(steps))) * _STEP_SECONDS)
    # As whole columns: added one by one, spikes take pynwb seconds per recording.
    table = import_module("hdmf.common")
    times = table.VectorData(name="spike_times", description="seconds", data=np.concatenate(trains))
    ends = np.cumsum([len(train) for train in trains])
    nearest = np.arange(units) % session.scale.channels
    electrodes = table.DynamicTableRegion(
        name="electrodes", description="the nearest one", data=nearest, table=file.electrodes
    )
    file.units = pynwb.misc.Units(
        name="units",
        description="simulated",
        id=list(range(units)),
        columns=[
            times,
            table.VectorIndex(name="spike_times_index", target=times, data=ends),
            electrodes,
            table.VectorIndex(name="electrodes_index", target=electrodes, data=np.arange(1, units + 1)),
        ],
    )


def _add_movement(pynwb: Any, file: Any, session: Session, latents: _Floats) -> None:
    """Add the joystick: its position is the state projected onto two axes, plus an unpredictable tremor."""
    readout = np.array([[1.0, 0.0], [0.0, 0.6], [0.5, 0.0], [0.0, 0.8]])
    rng = generator_for(session.seed, "demo", "tremor", session.subject, session.session)
    metres = _METRES * (latents @ readout + 0.1 * rng.standard_normal((len(latents), 2)))
    place = pynwb.behavior.SpatialSeries(
        name="joystick",
        data=metres.astype(np.float32),
        rate=1 / _STEP_SECONDS,
        reference_frame="the joystick at rest; x to the right, y away from the body",
        unit="meters",
    )
    file.create_processing_module("behavior", "movement").add(pynwb.behavior.Position(spatial_series=place))
