"""Seed 004's document: every snippet of it runs with only its imports changed, and every statement of it is true.

The document lies in `seeds/`, verbatim; its code blocks are cut out of it when the tests run.
"""

import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import isolated, own_threads
from pynwb import NWBHDF5IO, NWBFile
from pynwb.behavior import Position, SpatialSeries
from pynwb.ecephys import LFP
from pynwb.file import Subject

import penstock
from penstock import (
    DamageError,
    OptionError,
    ResumableWebDatasetLoader,
    ResumeError,
    ShardedDatasetInfo,
    WebDatasetLoader,
    WebDatasetWriter,
    WriteError,
    collate_webdataset,
    create_shards_from_arrays,
    create_webdataset_dataloader,
)

(DOCUMENT,) = (Path(__file__).parent / "seeds").glob("004_*.txt")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
COMMANDS: list[str] = [
    f"python scripts/convert_to_shards.py{command}"
    for block in re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    for command in re.findall(r"^python scripts/convert_to_shards\.py((?:.*\\\n)*.*)$", block, re.MULTILINE)
]

# -- the snippets ------------------------------------------------------------------------------------------------------

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


class Reading:
    """A reader of the document who tries each snippet in turn, in one session and one folder, as one would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {
            "np": _ScaledNumpy(),
            "torch": torch,
            "range": scaled_range,
            "num_epochs": 2,
            "criterion": torch.nn.MSELoss(),
            "NeuroFMX": TinyModel,
        }
        self.done = 0
        self.after: dict[int, dict[str, Any]] = {}
        """The names that there were after each snippet."""
        train = {"spikes": np.ones((70, 100, 96), np.float32), "behavior": np.ones((70, 100, 2), np.float32)}
        for name, count in (("train_shards", 70), ("val_shards", 40)):
            create_shards_from_arrays(
                folder / name, {key: value[:count] for key, value in train.items()}, shard_size=20
            )

    def recordings(self) -> Path:
        """Return a folder with the recordings that the document speaks of."""
        folder = self.folder / "recordings"
        if not folder.exists():
            (folder / "data").mkdir(parents=True)
            for number, name in enumerate(("data", "data1", "data2", "data3")):
                write_recording(folder / f"{name}.nwb", first_volt=number)
        return folder

    def run(self, number: int) -> dict[str, Any]:
        """Run the snippets up to `number` that were not run yet; return the names that there were after it."""
        while self.done <= number:
            block, self.done = self.done, self.done + 1
            before = Path.cwd()
            # The shards of the recordings would replace those that the snippets after it are about.
            os.chdir(self.recordings() if "NWBToWebDataset" in BLOCKS[block] else self.folder)
            try:
                exec(compile(with_our_imports(BLOCKS[block]), f"{DOCUMENT.name}, block {block}", "exec"), self.names)
            finally:
                os.chdir(before)
            self.after[block] = dict(self.names)
        return self.after[number]


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    reading = Reading(tmp_path_factory.mktemp("document"))
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


@pytest.mark.filterwarnings("ignore:The data set of .* is replaced")
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=title)
def test_every_snippet_runs_with_only_its_import_changed(
    reading: Reading, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reading.run(number)


def test_the_converter_of_the_document_writes_windows_of_all_files(reading: Reading) -> None:
    names = reading.run(block_with("NWBToWebDatasetConverter"))
    assert (names["summary"]["total_samples"], names["summary"]["total_shards"]) == (80, 1)
    samples = list(WebDatasetLoader(reading.recordings() / "shards", shuffle=False))
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
    for path in reading.recordings().glob("*.nwb"):
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


# -- small data sets that encode their position ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a data set of n samples once: x is i, y is (i, i + 1/4)."""
    made: dict[Any, Path] = {}

    def written(n: int, shard_size: int, **options: Any) -> Path:
        key = (n, shard_size, tuple(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("set")
            x = np.arange(n)
            arrays = {"x": x, "y": np.stack([x, x + 0.25], axis=1).astype(np.float32)}
            create_shards_from_arrays(made[key], arrays, shard_size=shard_size, **options)
        return made[key]

    return written


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def batch_xs(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


# -- "Shard Format" ----------------------------------------------------------------------------------------------------


def members(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_shards_hold_the_members_that_the_document_draws_counted_from_zero(tmp_path: Path, array_format: str) -> None:
    with WebDatasetWriter(tmp_path, shard_size=3, array_format=array_format) as writer:
        for i in range(5):
            writer.write_sample({"spikes": np.full((2, 3), i), "behavior": np.float32(i), "trial": {"n": i}})
    wanted = [
        f"sample_{i:09d}.{member}"
        for i in range(5)
        for member in (f"spikes.{array_format}", f"behavior.{array_format}", "trial.json", "metadata.json")
    ]
    assert members(tmp_path / "shard_000000.tar") == wanted[:12]
    assert members(tmp_path / "shard_000001.tar") == wanted[12:]
    assert json.loads((tmp_path / "dataset_metadata.json").read_bytes())["total_samples"] == 5


def test_a_pyd_member_is_a_pickle_that_anyone_reads(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"spikes": np.arange(6.0).reshape(2, 3)}, array_format="pyd")
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        content = tar.extractfile("sample_000000001.spikes.pyd").read()
    assert pickle.loads(content).tolist() == [3.0, 4.0, 5.0]


def test_the_metadata_member_says_who_the_sample_is_and_what_the_user_said(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path, shard_size=2) as writer:
        for i in range(3):
            writer.write_sample(
                {"x": np.int64(i)}, metadata={"trial_id": i, "condition": "left" if i % 2 == 0 else "right"}
            )
    with tarfile.open(tmp_path / "shard_000001.tar") as tar:
        stored = json.loads(tar.extractfile("sample_000000002.metadata.json").read())
    assert stored == {
        "sample_id": "sample_000000002",
        "modalities": ["x"],
        "shard_idx": 1,
        "sample_idx_in_shard": 0,
        "trial_id": 2,
        "condition": "left",
    }
    samples = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert samples[2]["metadata"] == stored


@pytest.mark.parametrize("compression", ["none", "gz", "bz2", "xz"])
def test_every_compression_of_the_document_keeps_the_name_and_the_samples(tmp_path: Path, compression: str) -> None:
    arrays = {"x": np.arange(7), "y": np.arange(14.0).reshape(7, 2)}
    summary = create_shards_from_arrays(tmp_path, arrays, shard_size=3, compression=compression)
    assert summary["compression"] == compression
    assert sorted(path.name for path in tmp_path.glob("*.tar*") if path.suffix != ".index") == [
        f"shard_{k:06d}.tar" for k in range(3)
    ]
    with tarfile.open(tmp_path / "shard_000000.tar", f"r:{'' if compression == 'none' else compression}") as tar:
        assert len(tar.getnames()) == 9
    found = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert xs(found) == list(range(7))
    assert [sample["y"].tolist() for sample in found] == arrays["y"].tolist()


# -- "Multi-Worker Behavior", through torch's own DataLoader -----------------------------------------------------------

MORE_WORKERS = "ignore:This DataLoader will create 4 worker processes"


def by_worker(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate: which worker made this batch, of which items, with which shards open."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    mine = Path(info.dataset.source.manifest.folder)
    opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return {"worker": info.id, "x": xs(samples), "open": {path.name for path in opened if path.parent == mine}}


@pytest.fixture(scope="module")
def four_workers(sets: Callable[..., Path]) -> dict[str, list[list[dict[str, Any]]]]:
    """Epochs of four workers over eight shards of ten samples: two of one object, and one each of two others."""
    found = {}
    for name, seed in (("first", 42), ("again", 42), ("other seed", 43)):
        loader = torch.utils.data.DataLoader(
            WebDatasetLoader(sets(80, 10), seed=seed), batch_size=3, num_workers=4, collate_fn=by_worker
        )
        found[name] = [list(loader) for _ in range(2 if name == "first" else 1)]
    return found


def worker_items(epoch: list[dict[str, Any]]) -> dict[int, list[int]]:
    items: dict[int, list[int]] = {}
    for batch in epoch:
        items.setdefault(batch["worker"], []).extend(batch["x"])
    return items


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_1_shards_are_divided_among_workers_as_in_the_example(four_workers: Any) -> None:
    text = DOCUMENT.read_text()
    promised = {
        int(a): {int(b), int(c)} for a, b, c in re.findall(r"^- Worker (\d): shards (\d), (\d)$", text, re.MULTILINE)
    }
    assert promised == {0: {0, 4}, 1: {1, 5}, 2: {2, 6}, 3: {3, 7}}
    for epoch in four_workers["first"]:
        assert {worker: {x // 10 for x in items} for worker, items in worker_items(epoch).items()} == promised


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_2_each_worker_opens_its_own_shards_and_no_other(four_workers: Any) -> None:
    for batch in four_workers["first"][0]:
        mine = {f"shard_{batch['worker'] + 4 * k:06d}.tar" for k in range(2)}
        assert {f"shard_{x // 10:06d}.tar" for x in batch["x"]} <= batch["open"] <= mine


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_3_shuffling_happens_within_each_worker(four_workers: Any) -> None:
    for epoch in four_workers["first"]:
        for worker, items in worker_items(epoch).items():
            stored = [shard * 10 + row for shard in (worker, worker + 4) for row in range(10)]
            assert sorted(items) == stored
            assert items != stored


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_4_no_sample_is_lost_or_comes_twice(four_workers: Any) -> None:
    for epoch in [*four_workers["first"], *four_workers["other seed"]]:
        assert sorted(x for batch in epoch for x in batch["x"]) == list(range(80))


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_5_the_order_is_the_same_for_the_same_seed(four_workers: Any) -> None:
    first, again, other = (four_workers[name] for name in ("first", "again", "other seed"))
    assert worker_items(first[0]) == worker_items(again[0])
    assert worker_items(first[0]) != worker_items(other[0])
    assert worker_items(first[0]) != worker_items(first[1])


# -- "Checkpoint is automatically saved every 1000 samples" ------------------------------------------------------------


def test_a_checkpoint_is_saved_every_thousand_samples_and_at_the_end(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    loader = ResumableWebDatasetLoader(sets(2300, 1000), checkpoint_path=path, checkpoint_interval=1000)
    saved = {}
    for count, _ in enumerate(loader, start=1):
        saved[count] = json.loads(path.read_bytes()) if path.exists() else None
    assert {count for count in saved if saved[count] is None} == set(range(1, 1000))
    places = {count: (state["shard_idx"], state["sample_offset"]) for count, state in saved.items() if state}
    assert {places[count] for count in range(1000, 2000)} == {(1, 0)}
    assert {places[count] for count in range(2000, 2301)} == {(2, 0)}
    assert json.loads(path.read_bytes())["epoch"] == 1


def test_a_run_that_was_interrupted_goes_on_at_the_last_checkpoint(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = tmp_path / "checkpoint.json", sets(2300, 1000)
    whole = xs(WebDatasetLoader(folder))
    first = ResumableWebDatasetLoader(folder, checkpoint_path=path, checkpoint_interval=1000)
    assert xs(islice(first, 1700)) == whole[:1700]
    second = ResumableWebDatasetLoader(folder, checkpoint_path=path)
    assert xs(second) == whole[1000:]


# -- summaries, collate, errors ----------------------------------------------------------------------------------------


def test_the_summary_has_the_keys_that_the_document_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"spikes": np.zeros((5, 4, 2), np.float32), "behavior": np.zeros((5, 3))}
    written = create_shards_from_arrays(tmp_path, arrays, shard_size=2)
    summary = ShardedDatasetInfo(tmp_path).get_summary()
    promised = {
        "total_samples": 5,
        "total_shards": 3,
        "shard_size": 2,
        "compression": "none",
        "modalities": ["spikes", "behavior"],
    }
    assert promised.items() <= summary.items()
    assert promised.items() <= written.items()
    assert written == json.loads((tmp_path / "dataset_metadata.json").read_bytes())
    ShardedDatasetInfo(tmp_path).print_summary()
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("5 in 3 shards", "spikes", "behavior", "none"))


def test_batches_are_dicts_of_tensors_and_metadata_a_list_of_dicts(sets: Callable[..., Path]) -> None:
    with create_webdataset_dataloader(sets(80, 10), batch_size=32, num_workers=0, shuffle=False) as loader:
        first = next(iter(loader))
    assert list(first) == ["x", "y", "metadata"]
    assert first["x"].tolist() == list(range(32))
    assert tuple(first["y"].shape) == (32, 2)
    assert [about["sample_id"] for about in first["metadata"]] == [f"sample_{i:09d}" for i in range(32)]


def test_collate_stacks_equal_shapes_and_lists_different_ones() -> None:
    samples = [{"x": torch.tensor(i), "r": torch.zeros(i), "metadata": {"n": i}} for i in range(3)]
    batch = collate_webdataset(samples)
    assert batch["x"].tolist() == [0, 1, 2]
    assert [len(value) for value in batch["r"]] == [0, 1, 2]
    assert batch["metadata"] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_folder_without_shards_is_a_value_error_that_says_so(tmp_path: Path) -> None:
    for make in (WebDatasetLoader, create_webdataset_dataloader, ShardedDatasetInfo, ResumableWebDatasetLoader):
        with pytest.raises(ValueError, match="No shards found"):
            make(tmp_path)
        with pytest.raises(ValueError, match="No shards found"):
            make(tmp_path / "nowhere" / "at all")


def test_arrays_of_different_length_are_a_value_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="All arrays must have same first dimension"):
        create_shards_from_arrays(tmp_path, {"x": np.zeros(3), "y": np.zeros(4)})
    assert list(tmp_path.iterdir()) == []


# -- what the origin did wrong: SEEDS 004.4, row by row ----------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_1_every_epoch_of_one_object_delivers_everything(sets: Callable[..., Path], num_workers: int) -> None:
    loader = torch.utils.data.DataLoader(
        WebDatasetLoader(sets(50, 10)),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    for _ in range(3):
        assert sorted(xs(loader)) == list(range(50))


@pytest.mark.parametrize("k", [1, 100, 1000, 1499])
def test_row_2_resuming_a_shuffled_epoch_loses_nothing(sets: Callable[..., Path], k: int) -> None:
    folder = sets(1500, 500)
    loader = WebDatasetLoader(folder, buffer_size=1000)
    samples = iter(loader)
    first = xs(islice(samples, k))
    state = json.loads(json.dumps(loader.get_state()))
    assert (state["shard_idx"], state["sample_offset"]) == divmod(k, 500)
    again = WebDatasetLoader(folder, buffer_size=1000)
    again.set_state(state)
    rest = xs(again)
    assert sorted(first + rest) == list(range(1500))
    assert first + rest == xs(WebDatasetLoader(folder, buffer_size=1000))


def test_row_3_resuming_with_workers_delivers_what_was_left(sets: Callable[..., Path]) -> None:
    def loader(workers: int) -> Any:
        return create_webdataset_dataloader(sets(100, 20), batch_size=10, num_workers=workers)

    with loader(2) as first:
        batches = iter(first)
        seen = batch_xs(islice(batches, 3))
        state = json.loads(json.dumps(first.state_dict()))
    with loader(3) as second:
        second.load_state_dict(state)
        rest = batch_xs(second)
    assert sorted(x for batch in seen + rest for x in batch) == list(range(100))
    assert len(rest) == 7


def test_row_3_the_main_process_does_not_pretend_to_know_what_torchs_workers_delivered(
    sets: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = WebDatasetLoader(sets(50, 10))
    assert len(xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))) == 50
    with pytest.raises(penstock.LoaderError, match="create_webdataset_dataloader"):
        dataset.get_state()
    path = tmp_path / "checkpoint.json"
    resumable = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=5)
    kept = []

    def error_in_workers() -> str:
        loader = iter(torch.utils.data.DataLoader(resumable, batch_size=None, num_workers=2))
        kept.append(loader)  # torch waits ten seconds for workers that raised; isolated() does not
        try:
            return f"delivered {len(list(loader))}"
        except penstock.LoaderError as error:
            return str(error)

    assert "cannot save" in isolated(error_in_workers)
    assert not path.exists()


def test_row_4_every_epoch_has_an_order_of_its_own(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets(50, 10))
    assert len({tuple(xs(loader)) for _ in range(4)}) == 4
    # And it is not the neighbour's: seed 42 in epoch 1 is not seed 43 in epoch 0.
    epochs = {
        (seed, epoch): tuple(xs(made))
        for seed in (42, 43)
        for made in [WebDatasetLoader(sets(50, 10), seed=seed)]
        for epoch in range(2)
    }
    assert len(set(epochs.values())) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_5_without_shuffle_samples_come_in_storage_order(sets: Callable[..., Path], num_workers: int) -> None:
    assert xs(WebDatasetLoader(sets(100, 20), shuffle=False)) == list(range(100))
    with create_webdataset_dataloader(sets(100, 20), num_workers=num_workers, shuffle=False) as loader:
        for _ in range(2):
            assert [x for batch in batch_xs(loader) for x in batch] == list(range(100))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_row_6_a_pickle_in_a_shard_does_not_run(tmp_path: Path) -> None:
    from penstock.shard.foreign import index_archives

    payload, trace = pickle.dumps(Bomb(tmp_path / "ran")), tmp_path / "ran"
    folder = tmp_path / "set"
    folder.mkdir()
    with tarfile.open(folder / "shard_000000.tar", "w") as tar:
        member = tarfile.TarInfo("sample_000000000.x.pyd")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    assert index_archives(folder)[1] == []
    with pytest.raises(DamageError, match=r"item 0 in shard_000000\.tar.*Path.*allow_pickle=True"):
        list(WebDatasetLoader(folder))
    assert not trace.exists()
    list(WebDatasetLoader(folder, allow_pickle=True))
    assert trace.exists()


def test_row_6_nothing_is_written_as_a_pickle_unless_asked_for(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({"n": 3, "f": 0.5, "b": True, "a": np.zeros(2), "t": torch.zeros(2), "s": "text", "l": [1]})
    assert not [name for name in members(tmp_path / "shard_000000.tar") if name.endswith((".pyd", ".pkl"))]


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_row_7_a_row_of_a_tensor_does_not_drag_its_storage_along(tmp_path: Path, array_format: str) -> None:
    rows = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    with WebDatasetWriter(tmp_path, array_format=array_format) as writer:
        writer.write_sample({"row": rows[500], "of_array": rows.numpy()[500]})
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        sizes = {member.name: member.size for member in tar}
    assert sizes[f"sample_000000000.row.{array_format}"] < 400 + 300
    assert sizes[f"sample_000000000.of_array.{array_format}"] < 400 + 300
    (sample,) = WebDatasetLoader(tmp_path)
    assert sample["row"].tolist() == sample["of_array"].tolist() == rows[500].tolist()


def test_row_8_a_second_writer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as first:
        first.write_sample({"x": np.int64(1)})
        with pytest.raises(WriteError, match="Another writer"):
            WebDatasetWriter(tmp_path)
        first.write_sample({"x": np.int64(2)})
    assert xs(WebDatasetLoader(tmp_path, shuffle=False)) == [1, 2]


@pytest.mark.filterwarnings("ignore:The data set of .* is replaced")
def test_row_10_rewriting_leaves_no_stale_shard(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.arange(100)}, shard_size=10)
    create_shards_from_arrays(tmp_path, {"x": np.arange(20)}, shard_size=10)
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["shard_000000.tar", "shard_000001.tar"]
    assert len(WebDatasetLoader(tmp_path)) == ShardedDatasetInfo(tmp_path).get_summary()["total_samples"] == 20
    assert sorted(xs(WebDatasetLoader(tmp_path))) == list(range(20))


def test_row_10_a_writer_that_fails_leaves_no_data_set_that_looks_whole(tmp_path: Path) -> None:
    def fail() -> None:
        with WebDatasetWriter(tmp_path, shard_size=2) as writer:
            for i in range(5):
                writer.write_sample({"x": np.int64(i)})
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fail()
    with pytest.raises(ValueError, match="resume=True"):
        WebDatasetLoader(tmp_path)


def test_row_11_ids_with_dots_and_slashes_stay_apart(tmp_path: Path) -> None:
    ids = ["sub-01.ses-1", "sub-01.ses-2", "sub-01/ses-1", "sub-01%2Eses-1", "ünit"]
    with WebDatasetWriter(tmp_path) as writer:
        for number, name in enumerate(ids):
            writer.write_sample({"x": np.int64(number)}, sample_id=name)
    found = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert xs(found) == [0, 1, 2, 3, 4]
    assert [sample["metadata"]["sample_id"] for sample in found] == ids


@pytest.mark.parametrize("name", ["metadata", "a/b", "", "a\\b", ".hidden"])
def test_row_11_a_field_that_would_collide_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="field"), WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({name: np.zeros(2)})


def bytes_read() -> int:
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


def test_row_12_one_sample_does_not_read_the_whole_shard(tmp_path: Path) -> None:
    create_shards_from_arrays(
        tmp_path, {"x": np.arange(200), "big": np.zeros((200, 10_000), np.float32)}, shard_size=200
    )
    loader = WebDatasetLoader(tmp_path)
    samples = iter(loader)
    before = bytes_read()
    next(samples)
    assert bytes_read() - before < 4_000_000  # of 8 MB; some neighbours may be read ahead
    loader.close()


@pytest.mark.parametrize(
    ("n", "batch_size", "num_workers", "drop_last"),
    [(100, 16, 2, False), (70, 32, 4, False), (70, 32, 0, True), (33, 1, 2, False)],
)
def test_row_13_lengths_are_exact(
    sets: Callable[..., Path], n: int, batch_size: int, num_workers: int, drop_last: bool
) -> None:
    folder = sets(n, 15)
    with create_webdataset_dataloader(
        folder, batch_size=batch_size, num_workers=num_workers, drop_last=drop_last
    ) as loader:
        for _ in range(2):
            assert len(loader) == len(list(loader)) == (n // batch_size if drop_last else -(-n // batch_size))
    dataset = WebDatasetLoader(folder)
    assert len(dataset) == len(list(dataset)) == n


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_14_ranks_share_the_samples(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    ranks = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        with create_webdataset_dataloader(sets(80, 10), batch_size=5, num_workers=num_workers) as loader:
            ranks.append(batch_xs(loader))
    assert [len(batches) for batches in ranks] == [4] * 4
    assert sorted(x for batches in ranks for batch in batches for x in batch) == list(range(80))


@pytest.mark.filterwarnings(MORE_WORKERS)
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_row_14_more_workers_than_shards_are_no_matter(sets: Callable[..., Path], compression: str) -> None:
    folder = sets(20, 10, compression=compression)
    with create_webdataset_dataloader(folder, batch_size=3, num_workers=4) as loader:
        assert sorted(x for batch in batch_xs(loader) for x in batch) == list(range(20))
    torchs = torch.utils.data.DataLoader(WebDatasetLoader(folder), batch_size=None, num_workers=4)
    for _ in range(2):
        assert sorted(xs(torchs)) == list(range(20))


def test_row_15_a_modality_that_one_sample_lacks_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"Sample 1 .* differ in \['b'\]"):
        collate_webdataset([{"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2)}])


def test_row_15_a_modality_that_one_sample_lacks_is_not_written(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({"a": np.zeros(2), "b": np.zeros(2)})
        with pytest.raises(OptionError, match=r"lacks \['b'\]"):
            writer.write_sample({"a": np.zeros(2)})


def test_row_15_strings_are_lists_and_fields_keep_their_order() -> None:
    samples = [{"z": "left", "a": 1, "m": None}, {"z": "right", "a": 2, "m": None}]
    batch = collate_webdataset(samples)
    assert list(batch) == ["z", "a", "m"]
    assert (batch["z"], batch["a"].tolist(), batch["m"]) == (["left", "right"], [1, 2], [None, None])


def test_row_16_a_saved_sample_is_one_that_was_handed_out(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = tmp_path / "checkpoint.json", sets(50, 10)
    whole = xs(WebDatasetLoader(folder))
    loader = ResumableWebDatasetLoader(folder, checkpoint_path=path, checkpoint_interval=10)
    samples = iter(loader)
    seen = xs(islice(samples, 10))
    # The tenth sample was handed out, the eleventh was not asked for.
    assert path.exists()
    assert xs(ResumableWebDatasetLoader(folder, checkpoint_path=path)) == whole[10:]
    assert seen == whole[:10]


def test_row_16_a_checkpoint_says_whose_it_is(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    loader = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=7)
    list(islice(loader, 7))
    saved = json.loads(path.read_bytes())
    assert {"version", "epoch", "batch", "plan"} <= set(saved)
    assert saved["plan"]["seed"] == 42
    with pytest.raises(ResumeError, match="seed changed from 42 to 7"):
        ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, seed=7)
    with pytest.raises(ResumeError, match="data"):
        ResumableWebDatasetLoader(sets(50, 25), checkpoint_path=path)


def test_row_16_after_a_finished_run_a_new_one_is_whole(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    for _ in range(2):
        loader = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=7)
        assert sorted(xs(loader)) == list(range(50))


def test_row_17_the_manifest_does_not_grow_with_the_samples_and_can_be_moved(tmp_path: Path) -> None:
    about = {"subject": "mouse 7", "note": "n" * 1000}
    sizes = []
    for n in (10, 400):
        folder = tmp_path / str(n)
        create_shards_from_arrays(folder, {"x": np.arange(n)}, shard_size=n, metadata=about)
        sizes.append((folder / "dataset_metadata.json").stat().st_size)
        assert str(tmp_path) not in (folder / "dataset_metadata.json").read_text()
        assert "subject" not in next(iter(WebDatasetLoader(folder)))["metadata"]
        assert ShardedDatasetInfo(folder).get_summary()["metadata"] == about
    assert sizes[1] - sizes[0] < 50
    (tmp_path / "400").rename(tmp_path / "moved")
    assert sorted(xs(WebDatasetLoader(tmp_path / "moved"))) == list(range(400))


def test_row_18_pinning_on_a_machine_without_a_gpu_is_silent(
    sets: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), create_webdataset_dataloader(sets(50, 10), pin_memory=True) as loader:
        assert len(batch_xs(loader)) == 2
    assert caplog.records == []


def test_row_18_max_workers_are_threads_that_read_ahead(sets: Callable[..., Path]) -> None:
    alone, ahead = WebDatasetLoader(sets(50, 10)), WebDatasetLoader(sets(50, 10), max_workers=2)
    before = len(own_threads())
    samples = iter(alone)
    next(samples)
    assert len(own_threads()) == before
    samples = iter(ahead)
    next(samples)
    assert len(own_threads()) >= before + 2
    samples.close()
    assert xs(alone) == xs(ahead)  # the second epoch of both
    alone.close()
    ahead.close()


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
