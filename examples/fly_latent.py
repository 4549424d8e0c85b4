"""Train a small model of latent dynamics on chunks of a simulation: `python examples/fly_latent.py --help`.

Generates a recording of neurons that excite and inhibit each other, driven by a stimulus, in the file layout of the
fly's visual system. Then trains on it: random chunks are read in the background, many batches are sampled from each,
and validation data stays in memory. It needs `pip install 'penstock[zarr]'`, and half a minute on a CPU.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from penstock.recipes import streams

INPUTS = 8  # neurons that each one receives input from


def connectivity(neurons: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the connections and their weights in CSR form: columns, row pointers, weights."""
    rng = np.random.default_rng(seed)
    columns = np.sort(rng.permuted(np.tile(np.arange(neurons), (neurons, 1)), axis=1)[:, :INPUTS], axis=1)
    weights = rng.normal(0, 0.9 / INPUTS**0.5, columns.shape)
    return columns.ravel(), np.arange(neurons + 1) * columns.shape[1], weights.ravel()


def generate(folder: Path, chosen: argparse.Namespace) -> None:
    """Write a simulation, stretch after stretch."""
    rng = np.random.default_rng(chosen.seed)
    neurons, n_stim = chosen.neurons, chosen.stimuli
    columns, pointers, weights = connectivity(neurons, chosen.seed)
    matrix = np.zeros((neurons, neurons))
    matrix[np.repeat(np.arange(neurons), np.diff(pointers)), columns] = weights
    metadata = np.zeros((neurons, 5))
    metadata[:, 0], metadata[:, 4] = np.arange(neurons), np.arange(neurons) % 4
    metadata[:, 1:3] = rng.random((neurons, 2))
    voltage, light = np.zeros(neurons), np.zeros(n_stim)
    with streams.SimulationWriter(folder, metadata, chosen.timesteps) as writer:
        for begin in range(0, chosen.timesteps, 2000):
            frames = np.zeros((min(2000, chosen.timesteps - begin), neurons, 4), np.float32)
            for frame in frames:
                frame[:, 0], frame[:n_stim, 1] = voltage, light
                drive = matrix @ np.tanh(voltage)
                drive[:n_stim] += light
                voltage = voltage + 0.2 * (drive - voltage)
                light = 0.95 * light + 0.3 * rng.standard_normal(n_stim)
            writer.append(frames)


class LatentDynamics(torch.nn.Module):
    """Encode voltages into a latent state, advance it step by step under the stimulus, and decode it."""

    def __init__(self, neurons: int, stimuli: int, latent: int = 32) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(neurons, latent)
        self.move = torch.nn.Sequential(
            torch.nn.Linear(latent + stimuli, 64), torch.nn.Tanh(), torch.nn.Linear(64, latent)
        )
        self.decode = torch.nn.Linear(latent, neurons)

    def forward(self, voltage: torch.Tensor, stimulus: torch.Tensor) -> torch.Tensor:
        """Return the voltages after as many steps as there are stimuli: (steps, batch, stimuli)."""
        state = self.encode(voltage)
        for frame in stimulus:
            state = state + self.move(torch.cat([state, frame], dim=-1))
        return self.decode(state)


def prediction_error(
    model: LatentDynamics, data: torch.Tensor, stim: torch.Tensor, first: torch.Tensor, steps: int
) -> torch.Tensor:
    """Return how wrong the model is, `steps` after the frames `first`."""
    stimulus = torch.stack([stim[first + step] for step in range(steps)])
    return functional.mse_loss(model(data[first], stimulus), data[first + steps])


def connected_error(
    model: LatentDynamics, data: torch.Tensor, stim: torch.Tensor, batch: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the error for some neurons after one step, if the model sees only their inputs."""
    first, selected, needed = batch
    seen = torch.zeros(data.shape[1], device=data.device)
    seen[needed] = 1
    found = model(data[first] * seen, stim[first][None])
    return functional.mse_loss(found[:, selected], data[first + 1][:, selected])


def train(folder: Path, chosen: argparse.Namespace) -> list[float]:
    """Train; return the validation error before, and after each epoch."""
    device, steps = torch.device(chosen.device), chosen.steps
    voltage, stimulus = streams.FlyVisSim.VOLTAGE, streams.FlyVisSim.STIMULUS
    border = chosen.timesteps * 9 // 10
    split = streams.DataSplit(train_start=0, train_end=border, validation_start=border, validation_end=chosen.timesteps)
    part = (split.validation_start, split.validation_end)
    val_data = torch.from_numpy(streams.load_column_slice(folder, voltage, *part)).to(device)
    val_stim = torch.from_numpy(streams.load_column_slice(folder, stimulus, *part, neuron_limit=chosen.stimuli)).to(
        device
    )
    val_frames = torch.arange(0, len(val_data) - steps, 3, device=device)
    columns, pointers, _ = connectivity(chosen.neurons, chosen.seed)
    wmat_indices, wmat_indptr = torch.from_numpy(columns).to(device), torch.from_numpy(pointers).to(device)

    torch.manual_seed(chosen.seed)
    model = LatentDynamics(chosen.neurons, chosen.stimuli).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    profiler, latency = streams.PipelineProfiler(), streams.ChunkLatencyStats()
    profiler.start()
    total = split.train_end - split.train_start
    chunks_per_epoch, batches_per_chunk, batches_per_epoch = streams.calculate_chunk_params(
        total, chosen.chunk_size, chosen.batch_size, data_passes_per_epoch=1
    )
    print(f"{chunks_per_epoch} chunks of {batches_per_chunk} batches: {batches_per_epoch} batches in an epoch")

    def validated() -> float:
        with torch.no_grad():
            return float(prediction_error(model, val_data, val_stim, val_frames, steps))

    errors = [validated()]
    with streams.RandomChunkLoader(
        streams.create_zarr_loader(folder, voltage, stimulus, chosen.stimuli),
        total,
        chosen.chunk_size,
        device,
        prefetch=2,
        seed=chosen.seed,
        profiler=profiler,
    ) as loader:
        print(f"Memory: {loader.memory_estimate()}")
        for epoch in range(chosen.epochs):
            loader.start_epoch(chunks_per_epoch)
            for _ in range(chunks_per_epoch):
                began = time.perf_counter()
                chunk_data, chunk_stim = loader.get_next_chunk()
                latency.record_chunk_get(time.perf_counter() - began)
                with profiler.event("train"):
                    for number in range(batches_per_chunk):
                        batch = streams.sample_batch_within_chunk(
                            chunk_data, chunk_stim, wmat_indices, wmat_indptr, chosen.batch_size, steps, 4
                        )
                        times = [time.perf_counter()]
                        loss = prediction_error(model, chunk_data, chunk_stim, batch[0], steps)
                        loss = loss + 0.1 * connected_error(model, chunk_data, chunk_stim, batch)
                        times.append(time.perf_counter())
                        optimizer.zero_grad()
                        loss.backward()
                        times.append(time.perf_counter())
                        optimizer.step()
                        times.append(time.perf_counter())
                        if number % 10 == 0:
                            latency.record_batch_times(*np.diff(times).tolist())
            errors.append(validated())
            print(f"epoch {epoch}: validation error {errors[-1]:.4f}, at first {errors[0]:.4f}")
        print(f"Waiting for chunks: {100 * loader.get_stats()['wait_fraction']:.1f} % of the time")
    latency.print_summary()
    if chosen.trace:
        profiler.save(chosen.trace)
        print(f"Open {chosen.trace} at https://ui.perfetto.dev")
    return errors


def main(arguments: list[str] | None = None) -> list[float]:
    """Generate and train; return the validation errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the simulation is, or is written (default: a temporary one)")
    parser.add_argument("--neurons", type=int, default=200)
    parser.add_argument("--stimuli", type=int, default=20, help="neurons that the stimulus drives, the first ones")
    parser.add_argument("--timesteps", type=int, default=60_000)
    parser.add_argument("--chunk-size", type=int, default=8192, help="time steps that are in memory at once")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="steps to predict")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trace", type=Path, help="write a trace for Perfetto here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary) / "simulation"
        if not folder.exists():
            generate(folder, chosen)
        return train(folder, chosen)


if __name__ == "__main__":
    main()
