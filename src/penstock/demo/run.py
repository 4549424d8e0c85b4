"""The demo: convert recordings to shards, train a decoder, kill it, resume bit for bit, and find a damaged bit.

A parent process prints the story and checks the results. Each training is a separate process, started as `python -m
penstock.demo.run`, so that the kill is real and nothing survives it but files.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.formats import ReadOptions, inputs_of
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import MissingDependency, OptionError
from penstock.core.seeds import check_seed, generator_for
from penstock.demo.damage import copy_damaged, judge_damage
from penstock.demo.judge import compare, judge_decoding
from penstock.demo.process import Process, Processes
from penstock.demo.recordings import list_sessions, write_recording
from penstock.demo.story import Story
from penstock.demo.task import BIN_MS, BINS, FULL, QUICK, Scale, Task, source_and_plan, task_from_json
from penstock.plan.plan import Plan
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards

__all__ = ["DemoResult", "run"]

_WORKERS, _WORKERS_RESUMED = 2, 3
_SPLIT = Split((("train", 0.67), ("test", 0.33)), group_by="subject")
_WINDOWS = NWBOptions(("spikes", "lfp", "behavior"), bin_size_ms=BIN_MS, sequence_length=BINS, overlap=0.5)
_NEEDED = {"pynwb": "nwb", "h5py": "nwb", "scipy": "nwb", "matplotlib": "report"}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The outcome of a demo; true if all checks passed."""

    holds: bool
    checks: tuple[tuple[str, bool, str], ...]
    """What was checked, whether it holds, and details."""

    seconds: float
    folder: Path | None
    """Folder of the files; None: they were removed."""

    report: Path | None
    """The report, if it was kept."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Measured values, with units in the names."""

    def __bool__(self) -> bool:
        return self.holds


def run(*, keep: Path | None = None, seed: int = 0, quick: bool = False, quiet: bool = False) -> DemoResult:
    """Run the demo, print it to stdout, and return the outcome.

    Parameters
    ----------
    keep
        A new or empty directory for the files; None: a temporary one that is always removed.
    seed
        Seed of the recordings, the model and the order.
    quick
        Use small sizes.
    quiet
        Print nothing.

    Raises
    ------
    MissingDependency
        A required package is not installed; nothing was done.
    OptionError
        The files cannot be written to `keep`.
    """
    began, story, scale = time.monotonic(), Story(quiet=quiet), QUICK if quick else FULL
    check_seed(seed)
    _check_installed()
    with _handle_signals(story), _open_folder(keep, scale) as folder, Processes(folder) as processes:
        figures = _Demo(Task(str(folder), "whole", _WORKERS, seed, scale), story, processes).run()
    seconds = time.monotonic() - began
    story.end(_format_outcome(story, seconds, folder if keep else None))
    return DemoResult(
        holds=story.holds,
        checks=tuple(story.checks),
        seconds=round(seconds, 1),
        folder=folder if keep else None,
        report=folder / "report.html" if keep else None,
        figures=figures,
    )


def _format_outcome(story: Story, seconds: float, kept: Path | None) -> str:
    refused = [what for what, holds, _ in story.checks if not holds]
    outcome = f"All {len(story.checks)} checks passed." if story.holds else f"FAILED: {'; '.join(refused)}."
    where = (
        f"The report is {kept / 'report.html'}, next to all other files."
        if kept
        else "All files were removed. To keep them and the report, use --keep DIR."
    )
    return f"{outcome} It took {seconds:.0f} s.\n{where}"


class _Demo:
    """The story, chapter by chapter."""

    def __init__(self, whole: Task, story: Story, processes: Processes) -> None:
        self._whole, self._story, self._processes = whole, story, processes
        self._first = processes.start()  # ready by the time the shards are
        self._folder, self._scale = Path(whole.folder), whole.scale
        self._recordings, self._shards = self._folder / "recordings", self._folder / "shards"
        self._figures: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Run all chapters, and return the measured values."""
        self._story.begin(
            "Penstock, from recordings to a trained decoder. A line that starts with yes is a check that could have "
            "failed."
        )
        self._whole.path("steps").parent.mkdir()
        self._record()
        self._convert()
        self._verify()
        _, plan = source_and_plan(self._whole)
        doomed = self._train(plan)
        self._interrupt(doomed, plan)
        self._damage(plan)
        self._measure()
        return self._figures

    def _record(self) -> None:
        scale, story = self._scale, self._story
        story.chapter("The recordings")
        story.say(
            f"{scale.subjects} simulated subjects, {scale.sessions * scale.seconds} s each: {scale.units} units, "
            f"{scale.channels} channels of LFP at 1 kHz, and a joystick, in {scale.subjects * scale.sessions} NWB "
            "files. Hidden dynamics drive all three. How they drive each unit is the same in all subjects; tempo, "
            "firing rates, gains and noise differ between subjects."
        )
        began = time.monotonic()
        # Imported before the workers are forked: otherwise each of them would import it.
        with self._processes.redirect_caches():
            import_module("pynwb")
        import_module("scipy.signal")
        self._recordings.mkdir()
        todo, size, ready = list_sessions(self._recordings, scale, self._whole.seed), 0, time.monotonic()
        for done, (_, written) in enumerate(LocalEngine(_WORKERS).run(write_recording, todo), start=1):
            size += written
            story.progress("recording", done, len(todo), seconds=time.monotonic() - ready)
        story.say(f"Written with pynwb: {size / 1e6:.0f} MB in {time.monotonic() - began:.1f} s.")

    def _convert(self) -> None:
        scale, story, began = self._scale, self._story, time.monotonic()
        story.chapter("Recordings become shards")
        story.say("Windows of 1 s that overlap by half, written in parallel, split by subject. The same command:")
        story.show("penstock convert 'recordings/*.nwb' --output shards \\")
        story.show(
            f"  --bin-size-ms {BIN_MS:.0f} --sequence-length {BINS} --overlap 0.5 --shard-size {scale.shard_size} \\"
        )
        story.show("  --split train=0.67,test=0.33 --group-by subject --stats --workers 2")
        options = ConvertOptions(WriteOptions(scale.shard_size), _SPLIT, statistics=True)
        inputs = inputs_of([str(self._recordings / "*.nwb")], "nwb", ReadOptions(nwb=_WINDOWS))
        made = convert(inputs, self._shards, options, engine=LocalEngine(_WORKERS), on_progress=_make_callback(story))
        seconds = time.monotonic() - began
        for name, manifest in made.items():
            subjects = sorted({entry["groups"]["subject"] for entry in manifest.metadata["conversion"]["inputs"]})
            story.show(
                f"{name:<5} {manifest.n_items:>6,} windows in {len(manifest.shards):>2} shards, "
                f"{_stored_bytes(manifest) / 1e6:>4.0f} MB: {', '.join(subjects)}"
            )
        windows = sum(manifest.n_items for manifest in made.values())
        story.say(f"{seconds:.1f} s. Means and standard deviations are those of the training split alone.")
        self._figures |= {"windows": windows, "convert_seconds": round(seconds, 2)}

    def _verify(self) -> None:
        story = self._story
        story.chapter("Every byte is verified")
        folders = [self._shards / name for name in _SPLIT.names]
        found = [_verify_folder(folder, story) for folder in folders]
        size = sum(_stored_bytes(manifest) for manifest, _, _ in found)
        problems = [problem for _, some, _ in found for problem in some]
        detail = f"{size / 1e6:.0f} MB read and verified in {sum(seconds for _, _, seconds in found):.1f} s"
        story.check("All shards are healthy", holds=not problems, detail=str(problems[0]) if problems else detail)

    def _train(self, plan: Plan) -> Process:
        """Train without interruption, and return the next process, which starts meanwhile."""
        story, scale = self._story, self._scale
        story.chapter("A decoder from spikes to movement is trained without interruption")
        story.say(
            f"{scale.epochs} epochs of {plan.n_batches} batches of {scale.batch_size} windows, shuffled, spikes "
            "standardised by the training split. Then it decodes held-out subjects: R² is 1 for a perfect decoder, and "
            "0 for one that only predicts the mean."
        )
        following = self._processes.start()
        self._finish(self._first, self._whole, plan)
        judge_decoding(self._whole, story)
        self._figures["held_out"] = self._whole.report()["subjects"]
        return following

    def _interrupt(self, doomed: Process, plan: Plan) -> None:
        story, scale, whole = self._story, self._scale, self._whole
        steps = scale.epochs * plan.n_batches
        # Well into the training, and some steps after a checkpoint.
        saved = int(0.7 * steps) // scale.checkpoint_steps * scale.checkpoint_steps
        killed = replace(whole, name="killed", hold_at=saved + scale.checkpoint_steps - 1)
        story.chapter("The same training is killed in the middle of an epoch, and resumes in another process")
        after = self._processes.start()
        doomed.do(killed, story, steps=steps, kill_at=saved + scale.lost_steps)
        done = len(killed.steps())
        story.say(
            f"Process {doomed.number} with {_WORKERS} workers: SIGKILL after {done} steps, {_place(done, plan)}. "
            f"The last checkpoint is of step {saved}: {done - saved} steps are lost, and repeated."
        )
        resumed = replace(whole, name="resumed", workers=_WORKERS_RESUMED, resume="killed")
        self._finish(after, resumed, plan, since=saved)
        story.say("Is the interrupted training identical to the uninterrupted one?")
        compare(whole, killed, resumed, plan, story)
        self._figures |= {"killed_at_step": done, "steps": steps}

    def _finish(self, process: Process, task: Task, plan: Plan, since: int = 0) -> None:
        """Run a training to its end, and print a summary."""
        steps, began = task.scale.epochs * plan.n_batches, time.monotonic()
        process.do(task, self._story, steps=steps, since=since)
        seconds = time.monotonic() - began
        losses = [float.fromhex(step["loss"]) for step in task.steps()]
        resumed = f", resumed at {_place(since, plan)}" if since else ""
        self._story.say(
            f"Process {process.number} with {task.workers} workers{resumed}: {len(losses)} steps in {seconds:.1f} s, "
            f"loss from {sum(losses[:10]) / 10:.2f} to {sum(losses[-10:]) / 10:.2f}."
        )

    def _damage(self, plan: Plan) -> None:
        story, whole = self._story, self._whole
        story.chapter("One bit of one shard is flipped")
        task = replace(whole, name="damage", kind="damage")
        item = int(generator_for(whole.seed, "demo", "damage").integers(plan.length))
        damage = copy_damaged(task.shards("train"), task.damaged, item)
        story.say(f"In a copy: byte {damage.byte:,} of {damage.shard}, in the spikes of window {item:,}.")
        _, problems, _ = _verify_folder(task.damaged, story)
        self._first.do(task, story)
        found = task.report()
        story.say("By default, a loader stops with this error:")
        story.show(found["error"]["message"] if found["error"] else "(none)")
        story.say("With on_error='substitute', it continues, and logs:")
        story.show(found["log"][0].replace(f"{self._folder}{os.sep}", "") if found["log"] else "(nothing)")
        judge_damage(damage, problems, found, plan, story)

    def _measure(self) -> None:
        story, whole = self._story, self._whole
        story.chapter("Speed, and the report")
        story.say("The loader alone reads all fields once, and the report is written; this takes some seconds.")
        task = replace(whole, name="measure", kind="measure", resume=whole.name)
        self._first.do(task, story)
        trained, alone = whole.report()["watched"], task.report()["watched"]
        story.say(
            f"The training processed {trained['items_per_second']:,.0f} windows/s and waited for data "
            f"{100 * trained['wait_fraction']:.1f} % of the time (median {trained['wait_p50_ms']:.2f} ms per batch; "
            f"{trained['startup_ms']:.0f} ms for the first batch of an epoch)."
        )
        story.say(
            f"The loader alone, with the LFP, delivers {alone['items_per_second']:,.0f} windows/s or "
            f"{alone['bytes_per_second'] / 1e6:,.0f} MB/s from the page cache, and verifies every checksum."
        )
        size = task.page.stat().st_size
        story.check("The report is one HTML file", holds=size > 0, detail=f"report.html, {size / 1e3:.0f} kB")
        self._figures |= {"training": trained, "loader_alone": alone}


def _place(step: int, plan: Plan) -> str:
    return f"batch {step % plan.n_batches} of epoch {step // plan.n_batches}"


def _stored_bytes(manifest: Manifest) -> int:
    return sum(shard.stored_bytes for shard in manifest.shards)


def _verify_folder(folder: Path, story: Story) -> tuple[Manifest, list[Any], float]:
    """Verify every byte of a dataset; return its manifest, the problems, and the duration in seconds."""
    began, done = time.monotonic(), 0
    total = _stored_bytes(Manifest.read(folder / "dataset_metadata.json"))

    def read(amount: int) -> None:
        nonlocal done
        done += amount
        story.progress("MB", done // 1_000_000, total // 1_000_000, seconds=time.monotonic() - began)

    manifest, problems = verify_shards(folder, workers=_WORKERS, progress=read)
    return manifest, problems, time.monotonic() - began


def _make_callback(story: Story) -> Callable[[str, str, int, int, str], None]:
    """Return a progress callback for a conversion."""
    begun: dict[str, float] = {}

    def show(what: str, unit: str, done: int, total: int, _: str) -> None:
        began = begun.setdefault(what, time.monotonic())
        story.progress(f"{what.lower()} {unit}:", done, total, seconds=time.monotonic() - began)

    return show


def _check_installed() -> None:
    missing = [package for package in _NEEDED if not _is_installed(package)]
    if missing:
        extras = ",".join(dict.fromkeys(_NEEDED[package] for package in missing))
        raise MissingDependency(" and ".join(missing), extras, "The demo")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


@contextmanager
def _open_folder(keep: Path | None, scale: Scale) -> Iterator[Path]:
    try:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        folder = (keep or Path(tempfile.mkdtemp(prefix="penstock-demo-"))).absolute()
        free, full, needed = shutil.disk_usage(folder).free / 1e6, any(folder.iterdir()), scale.disk_bytes / 1e6
    except OSError as error:
        raise OptionError(f"Could not write the files of the demo: {error}. Give --keep another directory.") from error
    owner = os.getpid()
    try:
        if full:
            raise OptionError(f"--keep must be a new or empty directory, got {keep}, which is not empty.")
        if free < needed:
            raise OptionError(f"The demo requires {needed:.0f} MB of free space in {folder}, got {free:.0f} MB.")
        yield folder
    finally:
        if keep is None and os.getpid() == owner:  # not in a worker that a signal ends
            shutil.rmtree(folder)


@contextmanager
def _handle_signals(story: Story) -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, with everything cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    ends = {signal.SIGTERM: lambda *_: story.stop(SystemExit(128 + signal.SIGTERM))}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        ends[signal.SIGINT] = lambda *_: story.stop(KeyboardInterrupt())
    before = {number: signal.signal(number, end) for number, end in ends.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_MODULES = {
    "train": ("training", "train"),
    "damage": ("read_damaged", "read_damaged"),
    "measure": ("measure", "measure"),
}
"""The module and function of each kind of task. Imported only in child processes: the parent never imports torch."""


def _run_tasks() -> None:
    """Run the tasks that the parent writes to stdin, one per line, until stdin closes."""
    import_module("penstock.demo.training").prepare()
    for line in sys.stdin:
        task = task_from_json(line)
        module, name = _MODULES[task.kind]
        getattr(import_module(f"penstock.demo.{module}"), name)(task)


if __name__ == "__main__":
    _run_tasks()
