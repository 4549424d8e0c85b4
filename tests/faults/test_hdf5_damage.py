"""HDF5 and NWB files that are damaged, refer to other files, or expand: read, or a PenstockError that names them."""

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from penstock_nwb_parts import add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb
from penstock_test_parts import run_isolated

from penstock.convert.describe import describe_recording
from penstock.core.errors import PenstockError, SourceError
from penstock.source.stored.source import ZarrSource

N_ROWS = 1000


def numbers(path: Path, **options: Any) -> Path:
    """Write an array whose values say where they are, and which is compressed."""
    with h5py.File(path, "w") as file:
        data = np.arange(N_ROWS * 4).reshape(N_ROWS, 4)
        file.create_dataset("group/x", data=data, **({"chunks": (100, 4), "compression": "gzip"} | options))
    return path


def recording(path: Path) -> Path:
    nwb = new_file()
    add_lfp(nwb, np.arange(N_ROWS * 4, dtype=np.int16).reshape(N_ROWS, 4), rate=100.0)
    add_units(nwb, [[0.1, 0.2, 5.0], [1.0, 2.0]])
    return save_nwb(nwb, path)


def read_rows(path: Path) -> str:
    source = ZarrSource(path, {"x": "group/x"})
    found = source.take(np.arange(N_ROWS))["x"]
    return "right" if found.tolist() == np.arange(N_ROWS * 4).reshape(N_ROWS, 4).tolist() else "other values"


# -- other files -------------------------------------------------------------------------------------------------------


def link(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["group/more"] = h5py.ExternalLink(str(other), "/group/x")


def virtual(path: Path, other: Path) -> None:
    layout = h5py.VirtualLayout((N_ROWS, 4), "i8")
    layout[:] = h5py.VirtualSource(str(other), "group/x", (N_ROWS, 4))
    with h5py.File(path, "r+") as file:
        del file["group/x"]
        file.create_virtual_dataset("group/x", layout)


def raw(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["group/x"]
        file.create_dataset("group/x", (10, 4), "u1", external=[(str(other), 0, 40)])


@pytest.mark.parametrize("refer", [link, virtual, raw])
def test_data_in_another_file_are_refused_with_its_name(refer: Callable[[Path, Path], None], tmp_path: Path) -> None:
    path, other = numbers(tmp_path / "a.h5"), numbers(tmp_path / "other.h5")
    refer(path, other)
    with pytest.raises(SourceError, match=rf"All data of {path} must be in this file, .* in another: '{other}'"):
        read_rows(path)


@pytest.mark.parametrize("refer", [link, virtual, raw])
def test_a_recording_with_data_in_another_file_is_refused(refer: Callable[[Path, Path], None], tmp_path: Path) -> None:
    path, other = recording(tmp_path / "a.nwb"), numbers(tmp_path / "other.h5")
    with h5py.File(path, "r+") as file:
        file.create_dataset("group/x", data=[1])
    refer(path, other)
    for read in (describe_recording, open_nwb):
        with pytest.raises(SourceError, match=f"in another: '{other}'"):
            read(path)


def test_a_link_to_a_pipe_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    link(numbers(tmp_path / "a.h5"), tmp_path / "pipe")
    assert "in another" in run_isolated(reason, read_rows, tmp_path / "a.h5")


def reason(read: Callable[[Path], Any], path: Path) -> str:
    try:
        return str(read(path))
    except PenstockError as error:
        return str(error)


def test_links_and_virtual_data_within_the_file_are_read(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["group"]["back"] = file["/"]  # a circle
        file["soft"] = h5py.SoftLink("/group/x")
        layout = h5py.VirtualLayout((N_ROWS, 4), "i8")
        layout[:] = h5py.VirtualSource(".", "group/x", (N_ROWS, 4))
        file.create_virtual_dataset("view", layout)
    for name in ("soft", "view", "group/back/group/x"):
        found = ZarrSource(path, {"x": name})
        assert found.take(np.array([7]))["x"].tolist() == [[28, 29, 30, 31]]


# -- what expands ------------------------------------------------------------------------------------------------------


def growth(read: Callable[[Path], Any], path: Path) -> tuple[str, int]:
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = reason(read, path)
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def test_a_chunk_that_expands_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(8 << 20))
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("group/x", (1 << 24, 4), "u1", chunks=(1 << 24, 4), compression="gzip")[0] = 0
    outcome, megabytes = run_isolated(growth, read_rows, path)
    assert f"A chunk of /group/x in {path} would take 67,108,864 bytes of memory" in outcome
    assert megabytes < 40


def test_a_row_that_was_never_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("group/x", (10, 1 << 33), "u1", chunks=(1, 1 << 20))
    outcome, megabytes = run_isolated(growth, read_rows, path)
    assert f"A row of {path}/group/x would take 8,589,934,592 bytes of memory" in outcome
    assert megabytes < 40


def never_written(path: Path, name: str, n_rows: int) -> None:
    """Replace a dataset of a recording by a longer one that takes no place in the file."""
    with h5py.File(path, "r+") as file:
        old = file[name]
        attributes, shape, dtype = dict(old.attrs), old.shape, old.dtype
        del file[name]
        made = file.create_dataset(name, (n_rows, *shape[1:]), dtype, chunks=(1024, *shape[1:]))
        made.attrs.update(attributes)


def test_spikes_that_were_never_written_are_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.nwb")
    never_written(path, "units/spike_times", 1 << 40)
    outcome, megabytes = run_isolated(growth, open_nwb, path)
    assert f"units/spike_times in {path} would take 8,796,093,022,208 bytes of memory" in outcome
    assert megabytes < 60


def test_a_window_of_frames_that_were_never_written_is_refused_and_a_short_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(1 << 20))
    path = recording(tmp_path / "a.nwb")
    never_written(path, "processing/ecephys/LFP/lfp/data", 1 << 18)
    fields = {"modalities": ("lfp",)}
    outcome, megabytes = run_isolated(growth, lambda where: open_nwb(where, **fields, sequence_length=130_000), path)
    assert f"A window of processing/ecephys/LFP/lfp in {path} would take" in outcome
    assert megabytes < 60
    short = open_nwb(path, **fields)
    assert short.n_samples > 1
    short.close()


# -- damage ------------------------------------------------------------------------------------------------------------


def damages(whole: bytes, seed: int) -> bytes:
    """Return the file with bits flipped, bytes replaced, or its end cut off."""
    rng, damaged = random.Random(seed), bytearray(whole)
    kind = seed % 4
    at = rng.randrange(min(3000, len(whole)) if kind == 1 else len(whole) - 8)
    if kind == 0:
        return whole[:at]
    damaged[at : at + (8 if kind == 3 else 1)] = rng.randbytes(8) if kind == 3 else bytes([damaged[at] ^ 1 << seed % 8])
    return bytes(damaged)


def outcomes(path: Path, n_damages: int, reads: list[Callable[[Path], Any]]) -> list[str]:
    whole, found = path.read_bytes(), set()
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    for seed in range(n_damages):
        damaged = path.with_name(f"damaged-{seed}{path.suffix}")
        damaged.write_bytes(damages(whole, seed))
        for read in reads:
            try:
                read(damaged)
                found.add("read")
            except PenstockError as error:
                found.add("named" if str(damaged) in str(error) else f"seed {seed}: not named: {error}")
            except Exception as error:
                found.add(f"seed {seed}: {error!r}")
        damaged.unlink()
    return sorted(found)


def test_a_damaged_hdf5_file_is_read_or_an_error_that_names_it(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.h5")
    assert run_isolated(outcomes, path, 160, [read_rows]) == ["named", "read"]


def test_a_damaged_recording_is_read_or_an_error_that_names_it(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.nwb")
    assert run_isolated(outcomes, path, 8, [describe_recording, one_by_one]) == ["named", "read"]


@pytest.mark.parametrize(
    "damage", [b"", b"\x89HDF\r\n\x1a\n", b"PK\3\4" + bytes(600), b"\x89HDF\r\n\x1a\n" + b"\xff" * 2000]
)
def test_what_is_no_hdf5_file_is_refused_with_its_name(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.nwb"
    path.write_bytes(damage)
    for read in (describe_recording, open_nwb, lambda where: ZarrSource(where, {"x": "group/x"})):
        with pytest.raises(PenstockError, match=r"a\.nwb"):
            read(path)


def test_checksums_that_hdf5_has_are_compared(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.h5", fletcher32=True, compression=None)
    stored = bytearray(path.read_bytes())
    stored[stored.index(np.arange(400, 404).tobytes())] ^= 1
    path.write_bytes(stored)
    with pytest.raises(PenstockError, match=r"rows 100–199 of .*a\.h5/group/x"):
        read_rows(path)
