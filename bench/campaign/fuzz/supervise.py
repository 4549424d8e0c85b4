"""Runs the parsers in processes that may die, and collects what they find.

1. A process ends a target's share: its counts and findings have come through the pipe.
2. It dies (SIGSEGV, or a timer of its own): the input lies in memory that both share. It is a finding, and another
   process does the rest of the share.
3. Time is up: each process stops after the input that it is at.
"""

import mmap
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.fuzz.minimise import minimise
from bench.campaign.fuzz.mutate import MAX_BYTES, mutate
from bench.campaign.fuzz.probe import Finding, Probe
from bench.campaign.fuzz.target import Target

__all__ = ["Outcome", "fuzz_targets", "summarize"]

_PROCESSES = multiprocessing.get_context("fork")  # the parsers and all that they import are there already
_KINDS = {signal.SIGPROF: "slow", signal.SIGALRM: "hung"}
_TIMED = tuple(-number for number in _KINDS)
_MAX_DEATHS = 8  # of one target; a parser that crashes on every input must not take all the time
_MAX_KEPT = 400
_LEAST_SECONDS = 1.0
_QUICK_SECONDS = 0.2  # changes of an input that takes longer take as long


@dataclass
class Outcome:
    """What came of one target."""

    target: str
    n_inputs: int = 0
    n_lines: int = 0
    seconds: float = 0.0
    """Time of the processor."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    n_failing: int = 0
    kept: list[bytes] = field(default_factory=list)
    """Inputs that reached new lines."""


class _Board:
    """Memory that a process shares with its supervisor: how far it is, and the input that it is at when it dies."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 32 + MAX_BYTES + 4096)
        self._numbers = np.frombuffer(self._memory, np.int64, 4)

    def begin(self, content: bytes) -> None:
        """Note the next input."""
        self._numbers[0] += 1
        self._numbers[1] = len(content)
        self._memory[32 : 32 + len(content)] = content

    def note(self, n_begun: int, n_lines: int) -> None:
        """Note how many inputs were given, how many lines they reached, and the time of the processor that it took."""
        self._numbers[0], self._numbers[2], self._numbers[3] = n_begun, n_lines, int(1000 * time.process_time())

    @property
    def content(self) -> bytes:
        """The current input."""
        return self._memory[32 : 32 + int(self._numbers[1])]

    @property
    def n_begun(self) -> int:
        """Number of inputs that were begun."""
        return int(self._numbers[0])

    @property
    def n_lines(self) -> int:
        """Number of lines and messages that were reached."""
        return int(self._numbers[2])

    @property
    def seconds(self) -> float:
        """Time of the processor."""
        return float(self._numbers[3]) / 1000


@dataclass(frozen=True)
class _Task:
    """What a process does."""

    target: Target
    n_inputs: int
    """How many in all: first those that are given, then random changes of them."""

    inputs: Sequence[tuple[str, bytes]]
    """Label and content of those that are given."""

    seed: str
    deadline: float
    folder: Path
    known: frozenset[str]
    """Reasons of findings that the supervisor has, and does not need again."""


@dataclass(frozen=True)
class _Job:
    """A process at work."""

    task: _Task
    outcome: Outcome
    process: Any
    pipe: Connection
    board: _Board


def fuzz_targets(
    shares: Iterable[tuple[Target, int]],
    *,
    seed: int,
    deadline: float,
    processes: int = 2,
    corpus: Callable[[str], Sequence[tuple[str, bytes]]] = lambda _: (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Give each target its seeds, its corpus and so many random inputs; return what came of it.

    Parameters
    ----------
    deadline
        In seconds of `time.monotonic`.
    corpus
        Returns label and content of the files of a target.
    """
    waiting = [(target, n_inputs, Outcome(target.name)) for target, n_inputs in shares]
    outcomes = [outcome for _, _, outcome in waiting]
    deaths = {target.name: 0 for target, _, _ in waiting}
    jobs: list[_Job] = []
    while waiting or jobs:
        while waiting and len(jobs) < processes:
            target, n_inputs, outcome = waiting.pop(0)
            inputs = [*(("a seed", seed) for seed in target.seeds()), *corpus(target.name)]
            inputs += [("", kept) for kept in outcome.kept]
            drawn = f"{seed} {target.name} {deaths[target.name]}"
            known = frozenset(reason for _, reason in outcome.findings)
            # A target that is slow must not take the time of those after it.
            share = processes * (deadline - time.monotonic()) / (len(waiting) + 1)
            until = min(deadline, time.monotonic() + max(share, _LEAST_SECONDS))
            folder = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))
            task = _Task(target, len(inputs) + n_inputs, inputs, drawn, until, folder, known)
            jobs.append(_start(task, outcome))
        for pipe in wait([job.pipe for job in jobs]):
            job = next(job for job in jobs if job.pipe is pipe)
            try:
                message = job.pipe.recv()
            except EOFError:
                jobs.remove(job)
                target = job.task.target
                left = _finish(job)
                if left and deaths[target.name] < _MAX_DEATHS and time.monotonic() < deadline:
                    deaths[target.name] += 1
                    waiting.insert(0, (target, left, job.outcome))
                else:
                    say(summarize(job.outcome))
                continue
            _note(job.outcome, message)
    return outcomes


def summarize(outcome: Outcome) -> str:
    """Return one line about a target."""
    found = f", {len(outcome.findings)} findings ({outcome.n_failing} inputs)" if outcome.findings else ""
    return (
        f"{outcome.target:<16} {outcome.n_inputs:>7,} inputs in {outcome.seconds:6.1f} s, "
        f"{outcome.n_lines:>5} lines and messages reached, {len(outcome.kept):>3} inputs kept{found}"
    )


def _start(task: _Task, outcome: Outcome) -> _Job:
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    board = _Board()
    process = _PROCESSES.Process(target=_work, args=(task, board, sending))
    process.start()
    sending.close()
    return _Job(task, outcome, process, receiving, board)


def _finish(job: _Job) -> int:
    """Take the last of a process that has ended; return how many inputs of its share are left."""
    job.process.join()
    job.pipe.close()
    shutil.rmtree(job.task.folder, ignore_errors=True)
    outcome, target, code = job.outcome, job.task.target, job.process.exitcode
    n_begun = job.board.n_begun
    outcome.n_inputs += n_begun
    outcome.n_lines = max(outcome.n_lines, job.board.n_lines)
    outcome.seconds += job.board.seconds
    if code == 0:
        return 0
    if not n_begun:
        raise RuntimeError(f"The target {target.name} could not be prepared; the exit code is {code}.")
    finding = _describe_death(target, code, job.board.content)
    # A process that is slow takes seconds to say so; and one small input is enough.
    attempts = 0 if (finding.kind, finding.reason) in outcome.findings else 2 if code in _TIMED else 60
    small = minimise(finding.content, lambda part: _run_alone(target, part) == code, attempts)
    label = job.task.inputs[n_begun - 1][0] if n_begun <= len(job.task.inputs) else ""
    _note(outcome, ("finding", replace(finding, content=small, label=label)))
    return max(0, job.task.n_inputs - max(n_begun, len(job.task.inputs)))


def _describe_death(target: Target, code: int, content: bytes) -> Finding:
    kind = _KINDS.get(-code, "crashed")
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Finding(target.name, kind, name, content)


def _run_alone(target: Target, content: bytes) -> int:
    """Give one input to a target in a process of its own; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        process = _PROCESSES.Process(target=_work_once, args=(target, content, Path(folder)))
        process.start()
        process.join()
    return process.exitcode or 0


def _note(outcome: Outcome, message: tuple[str, Any]) -> None:
    what, content = message
    if what == "kept":
        outcome.kept.append(content)
    elif what == "again":
        outcome.n_failing += content
    else:
        key = (content.kind, content.reason)
        if key not in outcome.findings or len(content.content) < len(outcome.findings[key].content):
            outcome.findings[key] = content
        outcome.n_failing += 1


# -- in the process of a target ----------------------------------------------------------------------------------------


def _silence() -> None:
    """Send what libraries print about bad input to nowhere; findings go through the pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _work_once(target: Target, content: bytes, folder: Path) -> None:
    probe = Probe(target, folder)
    _silence()
    probe.try_input(content)
    os._exit(0)


def _work(task: _Task, board: _Board, sending: Connection) -> None:
    rng, probe = random.Random(task.seed), Probe(task.target, task.folder, board.begin)
    _silence()
    queue: list[bytes] = []
    known, n_given = set(task.known), 0
    while n_given < task.n_inputs and (n_given < len(task.inputs) or time.monotonic() < task.deadline):
        is_given = n_given < len(task.inputs)
        label, content = task.inputs[n_given] if is_given else ("", _draw(task.target, queue, rng))
        n_given += 1
        began = time.process_time()
        finding = probe.try_input(content)
        is_quick = time.process_time() - began < _QUICK_SECONDS
        if finding is not None:
            is_known = finding.reason in known
            known.add(finding.reason)
            sending.send(("again", 1) if is_known else ("finding", replace(_shrink(probe, finding), label=label)))
        elif is_given and is_quick:
            queue.append(content)
        elif probe.coverage.is_fresh and is_quick and not is_given and len(queue) < _MAX_KEPT:
            queue.append(content)
            sending.send(("kept", content))
        board.note(n_given, probe.coverage.n_reached)  # without the attempts to make a finding smaller
    sending.close()
    os._exit(0)  # threads of libraries must not keep the process


def _draw(target: Target, queue: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a change of an input; those that reached new lines last are taken more often."""
    if not queue:
        return rng.randbytes(rng.randrange(64))
    number = rng.randrange(len(queue))
    if rng.random() < 0.5:
        number = max(number, rng.randrange(len(queue)))
    return mutate(queue[number], rng, target.mutations, target.tokens, queue)


def _shrink(probe: Probe, finding: Finding) -> Finding:
    def fails(part: bytes) -> bool:
        again = probe.try_input(part)
        return again is not None and (again.kind, again.reason) == (finding.kind, finding.reason)

    small = minimise(finding.content, fails)
    return Finding(finding.target, finding.kind, finding.reason, small, finding.details)
