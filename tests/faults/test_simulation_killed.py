"""A simulation whose writer is killed, at any moment: nothing half is read; written again, it has the same bytes."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_convert_parts import tree
from penstock_test_killer import Killer, start_killer

from penstock import SourceError, Span, WriteError, ZarrSource
from penstock.recipes.streams import FlyVisSim, SimulationWriter, create_zarr_loader, load_column_slice, load_metadata

STEPS, NEURONS = 2500, 2  # a whole chunk, and one that is filled up

SCRIPT = """
import numpy as np, zarr.codecs  # once, not in every process that is forked
from penstock_test_killer import serve
from penstock.recipes.streams import SimulationWriter

STEPS, NEURONS = 2500, 2

def frames(start, stop, shift):
    time, neuron, column = np.ogrid[start:stop, 0:NEURONS, 0:4]
    return (shift + 10 * time + 4 * neuron + column + 1).astype(np.float32)

def write(folder, shift=0, step=700, **options):
    static = np.arange(NEURONS * 5).reshape(NEURONS, 5) + shift
    with SimulationWriter(folder, static, STEPS, **options) as writer:
        for start in range(0, STEPS, step):
            writer.append(frames(start, min(start + step, STEPS), shift))

serve(write)
"""


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with start_killer(SCRIPT) as killer:
        yield killer


def expected(shift: int = 0) -> np.ndarray:
    time, neuron, column = np.ogrid[0:STEPS, 0:NEURONS, 0:4]
    return (shift + 10 * time + 4 * neuron + column + 1).astype(np.float32)


def visible(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if not name.startswith(".wri")}


READERS: dict[str, Any] = {
    "a column": lambda folder: load_column_slice(folder, FlyVisSim.VOLTAGE, 0, STEPS),
    "the loader": lambda folder: create_zarr_loader(folder, 3, 4, 1)(0, STEPS)[0],
    "the source": lambda folder: ZarrSource(folder, {"x": ("timeseries.zarr", slice(None), 0)}).read(Span(0, STEPS))[
        "x"
    ],
    "the metadata": load_metadata,
    "all arrays": ZarrSource,
}


def check_readers(folder: Path, wholes: list[dict[str, bytes]]) -> None:
    """Check that readers see a whole simulation or refuse with what to do."""
    if visible(folder) in wholes:
        shift = 1000 * wholes.index(visible(folder))
        assert np.array_equal(load_column_slice(folder, 3, 0, STEPS), expected(shift)[..., 0])
        assert load_metadata(folder).ravel().tolist() == list(range(shift, shift + NEURONS * 5))
        return
    for name, read in READERS.items():
        with pytest.raises(SourceError) as caught:
            read(folder)
        if folder.exists() and (folder / ".writing").exists():
            assert "a writer has not finished there. Run it again" in str(caught.value), name


def test_killed_by_kill_9_from_outside_writing_again_is_exact(killer: Killer, tmp_path: Path) -> None:
    killer.run(folder=str(tmp_path / "whole"))
    script = SCRIPT.replace("serve(write)", f"write({str(tmp_path / 'sim')!r}, step=50)")
    script = script.replace("    with Sim", "    print('begun', flush=True)\n    with Sim")
    process = subprocess.Popen([sys.executable, "-c", script.replace("from penstock_test_killer import serve", "")],
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    while not (tmp_path / "sim" / ".writing" / "timeseries.zarr" / "c/0/0/0").exists() and process.poll() is None:
        pass
    process.kill()
    process.communicate()
    check_readers(tmp_path / "sim", [tree(tmp_path / "whole")])
    killer.run(folder=str(tmp_path / "sim"), overwrite=True)  # a slow test may have let it end
    assert tree(tmp_path / "sim") == tree(tmp_path / "whole")


def test_a_full_disk_is_a_write_error_and_publishes_nothing(killer: Killer, tmp_path: Path) -> None:
    static = np.arange(NEURONS * 5).reshape(NEURONS, 5)
    writer = SimulationWriter(tmp_path / "sim", static, STEPS)
    writer.append(expected()[:2000])
    before = tree(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(WriteError, match=r"Could not write to .*sim: .*File too large.* write it again"):
            writer.append(expected()[2000:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: tree(tmp_path)[name] for name in before} == before
    with pytest.raises(WriteError, match="has failed"):
        writer.append(expected()[2000:])
    check_readers(tmp_path / "sim", [])
    with SimulationWriter(tmp_path / "sim", static, STEPS) as writer:
        writer.append(expected())
    killer.run(folder=str(tmp_path / "whole"))
    assert tree(tmp_path / "sim") == tree(tmp_path / "whole")
