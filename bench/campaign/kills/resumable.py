"""Work that is killed at random moments, without warning, and then done to the end: the same bytes, and nothing left.

A moment is a number of changes of files, a number of function calls, or a time. A kill after a time hits the process,
or one that it started, as the kernel does when memory runs out, or all of them, as a batch system does.
"""

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_convert_parts import tree
from penstock_test_killer import Job
from penstock_test_parts import eventually
from penstock_test_processes import session_members

__all__ = ["Work", "kill_after", "kill_and_resume", "wait_until_gone"]


@dataclass(frozen=True)
class Work:
    """What is killed.

    Parameters
    ----------
    run
        `run(folder)` begins in a folder that does not exist, or goes on with what it finds there.
    read
        `read(folder)` returns what a reader finds; None if there is nothing, or if it is refused.
    files
        The files that must be the same in the end.
    clocks
        How moments are chosen.
    may_fail
        Whether it may end with a WorkerError if one of the processes that it started is killed.
    rounds
        How often it is begun, killed and finished in one trial.
    """

    run: Callable[[Path], Any]
    read: Callable[[Path], Any]
    files: Callable[[Path], dict[str, bytes]] = tree
    clocks: tuple[str, ...] = ("changes", "events", "time")
    may_fail: bool = False
    rounds: int = 3


def kill_and_resume(work: Work, rng: random.Random, folder: Path) -> int:
    """Kill some work several times, and do it to the end; return how often it was killed."""
    counts, began = {}, time.monotonic()
    for clock in work.clocks:
        counts[clock] = _finish(work, folder / "whole" / clock, clock)
    seconds = (time.monotonic() - began) / len(counts)
    truth, expected = work.read(folder / "whole" / clock), work.files(folder / "whole" / clock)
    assert truth is not None, "work that was not disturbed can be read"
    killed = 0
    for number in range(work.rounds):
        place = folder / f"round {number}"
        for _ in range(rng.choice((1, 1, 2, 3))):
            moment = _kill(work, place, rng, counts, seconds)
            killed += 1
            found = work.read(place)
            assert found is None or found == truth, f"a reader finds something else after {moment}"
        _finish(work, place, "time")
        assert work.read(place) == truth, f"resumed after {moment}"
        found = work.files(place)
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        assert wrong == [], f"after {moment} and resuming, files differ: {wrong[:5]}"
    return killed


def _finish(work: Work, place: Path, clock: str) -> int:
    """Do some work to its end, in a process of its own; return the ticks of the clock."""
    place.parent.mkdir(exist_ok=True)
    job = Job(lambda: work.run(place) and None, job={}, clock=clock)
    answer = job.answer()
    assert "value" in answer, answer
    wait_until_gone(job.pid)
    return int(answer["count"])


def _kill(work: Work, place: Path, rng: random.Random, counts: dict[str, int], seconds: float) -> str:
    """Kill some work once; return a description of the moment."""
    clock = rng.choice(work.clocks)
    at = 0 if clock == "time" else rng.randint(1, counts[clock])
    job = Job(lambda: work.run(place) and None, job={}, at=at, clock=clock)
    if clock == "time":
        delay, whom = rng.uniform(0, 1.1 * seconds), rng.choice(("process", "everyone", "child"))
        answer = kill_after(job, delay, whom, rng)
        failed = answer.get("error", "")
        assert not failed or (work.may_fail and whom == "child" and failed.startswith("WorkerError(")), failed
        return f"a kill of {whom} after {delay:.4f} s"
    answer = job.answer()
    assert "error" not in answer, answer
    wait_until_gone(job.pid)
    return f"a kill at {at} of {counts[clock]} {clock}"


def kill_after(job: Job, seconds: float, whom: str, rng: random.Random) -> dict[str, Any]:
    """Kill a job after a time, all processes that it started, or one of these; return its answer.

    With one process less, a job goes on. Nothing is left of it in the end.
    """
    time.sleep(seconds)
    children = sorted(set(session_members(job.pid)) - {job.pid})
    with suppress(ProcessLookupError):  # it has no session of its own yet, or a child has just ended
        if whom == "everyone":
            os.killpg(job.pid, signal.SIGKILL)
        elif whom == "child" and children:
            os.kill(rng.choice(children), signal.SIGKILL)
    if whom != "child":
        os.kill(job.pid, signal.SIGKILL)
    answer = job.answer()
    wait_until_gone(job.pid)
    if whom == "everyone":
        _remove_semaphores()
    return answer


def _remove_semaphores() -> None:
    """Remove those of this trial: the process with which Python removes them has been killed, too."""
    prefix = mp.current_process()._config["semprefix"].strip("/")  # type: ignore[attr-defined]
    for path in Path("/dev/shm").glob(f"sem.{prefix}-*"):
        path.unlink()


def wait_until_gone(session: int) -> None:
    """Raise if processes of a session are still alive after 30 seconds."""
    if not eventually(lambda: session_members(session) == []):
        left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in session_members(session)]
        raise AssertionError(f"processes are left: {left}")
