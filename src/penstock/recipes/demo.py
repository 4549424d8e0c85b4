"""The demo: train on data larger than the loader may hold, be killed, go on, and compare bit for bit.

A parent process tells the story and checks it. Every training is a process of its own, started as
`python -m penstock.recipes.demo TASK`, so that the kill is a real one and nothing outlives it but the files.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import ArraySource, Loader, OptionError, PenstockError, Plan, RunOptions, Shuffle, Timings, generator_for

__all__ = ["run"]

_EPOCHS, _CLASSES = 2, 10
_NUMBER_BITS = 24  # the first columns of an item spell its number, a bit each: what arrives says where it comes from
_WORKERS, _WORKERS_RESUMED = 2, 3
_LOST_STEPS = 25  # from the last checkpoint to the kill: what has to come out the same when it is done again


@dataclass(frozen=True, slots=True)
class _Scale:
    """How large a demo is."""

    items: int
    width: int
    hidden: int
    batch_size: int
    checkpoint_steps: int
    memory_bytes: int

    @property
    def epoch_steps(self) -> int:
        return self.items // self.batch_size

    @property
    def steps(self) -> int:
        return _EPOCHS * self.epoch_steps

    @property
    def data_bytes(self) -> int:
        return self.items * (4 * self.width + 8)  # float32 values and a label


_FULL = _Scale(65_536, width=1024, hidden=128, batch_size=128, checkpoint_steps=60, memory_bytes=64_000_000)
_QUICK = _Scale(8_192, width=1024, hidden=16, batch_size=64, checkpoint_steps=60, memory_bytes=24_000_000)


@dataclass(frozen=True, slots=True)
class _Task:
    """What a training process is told."""

    folder: str
    name: str
    workers: int
    seed: int
    scale: _Scale
    resume: str | None = None
    """The name of the training whose checkpoint it goes on from."""

    hold_at: int | None = None
    """The step after which it waits to be killed, so that a late kill still comes before the next checkpoint."""

    def path(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.name}.{suffix}"

    def steps(self) -> list[dict[str, Any]]:
        # A kill in the middle of a write leaves half a line, of a step that does not count.
        return [json.loads(line) for line in self.path("steps").read_bytes().split(b"\n")[:-1]]

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.path("report").read_text()))


def _generate(folder: Path, scale: _Scale, seed: int, story: "_Story") -> None:
    """Write the items: ten classes in noise, and in front of each item its number."""
    shape = (scale.items, scale.width)
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.float32, shape=shape)
    y = np.lib.format.open_memmap(folder / "y.npy", mode="w+", dtype=np.int64, shape=(scale.items,))
    centres = 0.1 * generator_for(seed, "demo", "centres").standard_normal((_CLASSES, scale.width), np.float32)
    began = time.monotonic()
    for start in range(0, scale.items, 4096):
        numbers = np.arange(start, min(start + 4096, scale.items))
        rng = generator_for(seed, "demo", "items", start)
        labels = rng.integers(_CLASSES, size=len(numbers))
        values = rng.standard_normal((len(numbers), scale.width), np.float32) + centres[labels]
        values[:, :_NUMBER_BITS] = (numbers[:, None] >> np.arange(_NUMBER_BITS) & 1) * 2 - 1
        x[start : start + len(numbers)], y[start : start + len(numbers)] = values, labels
        story.progress("item", start + len(numbers), scale.items, seconds=time.monotonic() - began)


def _item_numbers(x: torch.Tensor) -> list[int]:
    bits = x[:, :_NUMBER_BITS].numpy() > 0
    return list((bits << np.arange(_NUMBER_BITS)).sum(axis=1).tolist())


def _source_and_plan(folder: str | Path, scale: _Scale, seed: int) -> tuple[ArraySource, Plan]:
    source = ArraySource({name: np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("x", "y")})
    return source, Plan(source.index, Shuffle(), batch_size=scale.batch_size, seed=seed)


class _Training:
    """A model, its optimizer and the loader that feeds it: all that a checkpoint holds."""

    def __init__(self, task: _Task, loader: Loader) -> None:
        self._task = task
        self.model, self._optimizer = _model(task.scale, task.seed)
        self._parts: dict[str, Any] = {"model": self.model, "optimizer": self._optimizer, "loader": loader}
        self.step = 0
        if task.resume:
            saved = torch.load(replace(task, name=task.resume).path("checkpoint.pt"))
            self.step = saved["step"]
            for name, part in self._parts.items():
                part.load_state_dict(saved[name])

    def learn(self, batch: dict[str, torch.Tensor], log: io.RawIOBase) -> None:
        loss = _learned(self.model, self._optimizer, batch)
        line = {"step": self.step, "items": _item_numbers(batch["x"]), "loss": loss.hex()}
        # One unbuffered write: after a kill, the log ends with the last step that was done.
        log.write(json.dumps(line).encode() + b"\n")
        self.step += 1
        if self.step % self._task.scale.checkpoint_steps == 0:
            self._save()

    def _save(self) -> None:
        """Write aside, sync, rename: whenever the kill comes, the file is a whole checkpoint."""
        with self._task.path("aside").open("wb") as file:
            torch.save({"step": self.step, **{name: part.state_dict() for name, part in self._parts.items()}}, file)
            file.flush()
            os.fsync(file.fileno())
        self._task.path("aside").replace(self._task.path("checkpoint.pt"))


def _train(task: _Task) -> None:
    torch.set_num_threads(1)  # sums in one sequence: with the same items in, the same bits come out
    _warm_up(task.scale)
    before_bytes = peak_bytes = _private_bytes()
    began, first_batch_seconds = time.perf_counter(), 0.0
    source, plan = _source_and_plan(task.folder, task.scale, task.seed)
    # Threads, so that all memory is that of this process and can be measured in it.
    options, timings = RunOptions("threads", memory_bytes=task.scale.memory_bytes), Timings()
    with (
        Loader(source, plan, num_workers=task.workers, options=options, observer=timings) as loader,
        task.path("steps").open("ab", buffering=0) as log,
    ):
        training = _Training(task, loader)
        while loader.epoch < _EPOCHS:
            for batch in loader:
                first_batch_seconds = first_batch_seconds or time.perf_counter() - began
                training.learn(batch, log)
                if training.step % 10 == 0:
                    peak_bytes = max(peak_bytes, _private_bytes())
                if training.step == task.hold_at:
                    _wait_to_be_killed()
        report = {
            "wait_fraction": timings.wait_fraction,
            "first_batch_seconds": first_batch_seconds,
            "private_bytes": peak_bytes - before_bytes,
            "order_hashes": [plan.order_hash(epoch) for epoch in range(_EPOCHS)],
        }
    weights = torch.nn.utils.parameters_to_vector(training.model.parameters())
    np.save(task.path("weights.npy"), weights.detach().numpy())
    task.path("report").write_text(json.dumps(report))


def _model(scale: _Scale, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(scale.width, scale.hidden), torch.nn.ReLU(), torch.nn.Linear(scale.hidden, _CLASSES)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=3e-4)


def _learned(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()
    return float(loss.detach())


def _warm_up(scale: _Scale) -> None:
    """Do a step and a save that are thrown away: what torch takes at the first one is not the loader's memory."""
    model, optimizer = _model(scale, seed=0)
    x, y = torch.zeros(scale.batch_size, scale.width), torch.zeros(scale.batch_size, dtype=torch.int64)
    _learned(model, optimizer, {"x": x, "y": y})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def _private_bytes() -> int:
    """Return the memory of this process that no file backs; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _wait_to_be_killed() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    sys.exit("The process that should have killed this one is gone.")


class _Story:
    """Writes to stdout: a live line on a terminal, a plain line every two seconds elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._told, self._line, self.holds = time.monotonic(), "", True

    def say(self, text: str) -> None:
        sys.stdout.write(f"\r\033[K{text}\n" if self._live else f"{text}\n")
        sys.stdout.flush()
        self._told = time.monotonic()

    def progress(self, what: str, done: int, total: int, *, seconds: float, since: int = 0) -> None:
        """Say how far a thing is that took `seconds` from `since` to `done`."""
        if time.monotonic() - self._told < (0.1 if self._live else 2.0):
            return
        line = f"   {what} {done:,} of {total:,}"
        if done > since and seconds > 0.5:
            line += f", about {seconds * (total - done) / (done - since):.0f} s left"
        if line != self._line:
            sys.stdout.write(f"\r\033[K{line}" if self._live else f"{line}\n")
            sys.stdout.flush()
        self._told, self._line = time.monotonic(), line

    def check(self, what: str, *, holds: bool, detail: str) -> None:
        """Tell the outcome of one comparison."""
        self.holds &= holds
        self.say(f"   {'yes' if holds else 'NO':<4} {what:<35} {detail}")


def run(*, keep: Path | None = None, seed: int = 0, quick: bool = False) -> bool:
    """Run the demo and say whether the interrupted training equals the undisturbed one.

    Parameters
    ----------
    keep
        A new or empty directory for the files; None: a temporary one that is removed, whatever happens.
    """
    began, story, scale = time.monotonic(), _Story(), _QUICK if quick else _FULL
    with _terminable(), _folder(keep, scale) as folder:
        _tell(folder, scale, seed, story)
    outcome = "Yes, bit for bit." if story.holds else "NO: see the lines above that say so."
    where = f"The files are in {folder}." if keep else "The files are removed; --keep DIR keeps them."
    story.say(f"\n{outcome} It took {time.monotonic() - began:.0f} s. {where}")
    return story.holds


def _tell(folder: Path, scale: _Scale, seed: int, story: _Story) -> None:
    began = time.monotonic()
    story.say(f"1. The data: {scale.items:,} items, {scale.data_bytes / 1e6:.0f} MB in memory-mapped files.")
    _generate(folder, scale, seed, story)
    _, plan = _source_and_plan(folder, scale, seed)
    story.say(f"   Written to {folder} in {time.monotonic() - began:.1f} s.")
    story.say(f"   The loader may take {scale.memory_bytes / 1e6:.0f} MB of memory.")

    whole = _Task(str(folder), "whole", _WORKERS, seed, scale)
    story.say(f"\n2. A training that nobody disturbs: {_EPOCHS} epochs of {scale.epoch_steps:,} batches, shuffled.")
    _finish(whole, story)

    # Well into the second epoch, and some steps past a checkpoint.
    saved = int(0.7 * scale.steps) // scale.checkpoint_steps * scale.checkpoint_steps
    killed = replace(whole, name="killed", hold_at=saved + scale.checkpoint_steps - 1)
    story.say(f"\n3. The same training, saved every {scale.checkpoint_steps} steps, and killed.")
    lost = _kill(killed, saved + _LOST_STEPS, story) - saved
    story.say(f"   The last checkpoint is of step {saved:,}: {lost} steps are lost and are done again.")

    resumed = replace(whole, name="resumed", workers=_WORKERS_RESUMED, resume="killed")
    story.say(f"\n4. A new process goes on, with {_WORKERS_RESUMED} workers instead of {_WORKERS}.")
    _finish(resumed, story, since=saved)

    story.say("\n5. Is the interrupted training the same as the undisturbed one?")
    _compare(whole, killed, resumed, plan, story)


def _finish(task: _Task, story: _Story, since: int = 0) -> None:
    """Let a training run to its end, and say how it went."""
    began = time.monotonic()
    number = _run_process(task, story, since=since)
    seconds, steps, report = time.monotonic() - began, task.steps(), task.report()
    losses = np.array([float.fromhex(step["loss"]) for step in steps])
    at = f"batch {since % task.scale.epoch_steps} of epoch {since // task.scale.epoch_steps}"
    story.say(f"   Process {number} with {task.workers} workers: {len(steps):,} steps in {seconds:.1f} s.")
    story.say(f"   {1000 * report['first_batch_seconds']:.0f} ms from opening the files to the first batch, {at}.")
    story.say(f"   Waiting for data: {100 * report['wait_fraction']:.1f} % of the time.")
    story.say(f"   Loss: from {losses[:20].mean():.2f} to {losses[-20:].mean():.2f}.")


def _kill(task: _Task, step: int, story: _Story) -> int:
    """Kill a training once it has done `step` steps, and return how many it really has done."""
    number = _run_process(task, story, kill_at=step)
    done = len(task.steps())
    at = f"batch {done % task.scale.epoch_steps} of epoch {done // task.scale.epoch_steps}"
    story.say(f"   Process {number} with {task.workers} workers: SIGKILL after {done:,} steps, at {at}.")
    return done


def _compare(whole: _Task, killed: _Task, resumed: _Task, plan: Plan, story: _Story) -> None:
    before, after, scale = killed.steps(), resumed.steps(), whole.scale
    saved = after[0]["step"]
    joined, redone = before[:saved] + after, len(before) - saved
    items, losses = ([[step[key] for step in some] for some in (whole.steps(), joined)] for key in ("items", "loss"))
    story.check("Same items in every batch", holds=items[0] == items[1], detail=f"{len(joined):,} batches")
    story.check("Same loss in every step", holds=losses[0] == losses[1], detail="to the last bit")
    story.check("Same steps when done again", holds=before[saved:] == after[:redone], detail=f"{redone} steps")
    planned = [draw.items.tolist() for e in range(_EPOCHS) for draw in plan.epoch(e).draws(range(plan.n_batches))]
    story.check("Same items as the plan says", holds=items[1] == planned, detail="read off the items themselves")
    passes = [np.concatenate(items[1][e * plan.n_batches :][: plan.n_batches]) for e in range(_EPOCHS)]
    once = all(np.array_equal(np.sort(numbers), np.arange(scale.items)) for numbers in passes)
    story.check("Every item once per epoch", holds=once, detail=f"{scale.items:,} items, {_EPOCHS} epochs")
    reports, hashes = [whole.report(), resumed.report()], [plan.order_hash(epoch) for epoch in range(_EPOCHS)]
    holds = all(report["order_hashes"] == hashes for report in reports)
    story.check("Same hash of each epoch's order", holds=holds, detail=", ".join(hashes))
    weights = [np.load(task.path("weights.npy")) for task in (whole, resumed)]
    holds = weights[0].tobytes() == weights[1].tobytes()
    story.check("Same weights at the end", holds=holds, detail=f"{weights[0].size:,} numbers, bit for bit")
    used, budget = max(report["private_bytes"] for report in reports) / 1e6, scale.memory_bytes / 1e6
    if used:  # unknown on systems without /proc
        detail = f"{used:.0f} MB private memory, for {scale.data_bytes / 1e6:.0f} MB of data"
        story.check(f"Within the budget of {budget:.0f} MB", holds=used <= budget, detail=detail)


def _run_process(task: _Task, story: _Story, *, since: int = 0, kill_at: int | None = None) -> int:
    """Run a training to its end, or until it has done `kill_at` steps; return the number of its process.

    It is out of reach of the terminal's Ctrl-C, and ends with this function whatever happens.
    """
    command = [sys.executable, "-m", "penstock.recipes.demo", json.dumps(asdict(task))]
    with task.path("errors").open("w+b") as errors, task.path("steps").open("w+b") as log:
        # Torch leaves caches where temporary files go; with the others, they are removed.
        environment = {**os.environ, "TMPDIR": task.folder}
        process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)  # noqa: S603  # our own
        began, done = time.monotonic(), since
        try:
            while process.poll() is None:
                began = time.monotonic() if done == since else began
                done += (fresh := log.read().count(b"\n"))
                story.progress("step", done, task.scale.steps, seconds=time.monotonic() - began, since=since)
                if kill_at is not None and done >= kill_at:
                    process.kill()
                if not fresh:
                    time.sleep(0.002)
        finally:
            process.kill()
            process.wait()
    if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
        said = task.path("errors").read_text().strip().splitlines() or [f"exit code {process.returncode}"]
        raise PenstockError(f"Training process {process.pid} ({task.name}) failed: {said[-1]}")
    return process.pid


@contextmanager
def _folder(keep: Path | None, scale: _Scale) -> Iterator[Path]:
    try:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        folder = keep or Path(tempfile.mkdtemp(prefix="penstock-demo-"))
        free, full, needed = shutil.disk_usage(folder).free / 1e6, any(folder.iterdir()), 1.2 * scale.data_bytes / 1e6
    except OSError as error:
        raise OptionError(f"The demo cannot write its files: {error}. Give --keep another directory.") from error
    try:
        if full:
            raise OptionError(f"{folder} is not empty; give --keep a directory that is new or empty.")
        if free < needed:
            raise OptionError(f"The demo writes {needed:.0f} MB to {folder}, which has room for {free:.0f} MB.")
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: with everything cleaned up."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    _train(_Task(**{**told, "scale": _Scale(**told["scale"])}))
