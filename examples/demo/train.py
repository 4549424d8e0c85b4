"""The processes that the demo starts: each runs one job and leaves files."""

import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from examples.demo.settings import ALL_FIELDS, BINS, FIELDS, Settings, digest
from penstock import (
    DamageError,
    Loader,
    Plan,
    RunOptions,
    Sequential,
    TarSource,
    Timings,
    generator_for,
    watch,
    write_report,
)
from penstock.transform import Moments, Standardize

_SHUFFLINGS = 100


class _Decoder(torch.nn.Module):
    """A causal decoder from spikes to standardized movement, bin by bin."""

    def __init__(self, units: int, hidden: int) -> None:
        super().__init__()
        self._memory = torch.nn.GRU(units, hidden, batch_first=True)
        self._read_out = torch.nn.Linear(hidden, 2)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        # spikes: (batch, bins, units)
        states, _ = self._memory(spikes)
        return self._read_out(states)


class _Training:
    """Model, optimizer and loader: the content of a checkpoint."""

    def __init__(self, settings: Settings, loader: Loader | None) -> None:
        torch.manual_seed(settings.seed)
        self._settings, self.step = settings, 0
        self.model = _Decoder(settings.units, settings.hidden)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self._parts = {"model": self.model, "optimizer": self._optimizer, "loader": loader}
        if loader is not None and settings.resume:
            saved = torch.load(replace(settings, name=settings.resume).path("checkpoint.pt"))
            self.step = saved["step"]
            for name, part in self._parts.items():
                part.load_state_dict(saved[name])

    def learn(self, spikes: torch.Tensor, target: torch.Tensor) -> float:
        """Run a step, and save a checkpoint every `checkpoint_steps` steps."""
        loss = torch.nn.functional.mse_loss(self.model(spikes), target)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.step += 1
        if self.step % self._settings.checkpoint_steps == 0:
            self.save(self._settings.path("checkpoint.pt"))
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write aside, then rename: whenever a kill comes, the file is a complete checkpoint."""
        states = {name: part.state_dict() for name, part in self._parts.items() if part is not None}
        torch.save({"step": self.step, **states}, path.with_suffix(".aside"))
        path.with_suffix(".aside").rename(path)


def train(settings: Settings) -> dict[str, Any]:
    """Train to the end or until killed; write a log of all steps and checkpoints."""
    # What torch allocates at the first step and the first save is not the loader's memory.
    warm = _Training(settings, None)
    warm.learn(torch.zeros(settings.batch_size, BINS, settings.units), torch.zeros(settings.batch_size, BINS, 2))
    warm.save(settings.path("warm"))
    before_bytes = peak_bytes = _private_bytes()
    source, plan = settings.open()
    spikes, movement = (Moments.over(source, field=name) for name in FIELDS)
    # Threads, so that all memory belongs to this process and can be measured.
    options = RunOptions("threads", memory_bytes=settings.memory_bytes)
    with (
        Loader(
            source,
            plan,
            transform=Standardize(spikes, field="spikes"),
            num_workers=settings.workers,
            options=options,
            observer=Timings(),
        ) as loader,
        watch(loader, show=False) as watched,
        settings.path("steps").open("ab", buffering=0) as log,
    ):
        training = _Training(settings, loader)
        while loader.epoch < settings.epochs:
            for batch in watched:
                step = training.step
                loss = training.learn(batch["spikes"], _standardize(batch["behavior"], movement))
                items = [digest(row) for row in batch["behavior"].numpy()]  # identifies the windows by their content
                # One unbuffered write: after a kill, the log ends with the last completed step.
                log.write(json.dumps({"step": step, "items": items, "loss": loss.hex()}).encode() + b"\n")
                watched.record(loss=loss)
                peak_bytes = max(peak_bytes, _private_bytes()) if step % 10 == 0 else peak_bytes
                while training.step == settings.hold_at and os.getppid() != 1:
                    time.sleep(0.01)  # until killed
    watched.save(settings.path("run.json"))
    weights = torch.nn.utils.parameters_to_vector(training.model.parameters())
    np.save(settings.path("weights.npy"), weights.detach().numpy())
    return {
        "watched": watched.to_dict(),
        "private_bytes": peak_bytes - before_bytes,
        "order_hashes": [plan.order_hash(epoch) for epoch in range(settings.epochs)],
        "subjects": _score_subjects(settings, training.model, spikes, movement),
    }


def read_damaged(settings: Settings) -> dict[str, Any]:
    """Read the damaged copy twice, until the error and with a healthy item in place of the bad one; then measure."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    error = None
    try:
        _read(TarSource(settings.damaged, fields=ALL_FIELDS), settings)
    except DamageError as raised:
        error = {"shard": raised.shard, "item": raised.item, "message": str(raised)}
    replaced = _read(TarSource(settings.damaged, fields=ALL_FIELDS, on_error="substitute"), settings)
    healthy = _read(TarSource(settings.shards("train"), fields=ALL_FIELDS), settings)
    with (
        Loader(*settings.open(ALL_FIELDS), num_workers=settings.workers, options=RunOptions("threads")) as loader,
        watch(loader, show=False) as alone,
    ):
        for _ in alone:
            pass
    run = replace(settings, name="whole").path("run.json")
    write_report(Path(settings.folder) / "report.html", dataset=settings.damaged, run=run, title="The Penstock demo")
    listed = [json.loads(line) for line in (settings.damaged / "quarantine.jsonl").read_text().splitlines()]
    found = {"error": error, "log": lines, "quarantine": listed, "replaced": replaced, "healthy": healthy}
    return {**found, "watched": alone.to_dict()}


def _read(source: TarSource, settings: Settings) -> list[dict[str, Any]]:
    """Return the shapes of each batch of an epoch, and a digest of all fields of each of its items."""
    found = []
    with Loader(source, settings.plan(source), num_workers=settings.workers, options=RunOptions("threads")) as loader:
        for batch in loader:
            arrays = [batch[name].numpy() for name in ALL_FIELDS]
            rows = zip(*arrays, strict=True)
            items = [xxhash.xxh3_64_hexdigest(b"".join(row.tobytes() for row in fields)) for fields in rows]
            found.append({"shapes": [list(array.shape) for array in arrays], "items": items})
    return found


def _standardize(values: torch.Tensor, moments: Moments) -> torch.Tensor:
    mean, std = (torch.from_numpy(numbers).to(values.dtype) for numbers in (moments.mean, moments.std))
    return (values - mean) / std


def _private_bytes() -> int:
    """Return the private memory of this process (RssAnon); 0 if unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


@torch.no_grad()
def _score_subjects(
    settings: Settings, model: torch.nn.Module, spikes: Moments, movement: Moments
) -> dict[str, dict[str, float]]:
    """Return the R² of each held-out subject, and of chance: the mean, and the best of many shuffled predictions."""
    source = TarSource(settings.shards("test"), fields=FIELDS)
    plan = Plan(source.index, Sequential(), batch_size=256, tail="short")
    found, true = [], []
    with Loader(source, plan, transform=Standardize(spikes, field="spikes")) as loader:
        for batch in loader:
            found.append(model(batch["spikes"]).numpy())
            true.append(_standardize(batch["behavior"], movement).numpy())
    predicted, moved = (np.concatenate(parts).astype(np.float64) for parts in (found, true))
    # Windows are in the order of the recordings, so that the manifest gives the subject of each.
    inputs = source.manifest.metadata["conversion"]["inputs"]
    subjects = np.repeat([entry["groups"]["subject"] for entry in inputs], [entry["samples"] for entry in inputs])
    rng, scores = generator_for(settings.seed, "demo", "chance"), {}
    for subject in np.unique(subjects):
        own, true_own = predicted[subjects == subject], moved[subjects == subject]
        shuffled = max(_r2(own[rng.permutation(len(own))], true_own) for _ in range(_SHUFFLINGS))
        mean = _r2(np.zeros_like(true_own), true_own)  # that of the training split is 0 here
        scores[str(subject)] = {"r2": _r2(own, true_own), "mean": mean, "shuffled": shuffled}
    return scores


def _r2(predicted: NDArray[np.float64], moved: NDArray[np.float64]) -> float:
    """Return R²: 1 is perfect, 0 is as good as the mean of these windows. Windows, bins and axes have equal weight."""
    spread = ((moved - moved.mean(axis=(0, 1))) ** 2).sum()
    return float(1 - ((moved - predicted) ** 2).sum() / spread)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fixed order of summation: the same items give the same bits
    job, given = sys.argv[1], Settings(**json.loads(Path(sys.argv[2]).read_text()))
    result = {"train": train, "read_damaged": read_damaged}[job](given)
    given.path("result.json").write_text(json.dumps(result))
