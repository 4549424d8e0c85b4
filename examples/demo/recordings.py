"""Recordings for the demo: simulated subjects whose latent dynamics drive spikes, LFP and movement, in NWB files.

Two damped oscillations driven by noise, four numbers in all, are the state of the motor cortex. The subjects share how
the state drives each unit and the joystick, as if their units had been matched. They differ in the frequencies of the
oscillations, the gain and base rate of each unit, the noise and the movement.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.demo.settings import Settings
from penstock import generator_for

__all__ = ["Session", "list_sessions", "write_recording"]

_STEP_SECONDS = 0.01  # of the simulation, and of the joystick
_LFP_HZ = 1000
_VOLTS_PER_BIT = 1.95e-7  # as in an Intan amplifier
_FREQUENCIES_HZ, _DECAY_SECONDS = (0.35, 0.8), 1.5
_MOST_HZ = 120  # firing rates saturate here
_METRES = 0.03  # a joystick moves by a few centimetres


class Session(NamedTuple):
    """One recording of one subject, both counted from 0."""

    settings: Settings
    subject: int
    number: int

    def generator(self, *path: str | int) -> np.random.Generator:
        """Return the generator of a part of the simulation."""
        return generator_for(self.settings.seed, "demo", *path)


def list_sessions(settings: Settings) -> list[Session]:
    """Return the recordings of the demo."""
    subjects, numbers = range(settings.subjects), range(settings.sessions)
    return [Session(settings, subject, number) for subject in subjects for number in numbers]


def write_recording(session: Session) -> int:
    """Simulate a recording, write it, and return the size of the file in bytes."""
    import pynwb

    name, settings = f"sim-{session.subject + 1:02d}", session.settings
    path = settings.recordings / f"sub-{name}_ses-{session.number + 1}.nwb"
    file = pynwb.NWBFile(
        session_description="Simulated: latent dynamics drive spikes, LFP and a joystick. No animal was involved.",
        identifier=f"penstock-demo-{settings.seed}-{path.stem}",
        session_id=f"{name}-{session.number + 1}",
        session_start_time=datetime(2026, 1, 5, 9, tzinfo=UTC) + timedelta(session.number, hours=session.subject),
        institution="Penstock demo",
        keywords=["simulation", "motor cortex"],
    )
    file.subject = pynwb.file.Subject(
        subject_id=name, species="Mus musculus", sex="U", age="P90D", description="simulated"
    )
    device = file.create_device(name="probe", description="simulated")
    group = file.create_electrode_group(name="shank", description="simulated", location="M1", device=device)
    for _ in range(settings.channels):
        file.add_electrode(group=group, location="M1")
    latents = _simulate_state(session)
    _add_volts(pynwb, file, session, latents)
    _add_units(pynwb, file, session, latents)
    _add_movement(pynwb, file, session, latents)
    with pynwb.NWBHDF5IO(str(path), "w") as writer:
        writer.write(file)
    return path.stat().st_size


def _simulate_state(session: Session) -> NDArray[np.float64]:
    """Return the state at each step, of shape (steps, 4); each component has a standard deviation of about 1."""
    from scipy.signal import lfilter

    steps = round(session.settings.seconds / _STEP_SECONDS)
    pace = session.generator("pace", session.subject).uniform(0.9, 1.1)
    rng = session.generator("latents", session.subject, session.number)
    parts = []
    for frequency in _FREQUENCIES_HZ:
        turn = np.exp((-1 / _DECAY_SECONDS + 2j * np.pi * pace * frequency) * _STEP_SECONDS)
        kicks = rng.standard_normal((2, steps)) * np.sqrt(1 - abs(turn) ** 2)
        state = lfilter([1.0], [1.0, -turn], kicks[0] + 1j * kicks[1])
        parts += [state.real, state.imag]
    return np.stack(parts, axis=1)


def _add_volts(pynwb: Any, file: Any, session: Session, latents: NDArray[np.float64]) -> None:
    """Add the LFP: the state mixed onto the channels, in slow, strong noise as in tissue."""
    from scipy.signal import lfilter

    channels = session.settings.channels
    mixing = session.generator("mixing").standard_normal((latents.shape[1], channels), np.float32)
    rng = session.generator("volts", session.subject, session.number)
    noise = rng.standard_normal((session.settings.seconds * _LFP_HZ, channels), np.float32)
    slow = lfilter(np.array([0.25], np.float32), np.array([1.0, -0.97], np.float32), noise, axis=0)
    driven = np.repeat((latents.astype(np.float32) @ mixing), round(_STEP_SECONDS * _LFP_HZ), axis=0)
    bits = (40 * driven + 60 * slow) * 1e-6 / _VOLTS_PER_BIT
    file.create_processing_module("ecephys", "volts").add(lfp := pynwb.ecephys.LFP(name="LFP"))
    lfp.add_electrical_series(
        pynwb.ecephys.ElectricalSeries(
            name="lfp",
            data=np.clip(bits, -32768, 32767).astype(np.int16),
            electrodes=file.create_electrode_table_region(list(range(channels)), "all"),
            rate=float(_LFP_HZ),
            conversion=_VOLTS_PER_BIT,
        )
    )


def _add_units(pynwb: Any, file: Any, session: Session, latents: NDArray[np.float64]) -> None:
    """Add the spikes: each unit is a Poisson process whose rate follows the state."""
    from hdmf.common import VectorData, VectorIndex

    units = session.settings.units
    drive = session.generator("drive").standard_normal((latents.shape[1], units)) * 0.35
    own = session.generator("units", session.subject)
    base_hz, gain = 8 * np.exp(0.3 * own.standard_normal(units)), own.uniform(0.7, 1.3, units)
    rng = session.generator("spikes", session.subject, session.number)
    driven_hz = base_hz * np.exp(gain * (latents @ drive))
    counts = rng.poisson(driven_hz / (1 + driven_hz / _MOST_HZ) * _STEP_SECONDS)
    trains = []
    for unit in range(units):
        steps = np.repeat(np.arange(len(counts)), counts[:, unit])
        trains.append(np.sort(steps + rng.random(len(steps))) * _STEP_SECONDS)
    # As whole columns: added one by one, spikes take pynwb seconds per recording.
    times = VectorData(name="spike_times", description="seconds", data=np.concatenate(trains))
    ends = np.cumsum([len(train) for train in trains])
    columns = [times, VectorIndex(name="spike_times_index", target=times, data=ends)]
    file.units = pynwb.misc.Units(name="units", description="simulated", id=list(range(units)), columns=columns)


def _add_movement(pynwb: Any, file: Any, session: Session, latents: NDArray[np.float64]) -> None:
    """Add the joystick: its position is the state projected onto two axes, plus an unpredictable tremor."""
    readout = np.array([[1.0, 0.0], [0.0, 0.6], [0.5, 0.0], [0.0, 0.8]])
    rng = session.generator("tremor", session.subject, session.number)
    metres = _METRES * (latents @ readout + 0.1 * rng.standard_normal((len(latents), 2)))
    place = pynwb.behavior.SpatialSeries(
        name="joystick",
        data=metres.astype(np.float32),
        rate=1 / _STEP_SECONDS,
        reference_frame="the joystick at rest; x to the right, y away from the body",
        unit="meters",
    )
    file.create_processing_module("behavior", "movement").add(pynwb.behavior.Position(spatial_series=place))
