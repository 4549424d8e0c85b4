"""Seed 004's document: every snippet and every command of it runs with only its imports changed, and does what it says.

The document lies in `seeds/`, verbatim; its code blocks are cut out of it when the tests run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pynwb import NWBHDF5IO, NWBFile
from pynwb.behavior import Position, SpatialSeries
from pynwb.ecephys import LFP
from pynwb.file import Subject

import penstock
from penstock import ShardedDatasetInfo, WebDatasetLoader, create_shards_from_arrays
from tests.contracts.documents import Reading, code_blocks, document

DOCUMENT = document("004")
BLOCKS = code_blocks(DOCUMENT)
COMMANDS = [
    f"python scripts/convert_to_shards.py{command}"
    for block in code_blocks(DOCUMENT, "bash")
    for command in re.findall(r"^python scripts/convert_to_shards\.py((?:.*\\\n)*.*)$", block, re.MULTILINE)
]

# -- what the document takes for granted -------------------------------------------------------------------------------

QUICK_START, WRITTEN = 40, 1100
"""Samples instead of 10 000 in the quick start (0.6 MB each), and in the snippet that writes sample by sample."""


class _ScaledRandom:
    """Stands in for numpy's random module: arrays of 10 000 samples get fewer; all other sizes are the document's."""

    @staticmethod
    def randn(*shape: int) -> np.ndarray:
        first = QUICK_START if shape[0] == 10_000 else shape[0]
        return np.random.default_rng(0).standard_normal((first, *shape[1:]))


class _ScaledNumpy:
    """Stands in for numpy in a snippet: numpy, but for `random`."""

    random = _ScaledRandom()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def scaled_range(*bounds: int) -> range:
    return range(*(WRITTEN if bound == 10_000 else bound for bound in bounds))


class TinyModel(torch.nn.Module):
    """Stands for NeuroFMX, which the document leaves to another package."""

    def __init__(self, input_dim: int, hidden_dim: int, n_layers: int) -> None:
        super().__init__()
        assert (hidden_dim, n_layers) == (256, 8)
        self.layer = torch.nn.Linear(input_dim, 2)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        return self.layer(spikes)


def with_our_imports(block: str) -> str:
    """Return a snippet with nothing but its import lines changed."""
    block = block.replace("from neuros_neurofm.datasets import", "from penstock import")
    block = block.replace("from neuros_neurofm.models import NeuroFMX\n", "")
    return block.replace("import numpy as np\n", "")


def write_recording(path: Path, first_volt: int) -> None:
    """Write an NWB file of 10.5 s: four units, two channels of LFP that count samples, a place that counts seconds."""
    file = NWBFile(
        session_description="-",
        identifier=path.name,
        session_start_time=datetime(2026, 1, 1, tzinfo=UTC),
        subject=Subject(subject_id=f"mouse {first_volt}"),
    )
    group = file.create_electrode_group("g", description="-", location="CA1", device=file.create_device("d"))
    for _ in range(2):
        file.add_electrode(group=group, location="CA1")
    lfp = LFP(name="LFP")
    file.create_processing_module("ecephys", "-").add(lfp)
    lfp.create_electrical_series(
        name="lfp",
        data=np.arange(10_500, dtype=np.float32)[:, None] + np.float32([first_volt, 0]),
        electrodes=file.create_electrode_table_region([0, 1], "-"),
        rate=1000.0,
    )
    for unit in range(4):
        file.add_unit(spike_times=np.arange(0.005 + unit, 10.4, 0.5))
    times = np.arange(0, 10.6, 0.01)
    place = SpatialSeries(name="xy", data=np.stack([times, -times], 1), timestamps=times, reference_frame="-")
    file.create_processing_module("behavior", "-").add(Position(spatial_series=place))
    with NWBHDF5IO(path, "w") as io:
        io.write(file)


def recordings(folder: Path) -> Path:
    """Return a folder with the recordings that the document speaks of, in the one that it is read in."""
    folder = folder / "recordings"
    if not folder.exists():
        (folder / "data").mkdir(parents=True)
        for number, name in enumerate(("data", "data1", "data2", "data3")):
            write_recording(folder / f"{name}.nwb", first_volt=number)
    return folder


def begun(folder: Path) -> Reading:
    """Return a reader before the first snippet, with what the document takes for granted."""
    names = {
        "np": _ScaledNumpy(),
        "torch": torch,
        "range": scaled_range,
        "num_epochs": 2,
        "criterion": torch.nn.MSELoss(),
        "NeuroFMX": TinyModel,
    }
    train = {"spikes": np.ones((70, 100, 96), np.float32), "behavior": np.ones((70, 100, 2), np.float32)}
    for name, count in (("train_shards", 70), ("val_shards", 40)):
        create_shards_from_arrays(folder / name, {key: value[:count] for key, value in train.items()}, shard_size=20)

    def place(snippet: str) -> Path:
        # Two snippets write ./shards, as all commands do: an existing dataset is refused (see the test below), so that
        # a reader removes it first.
        if "WebDatasetWriter(" in snippet:
            shutil.rmtree(folder / "shards")
        # The shards of the recordings would replace those that the snippets after it are about.
        return recordings(folder) if "NWBToWebDataset" in snippet else folder

    return Reading(DOCUMENT.name, [with_our_imports(block) for block in BLOCKS], folder, names, place)


# -- the snippets ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    reading = begun(tmp_path_factory.mktemp("document"))
    yield reading
    for name in ("train_loader", "val_loader", "loader", "loader2"):
        if hasattr(reading.names.get(name), "close"):
            reading.names[name].close()


def block_with(words: str) -> int:
    (number,) = [number for number, block in enumerate(BLOCKS) if words in block]
    return number


def title(number: int) -> str:
    """Return the heading above a block."""
    before = DOCUMENT.read_text().split("```python\n")[: number + 1]
    return re.findall(r"^#+ (.*)$", "\n".join(before), re.MULTILINE)[-1]


def test_the_document_has_the_snippets_that_these_tests_know() -> None:
    assert [title(number) for number in range(len(BLOCKS))] == [
        "1. Convert Data to Shards",
        "2. Load Shards in Training",
        "From Numpy Arrays",
        "From NWB Files",
        "Basic Loading",
        "Resumable Loading",
        "With PyTorch DataLoader",
        "Inspecting Shards",
        "Custom Collate Function",
        "State Management",
        "Training Script",
    ]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=title)
def test_every_snippet_runs_with_only_its_import_changed(
    reading: Reading, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reading.run(number)


@pytest.mark.parametrize("words", ["create_shards_from_arrays(", "WebDatasetWriter(", "NWBToWebDatasetConverter("])
def test_a_snippet_that_is_run_again_does_not_replace_the_dataset(reading: Reading, words: str) -> None:
    number = block_with(words)
    reading.run(number)
    folder = recordings(reading.folder) if "NWB" in words else reading.folder
    before = ShardedDatasetInfo(folder / "shards").get_summary()["fingerprint"]
    again = Reading(DOCUMENT.name, [with_our_imports(BLOCKS[number])], folder, dict(reading.names))
    with pytest.raises(penstock.WriteError, match=r"holds a dataset already.*overwrite=True"):
        again.run(0)
    assert ShardedDatasetInfo(folder / "shards").get_summary()["fingerprint"] == before


def test_the_converter_of_the_document_writes_windows_of_all_files(reading: Reading) -> None:
    names = reading.run(block_with("NWBToWebDatasetConverter"))
    assert (names["summary"]["total_samples"], names["summary"]["total_shards"]) == (80, 1)
    samples = list(WebDatasetLoader(recordings(reading.folder) / "shards", shuffle=False))
    assert [sample["metadata"]["subject"] for sample in samples[::20]] == [f"mouse {number}" for number in range(4)]
    for number, sample in enumerate(samples):
        file, window = divmod(number, 20)
        first = 500 * window  # windows of a second, half overlapping, at 1000 samples per second
        assert np.array_equal(sample["lfp"][:, 0], np.arange(first, first + 1000, dtype=np.float32) + file)
        centres = 0.5 * window + 0.01 * (np.arange(100) + 0.5)
        assert np.allclose(sample["behavior"], np.stack([centres, -centres], 1), atol=1e-5)
        assert sample["behavior_valid"].all()
        spikes = np.concatenate([np.arange(0.005 + unit, 10.4, 0.5) for unit in range(4)])
        begin = 0.5 * window
        assert sample["spikes"].sum() == ((spikes >= begin) & (spikes < begin + 1)).sum()


@pytest.mark.parametrize("number", range(4))
def test_every_command_of_the_document_runs_as_it_is(reading: Reading, tmp_path: Path, number: int) -> None:
    (tmp_path / "scripts").symlink_to(Path(__file__).parents[2] / "scripts")
    (tmp_path / "data").mkdir()
    for path in recordings(reading.folder).glob("*.nwb"):
        (tmp_path / "data" / path.name).write_bytes(path.read_bytes())
    np.savez(tmp_path / "data.npz", x=np.arange(40.0).reshape(10, 4))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", COMMANDS[number]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    info = ShardedDatasetInfo(tmp_path / "shards")
    assert info.get_summary()["total_samples"] == (10 if "data.npz" in COMMANDS[number] else 80)
    assert info.get_summary()["compression"] == ("gz" if "gz" in COMMANDS[number] else "none")
    again = subprocess.run(
        ["bash", "-c", COMMANDS[number]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^- `(\w+)(?:\(\))?`:", DOCUMENT.read_text(), re.MULTILINE))))
def test_every_name_of_the_api_reference_exists(name: str) -> None:
    if name in ("get_state", "set_state"):
        assert callable(getattr(WebDatasetLoader, name))
    elif name not in ("none", "gz", "bz2", "xz"):
        assert callable(getattr(penstock, name))


def test_the_quick_start_gives_batches_of_the_shapes_it_says(reading: Reading) -> None:
    names = reading.run(1)
    assert tuple(names["spikes"].shape) == (QUICK_START % 32, 100, 96)
    assert tuple(names["behavior"].shape) == (QUICK_START % 32, 100, 2)
    assert names["spikes"].dtype == torch.float64  # what was written, random arrays being of this dtype
    assert len(names["train_loader"]) == -(-QUICK_START // 32)


def test_the_summary_of_the_writing_snippet_has_what_it_wrote(reading: Reading) -> None:
    summary = reading.run(block_with("summary = writer.finalize()"))["summary"]
    assert {"total_samples": WRITTEN, "total_shards": 2, "shard_size": 1000, "compression": "none"}.items() <= (
        summary.items()
    )


def test_the_state_of_the_state_snippet_is_the_one_in_its_comment(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = block_with("state = loader.get_state()")
    names = reading.run(number)
    (promised,) = re.findall(r"# state = (\{.*\})", BLOCKS[number])
    assert json.loads(promised) == {"shard_idx": 0, "sample_offset": 100}
    assert json.loads(promised).items() <= names["state"].items()
    # "Continue from exactly where we left off"
    monkeypatch.chdir(reading.folder)
    whole = [sample["metadata"]["trial_id"] for sample in WebDatasetLoader("./shards")]
    rest = [sample["metadata"]["trial_id"] for sample in names["loader"]]
    assert rest == whole[100:]
    assert sorted(whole) == list(range(WRITTEN))


def test_the_custom_collate_function_gets_tensors_that_stack(reading: Reading) -> None:
    names = reading.run(block_with("def custom_collate"))
    loader = torch.utils.data.DataLoader(
        WebDatasetLoader(reading.folder / "train_shards"), batch_size=32, collate_fn=names["custom_collate"]
    )
    shapes = [(tuple(batch["spikes"].shape), float(batch["spikes"].max())) for batch in loader]
    assert shapes == [((32, 100, 96), 1.0), ((32, 100, 96), 1.0), ((6, 100, 96), 1.0)]


def test_the_checkpoint_of_the_resumable_snippet_is_resumed_by_its_second_loader(reading: Reading) -> None:
    reading.run(block_with("loader2 = ResumableWebDatasetLoader"))
    saved = json.loads((reading.folder / "checkpoint.json").read_bytes())
    # The loop ran to the end, so that "the last checkpoint" is the beginning of the next epoch.
    assert (saved["epoch"], saved["shard_idx"], saved["sample_offset"]) == (1, 0, 0)


def test_the_training_snippet_has_trained(reading: Reading) -> None:
    names = reading.run(block_with("optimizer.step()"))
    assert names["train_loader"].epoch == names["val_loader"].epoch == 2
    assert float(names["loss"].detach()) < 2
    assert tuple(names["batch"]["spikes"].shape) == (8, 100, 96)


def test_stand_ins_change_nothing_but_the_number_of_samples() -> None:
    snippet: Any = SimpleNamespace(np=_ScaledNumpy())
    assert snippet.np.random.randn(10_000, 3).shape == (QUICK_START, 3)
    assert snippet.np.random.randn(100, 96).shape == (100, 96)
    assert snippet.np.zeros is np.zeros
    changed = [
        (before, after)
        for block in BLOCKS
        for before in block.splitlines()
        if (after := with_our_imports(before + "\n").rstrip("\n")) != before
    ]
    assert all(before.startswith(("from neuros_neurofm", "import numpy")) for before, _ in changed)
