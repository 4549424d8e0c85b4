"""Seed 000's document: every snippet of it runs with only its imports changed, and every statement of it is true.

The document lies in `seeds/`, verbatim; its code blocks are cut out of it when the tests run, in one namespace, one
after the other. What the document takes for granted (a model, its loss, a configuration) is small here, but real.
"""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import own_threads

import penstock
from penstock import (
    DataSplit,
    FlyVisSim,
    NeuronData,
    RandomChunkLoader,
    calculate_chunk_params,
    load_column_slice,
    load_metadata,
)
from penstock.recipes.streams import SimulationWriter
from tests.contracts.documents import Reading, code_blocks, document

DOCUMENT = document("000")
TEXT = DOCUMENT.read_text()
BLOCKS = code_blocks(DOCUMENT)

TIME, NEURONS, STIM = 3000, 12, 5
SPLIT = DataSplit(train_start=200, train_end=2600, validation_start=2600, validation_end=3000)
EPOCHS, PASSES, BATCH = 2, 3, 256
CHUNKS, PER_CHUNK = 3, 9  # 2400 steps are less than a chunk of 65 536: one chunk a pass, 2400 // 256 batches in each
DEVICE = torch.device("cpu")


# -- what the document takes for granted -------------------------------------------------------------------------------


def simulated() -> np.ndarray:
    """Return (time, neurons, 4): leaky neurons that a stimulus drives, so that there is something to learn."""
    rng = np.random.default_rng(0)
    frames = np.zeros((TIME, NEURONS, 4), np.float32)
    frames[..., 1] = rng.standard_normal((TIME, NEURONS))
    for step in range(1, TIME):
        frames[step, :, 0] = 0.9 * frames[step - 1, :, 0] + 0.1 * frames[step - 1, :, 1]
    frames[..., 2:] = 7
    return frames


class LossComponents:
    """Adds up what a training step gives."""

    made: list["LossComponents"]

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.made.append(self)  # one for each epoch

    def accumulate(self, *losses: torch.Tensor) -> None:
        self.total += float(losses[0].detach())
        self.count += 1


class Latent(torch.nn.Module):
    """The next voltage, from this one and the stimulus."""

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.nn.Linear(NEURONS + STIM, NEURONS)

    def forward(self, voltage: torch.Tensor, stimulus: torch.Tensor) -> torch.Tensor:
        return voltage + self.step(torch.cat([voltage, stimulus], dim=-1))


def train_step_fn(  # noqa: PLR0917  # the document calls it so
    model: Latent,
    data: torch.Tensor,
    stim: torch.Tensor,
    batch: torch.Tensor,
    selected: torch.Tensor,
    needed: torch.Tensor,
    cfg: Any,
) -> tuple[torch.Tensor, ...]:
    """Go on from each first frame for all steps, with data inside the chunk only."""
    steps = cfg.training.time_units * cfg.training.evolve_multiple_steps
    assert set(selected.tolist()) <= set(needed.tolist())
    voltage = data[batch]
    for step in range(steps):
        voltage = model(voltage, stim[batch + step])
    loss = torch.nn.functional.mse_loss(voltage, data[batch + steps])
    return loss, loss.detach()


def load_dataset(simulation_config: str, column_to_model: str, data_split: DataSplit, num_input_dims: int, device: Any):
    """Return everything, in memory: how it was before."""
    path = f"graphs_data/fly/{simulation_config}/x_list_0"
    parts = [(data_split.train_start, data_split.train_end), (data_split.validation_start, data_split.validation_end)]
    column = FlyVisSim[column_to_model].value
    data = [torch.from_numpy(load_column_slice(path, column, *part)).to(device) for part in parts]
    stim = [torch.from_numpy(load_column_slice(path, 4, *part, neuron_limit=num_input_dims)) for part in parts]
    return (*data, *stim, NeuronData.from_metadata(load_metadata(path)))


def make_batches_random(data: Any, stim: Any, indices: Any, indptr: Any, cfg: Any) -> Iterator[Any]:
    while True:
        yield penstock.sample_batch_within_chunk(
            data, stim, indices, indptr, cfg.training.batch_size, 4, cfg.training.unconnected_to_zero.num_neurons
        )


def configuration() -> SimpleNamespace:
    training = SimpleNamespace(
        simulation_config="tiny",
        column_to_model="VOLTAGE",
        data_split=SPLIT,
        seed=42,
        time_units=2,
        evolve_multiple_steps=2,
        batch_size=BATCH,
        data_passes_per_epoch=PASSES,
        epochs=EPOCHS,
        grad_clip_max_norm=1.0,
        unconnected_to_zero=SimpleNamespace(num_neurons=3),
    )
    return SimpleNamespace(training=training, stimulus_encoder_params=SimpleNamespace(num_input_dims=STIM))


# -- the snippets ------------------------------------------------------------------------------------------------------


def with_our_imports(block: str) -> str:
    """Return a snippet with nothing but its import lines changed."""
    return re.sub(r"^from LatentEvolution\.\w+ import", "from penstock import", block, flags=re.MULTILINE)


def begun(folder: Path) -> Reading:
    """Return a reader before the first snippet, with what the document takes for granted."""
    path = folder / "graphs_data" / "fly" / "tiny" / "x_list_0"
    metadata = np.stack([np.arange(NEURONS)] * 4 + [np.arange(NEURONS) % 3], axis=1)
    with SimulationWriter(path, metadata, TIME) as writer:
        writer.append(simulated())
    torch.manual_seed(0)
    model = Latent()
    names = {
        **{name: getattr(penstock, name) for name in ("FlyVisSim", "load_column_slice", "load_metadata")},
        "NeuronData": NeuronData,
        "torch": torch,
        "time": time,
        "datetime": datetime,
        "device": DEVICE,
        "cfg": configuration(),
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
        "train_step_fn": train_step_fn,
        "LossComponents": type("LossComponents", (LossComponents,), {"made": []}),
        "load_dataset": load_dataset,
        "make_batches_random": make_batches_random,
        "wmat_indices": torch.arange(NEURONS).roll(1),  # each neuron listens to the one before it
        "wmat_indptr": torch.arange(NEURONS + 1),
    }
    return Reading(DOCUMENT.name, [with_our_imports(block) for block in BLOCKS], folder, names)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    reading = begun(tmp_path_factory.mktemp("document"))
    yield reading
    if "chunk_loader" in reading.names:
        reading.names["chunk_loader"].cleanup()


def title(number: int) -> str:
    """Return the heading above a block, and whether it is the old way or the new one."""
    before = TEXT.split("```python\n")[number]
    heading = re.findall(r"^#{2,} (.*)$", "\n".join(TEXT.split("```python\n")[: number + 1]), re.MULTILINE)[-1]
    way = re.findall(r"^\*\*(Before|After):\*\*$", before, re.MULTILINE)
    return f"{heading}, {way[-1]}" if way else heading


TITLES = [
    "1. Import New Modules",
    "2. Replace `load_dataset()` Function, Before",
    "2. Replace `load_dataset()` Function, After",
    "3. Calculate Chunk Parameters",
    "4. Modify Training Loop, Before",
    "4. Modify Training Loop, After",
    "5. Cleanup",
]
LOADERS, PARAMETERS, LOOP, CLEANUP = 2, 3, 5, 6


def test_the_document_has_the_snippets_that_these_tests_know() -> None:
    assert [title(number) for number in range(len(BLOCKS))] == TITLES


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=title)
def test_every_snippet_runs_with_only_its_imports_changed(
    reading: Reading, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reading.run(number)


def test_only_import_lines_are_changed() -> None:
    for block in BLOCKS:
        pairs = list(zip(block.splitlines(), with_our_imports(block).splitlines(), strict=True))
        assert all(old == new or (old.startswith("from ") and new.startswith("from penstock ")) for old, new in pairs)


# -- what the snippets give --------------------------------------------------------------------------------------------


def test_validation_data_is_resident_and_what_was_written(reading: Reading) -> None:
    names = reading.run(LOADERS)
    written = simulated()[SPLIT.validation_start : SPLIT.validation_end]
    assert np.array_equal(names["val_data"], written[..., 0])
    assert np.array_equal(names["val_stim"], written[:, :STIM, 1])
    assert names["val_data"].device == DEVICE
    assert [len(indices) for indices in names["neuron_data"].indices_per_type] == [4, 4, 4]


def test_the_parameters_are_those_that_the_loop_runs(reading: Reading, capsys: pytest.CaptureFixture[str]) -> None:
    names = reading.run(PARAMETERS)
    found = [names[name] for name in ("chunks_per_epoch", "batches_per_chunk", "batches_per_epoch")]
    assert found == [CHUNKS, PER_CHUNK, CHUNKS * PER_CHUNK]


def test_the_loop_trains_on_all_batches_of_all_chunks_of_all_epochs(reading: Reading) -> None:
    names = reading.run(LOOP)
    assert (names["epoch"], names["chunk_idx"], names["batch_in_chunk"]) == (EPOCHS - 1, CHUNKS - 1, PER_CHUNK - 1)
    assert names["losses"].count == CHUNKS * PER_CHUNK
    first, last = names["LossComponents"].made
    assert last.total < 0.9 * first.total
    assert names["chunk_loader"].get_stats()["chunks_transferred"] == CHUNKS


def test_a_chunk_lies_on_the_device_and_holds_the_training_split(reading: Reading) -> None:
    names = reading.run(LOOP)
    written = simulated()[SPLIT.train_start : SPLIT.train_end]
    assert names["chunk_data"].device == names["chunk_stim"].device == DEVICE
    assert np.array_equal(names["chunk_data"], written[..., 0])
    assert np.array_equal(names["chunk_stim"], written[:, :STIM, 1])


def test_a_batch_lies_within_its_chunk(reading: Reading) -> None:
    names = reading.run(LOOP)
    assert names["batch_indices"].shape == (BATCH,)
    assert 0 <= names["batch_indices"].min() <= names["batch_indices"].max() < 2400 - names["total_steps"]
    selected = names["selected_neurons"].tolist()
    assert names["needed_indices"].tolist() == sorted({n for i in selected for n in (i, (i - 1) % NEURONS)})


def test_the_summary_has_every_metric_that_the_document_names(reading: Reading) -> None:
    summary = reading.run(LOOP)["latency_stats"].get_summary()
    named = set(re.findall(r"^- `(\w+_ms)`", TEXT, re.MULTILINE))
    assert named == {"chunk_get_mean_ms", "chunk_get_max_ms", "batch_forward_mean_ms"}
    assert named <= set(summary)
    assert summary["num_chunks"] == EPOCHS * CHUNKS
    assert summary["num_batches_sampled"] == EPOCHS * CHUNKS  # every tenth of nine batches
    assert 0 < summary["chunk_get_min_ms"] <= summary["chunk_get_mean_ms"] <= summary["chunk_get_max_ms"]


def test_cleanup_leaves_no_thread(reading: Reading) -> None:
    names = reading.run(CLEANUP)
    assert own_threads() == []
    names["chunk_loader"].cleanup()


def test_the_same_document_read_again_gives_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for seed in (1, 2):
        again = begun(tmp_path / str(seed))
        torch.manual_seed(seed)  # the model is there already; batches do not depend on it
        for number in (0, LOADERS, PARAMETERS, LOOP, CLEANUP):  # the old way draws from torch's own generator
            again.done = number
            again.run(number)
        weights.append(again.names["model"].state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# -- its numbers -------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_document() -> None:
    assert "Your case: 65536 / 256 = 256 batches per chunk" in TEXT
    chunks, per_chunk, per_epoch = calculate_chunk_params(967_680, 65_536, 256, 1)
    assert (chunks, per_chunk, per_epoch) == (14, 256, 3584)


def test_the_memory_of_the_document() -> None:
    def row(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((end - start, 13_741), np.float32), np.zeros((end - start, 1_736), np.float32)

    estimate = RandomChunkLoader(row, 967_680, 65_536, DEVICE, prefetch=2).memory_estimate()
    # "Current chunk: 3.6 GB" is the data alone; with the stimulus it is 4.06 (decimal) GB.
    assert estimate.batch_bytes / 1e9 == pytest.approx(3.60 + 0.46, abs=0.01)
    assert estimate.host_bytes < 0.3 * 60e9
