"""The training task of the demo: a decoder from spikes to movement."""

import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.seeds import generator_for
from penstock.demo.task import BINS, FIELDS, QUICK, Scale, Task, digest, source_and_plan
from penstock.feed.loader import Loader
from penstock.files.durable import write_aside
from penstock.files.regular import open_list, read_regular
from penstock.observe.timing import Timings
from penstock.observe.watcher import watch
from penstock.plan.orders import Sequential
from penstock.plan.plan import Plan
from penstock.run.options import RunOptions
from penstock.source.tar.source import TarSource
from penstock.transform.moments import Moments
from penstock.transform.standardize import Standardize

__all__ = ["prepare", "train"]

_SHUFFLINGS = 100

_Floats = NDArray[np.float64]
_Batch = dict[str, torch.Tensor]


class _Decoder(torch.nn.Module):
    """A causal decoder from spikes to standardized movement, bin by bin."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self._memory = torch.nn.GRU(scale.units, scale.hidden, batch_first=True)
        self._read_out = torch.nn.Linear(scale.hidden, 2)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        # spikes: (batch, bins, units)
        states, _ = self._memory(spikes)
        found: torch.Tensor = self._read_out(states)
        return found


class _Training:
    """Model, optimizer and loader: the content of a checkpoint."""

    def __init__(self, task: Task, loader: Loader, movement: Moments) -> None:
        self._task = task
        self.model, self._optimizer = _make_model(task.scale, task.seed)
        self._movement = movement
        self._parts: dict[str, Any] = {"model": self.model, "optimizer": self._optimizer, "loader": loader}
        self.step = 0
        if task.resume:
            saved = torch.load(io.BytesIO(read_regular(replace(task, name=task.resume).path("checkpoint.pt"))))
            self.step = saved["step"]
            for name, part in self._parts.items():
                part.load_state_dict(saved[name])

    def learn(self, batch: _Batch, log: io.RawIOBase) -> float:
        """Run a step, log it, and save a checkpoint every `checkpoint_steps` steps."""
        target = standardize(batch["behavior"], self._movement)
        loss = _train_step(self.model, self._optimizer, batch["spikes"], target)
        items = [digest(row) for row in batch["behavior"].numpy()]  # identifies the windows by their content
        line = {"step": self.step, "items": items, "loss": loss.hex()}
        # One unbuffered write: after a kill, the log ends with the last completed step.
        log.write(json.dumps(line).encode() + b"\n")
        self.step += 1
        if self.step % self._task.scale.checkpoint_steps == 0:
            self._save()
        return loss

    def _save(self) -> None:
        """Write aside, sync, rename: whenever a kill comes, the file is a complete checkpoint."""
        content = io.BytesIO()
        torch.save({"step": self.step, **{name: part.state_dict() for name, part in self._parts.items()}}, content)
        write_aside(self._task.path("checkpoint.pt"), content.getvalue())


def prepare() -> None:
    """Let torch import what it imports at the first step."""
    torch.set_num_threads(1)  # a fixed order of summation: the same items give the same bits
    _warm_up(QUICK)


def train(task: Task) -> None:
    """Train to the end or until killed; write a log of all steps, checkpoints, and at the end a report."""
    _warm_up(task.scale)
    before_bytes = peak_bytes = _private_bytes()
    source, plan = source_and_plan(task)
    spikes, movement = (read_moments(source, name) for name in FIELDS)
    # Threads, so that all memory belongs to this process and can be measured.
    options, timings = RunOptions("threads", memory_bytes=task.scale.memory_bytes), Timings()
    with (
        Loader(
            source,
            plan,
            transform=Standardize(spikes, field="spikes"),
            num_workers=task.workers,
            options=options,
            observer=timings,
        ) as loader,
        watch(loader, show=False) as watched,
        io.FileIO(open_list(task.path("steps")), "ab") as log,
    ):
        training = _Training(task, loader, movement)
        while loader.epoch < task.scale.epochs:
            for batch in watched:
                watched.record(loss=training.learn(batch, log))
                if training.step % 10 == 0:
                    peak_bytes = max(peak_bytes, _private_bytes())
                if training.step == task.hold_at:
                    _wait_to_be_killed()
    watched.save(task.path("run.json"))
    report = {
        "watched": watched.to_dict(),
        "private_bytes": peak_bytes - before_bytes,
        "order_hashes": [plan.order_hash(epoch) for epoch in range(task.scale.epochs)],
        "subjects": _score_subjects(task, training.model, spikes, movement),
    }
    weights = torch.nn.utils.parameters_to_vector(training.model.parameters())
    content = io.BytesIO()
    np.save(content, weights.detach().numpy())
    write_aside(task.path("weights.npy"), content.getvalue(), lasting=False)
    task.write_report(report)


def read_moments(source: TarSource, field: str) -> Moments:
    """Return mean and standard deviation of a field over the training split, as stored by the conversion."""
    return Moments.from_json(source.manifest.metadata["statistics"]["fields"][field])


def standardize(values: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Standardize values by the training split."""
    mean, std = (torch.from_numpy(numbers).to(values.dtype) for numbers in (moments.mean, moments.std))
    return (values - mean) / std


def _make_model(scale: Scale, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Decoder(scale)
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


def _train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, spikes: torch.Tensor, target: torch.Tensor
) -> float:
    loss = torch.nn.functional.mse_loss(model(spikes), target)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()
    return float(loss.detach())


def _warm_up(scale: Scale) -> None:
    """Run and discard a step and a save: what torch allocates at the first ones is not the loader's memory."""
    model, optimizer = _make_model(scale, seed=0)
    _train_step(
        model, optimizer, torch.zeros(scale.batch_size, BINS, scale.units), torch.zeros(scale.batch_size, BINS, 2)
    )
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def _private_bytes() -> int:
    """Return the private memory of this process (RssAnon); 0 if unknown."""
    status = Path("/proc/self/status")
    lines = read_regular(status).decode().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _wait_to_be_killed() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    sys.exit("The parent process has ended without killing this one.")


@torch.no_grad()
def _score_subjects(
    task: Task, model: torch.nn.Module, spikes: Moments, movement: Moments
) -> dict[str, dict[str, float]]:
    """Return the R² of each held-out subject, and of chance."""
    source = TarSource(task.shards("test"), fields=FIELDS)
    plan = Plan(source.index, Sequential(), batch_size=256, tail="short")
    found, true = [], []
    with Loader(source, plan, transform=Standardize(spikes, field="spikes")) as loader:
        for batch in loader:
            found.append(model(batch["spikes"]).numpy())
            true.append(standardize(batch["behavior"], movement).numpy())
    predicted, moved = (np.concatenate(parts).astype(np.float64) for parts in (found, true))
    # Windows are in the order of the recordings, so that the manifest gives the subject of each.
    inputs = source.manifest.metadata["conversion"]["inputs"]
    subjects = np.repeat([entry["groups"]["subject"] for entry in inputs], [entry["samples"] for entry in inputs])
    return {
        str(subject): _scores(predicted[subjects == subject], moved[subjects == subject], task.seed)
        for subject in np.unique(subjects)
    }


def _scores(predicted: _Floats, moved: _Floats, seed: int) -> dict[str, float]:
    """Return R² of the decoder, of predicting the mean, and of shuffled predictions.

    The mean of the training split is 0 here. Shuffled: the best of many pairings of predictions with other windows.
    """
    rng = generator_for(seed, "demo", "chance")
    shuffled = max(r2_score(predicted[rng.permutation(len(predicted))], moved) for _ in range(_SHUFFLINGS))
    return {"r2": r2_score(predicted, moved), "mean": r2_score(np.zeros_like(moved), moved), "shuffled": shuffled}


def r2_score(predicted: _Floats, moved: _Floats) -> float:
    """Return R²: 1 is perfect, 0 is as good as the mean of these windows. Windows, bins and axes have equal weight."""
    spread = ((moved - moved.mean(axis=(0, 1))) ** 2).sum()
    return float(1 - ((moved - predicted) ** 2).sum() / spread)
