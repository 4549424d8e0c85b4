"""Conversion: 1.5 GB of arrays beside the raw write limit, windows that must be computed, and memory.

Arrays are rows of 295 kB in one `.npy` file, read from a warm page cache. The limit reads the same rows and writes the
same bytes to one file per shard, and lets them last as ours do. Windows are computed from an NWB recording: spikes are
binned, 64 channels of LFP resampled from 1250 to 500 Hz.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.measure import Contender, alone, measured, report
from bench.sizes import sized

__all__ = ["run"]

ROW = 73_800  # float32: 295 kB
ROWS = sized(5_000, 500)
SHARD = sized(500, 100)
LFP_RATE, LFP_SECONDS, CHANNELS, UNITS = 1250.0, sized(1200, 60), 64, 96


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, recording, target = folder / "rows.npy", folder / "recording.nwb", folder / "converted"
    _write_rows(rows)
    _write_recording(recording)
    results = measured(
        [
            Contender("limit: read and write the same bytes, fsync", copy_raw, (rows, target)),
            Contender("penstock, 1 worker", convert_rows, (rows, target, 1)),
            Contender("penstock, 2 workers", convert_rows, (rows, target, 2)),
        ],
        repeats,
    )
    report(out, "convert rows", results)
    results = measured(
        [
            Contender("1 worker", convert_recording, (recording, target, 1)),
            Contender("2 workers", convert_recording, (recording, target, 2)),
        ],
        repeats,
    )
    report(out, "convert windows", results)
    jobs: dict[str, tuple[Callable[..., float], tuple[Any, ...]]] = {
        "rows, 1 worker": (convert_rows, (rows, target, 1)),
        "rows, 2 workers": (convert_rows, (rows, target, 2)),
        "windows of NWB, 1 worker": (convert_recording, (recording, target, 1)),
        "windows of NWB, 2 workers": (convert_recording, (recording, target, 2)),
    }
    report(out, "convert memory", [Peak(name, alone(peak_mb, *job)) for name, job in jobs.items()])


@dataclass(frozen=True, slots=True)
class Peak:
    """The most private memory that all processes had at once, beyond what there was before."""

    name: str
    mb: float


def copy_raw(rows: Path, target: Path) -> float:
    """Read rows and write them, one file per shard."""
    target.mkdir(parents=True)
    began = time.perf_counter()
    buffer = memoryview(bytearray(ROW * 4))
    with rows.open("rb", buffering=0) as file:
        file.seek(128)
        for number in range(ROWS):
            if number % SHARD == 0:
                handle = os.open(target / f"{number}.raw", os.O_WRONLY | os.O_CREAT)
            file.readinto(buffer)
            os.write(handle, buffer)
            if number % SHARD == SHARD - 1:
                os.fsync(handle)
                os.close(handle)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return ROWS / seconds


def convert_rows(rows: Path, target: Path, workers: int) -> float:
    """Convert a `.npy` file, row by row."""
    options = ps.convert.ConvertOptions(ps.shard.WriteOptions(SHARD))
    began = time.perf_counter()
    ps.convert_to_shards(rows, target, options=options, workers=workers, show_progress=False)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return ROWS / seconds


def convert_recording(recording: Path, target: Path, workers: int) -> float:
    """Convert an NWB file into windows of a second, half overlapping."""
    nwb = ps.convert.NWBOptions(modalities=("spikes", "lfp"), rate_hz=500.0)
    began = time.perf_counter()
    found = ps.convert_to_shards(
        recording,
        target,
        reading=ps.convert.ReadOptions(nwb=nwb),
        options=ps.convert.ConvertOptions(ps.shard.WriteOptions(100)),
        workers=workers,
        show_progress=False,
    )
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return float(found["total_samples"]) / seconds


def _write_rows(path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(ROWS, ROW))
    for start in range(0, ROWS, 100):
        array[start : start + 100] = np.random.default_rng(start).random((min(100, ROWS - start), ROW), np.float32)


def _write_recording(path: Path) -> None:
    if path.exists():
        return
    from pynwb import NWBHDF5IO, NWBFile  # an optional package
    from pynwb.ecephys import LFP

    rng = np.random.default_rng(0)
    file = NWBFile("a recording", "bench", datetime(2026, 1, 1, tzinfo=UTC))
    group = file.create_electrode_group("probe", "a", "b", file.create_device("probe"))
    for _ in range(CHANNELS):
        file.add_electrode(group=group, location="CA1")
    electrodes = file.create_electrode_table_region(list(range(CHANNELS)), "all")
    samples = rng.integers(-1000, 1000, (int(LFP_RATE * LFP_SECONDS), CHANNELS), dtype=np.int16)
    lfp = LFP(name="LFP")
    file.create_processing_module("ecephys", "lfp").add(lfp)
    lfp.create_electrical_series(name="lfp", data=samples, electrodes=electrodes, rate=LFP_RATE, conversion=1e-6)
    for _ in range(UNITS):
        file.add_unit(spike_times=np.sort(rng.random(20 * LFP_SECONDS)) * LFP_SECONDS)
    with NWBHDF5IO(path, "w") as io:
        io.write(file)


def peak_mb(job: Callable[..., float], arguments: tuple[Any, ...]) -> float:
    """Run a job, and return the most private memory that it and the processes it started had at once, in MB."""
    done, peak = threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _private_mb())

    base = _private_mb()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        job(*arguments)
    finally:
        done.set()
        watcher.join()
    return peak[0] - base


def _private_mb() -> float:
    """Return the anonymous memory of this process and its children; pages that several share are shared out."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if os.getpid() in (int(fields["Pid"]), int(fields["PPid"])):
                shares = status.with_name("smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in shares if line.startswith("Pss_Anon"))
        except (OSError, KeyError):  # ended meanwhile
            continue
    return total / 1024
