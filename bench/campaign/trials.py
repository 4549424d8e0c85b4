"""Trials of several kinds, two at a time, each in a process and a folder of its own, until the time is over.

1. A trial returns: it counts, as often as it says.
2. It raises: a failure, with its traceback and the command that repeats it.
3. It dies, or takes longer than its kind allows: a failure; whatever it started is ended.
4. It leaves a process, a temporary file, or anything in /dev/shm, which is its own where the system allows it and
   temporary files are elsewhere: a failure.
"""

import faulthandler
import gc
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

from penstock_test_mounts import enter_mount_namespace, mount_tmpfs
from penstock_test_parts import eventually
from penstock_test_processes import receive, run_isolated, session_members, start_case

from bench.campaign.result import Result, Say

__all__ = ["Kind", "Run", "Trials"]

_AT_ONCE = 2
_LEAVE_SECONDS = 30.0  # for what goes away by itself; less than a kind allows, so that what is left is named
_LINES = 12  # of a traceback, of a failure
_SHARED = Path("/dev/shm")
_UNNAMED = re.compile(r"sem\.\w{6}")  # made by the C library for a moment; a process that is killed then leaves it
Run = Callable[[random.Random, Path, int], int | None]


@dataclass(frozen=True)
class Kind:
    """Trials that differ in their random numbers alone.

    Parameters
    ----------
    name
        One word for the command line.
    run
        `run(rng, folder, number)` makes one trial and returns how many it counts for; None: one.
    share
        How much of the time it gets, compared with the others.
    most
        Number of trials after which all has been tried; None: never.
    seconds
        A trial that takes longer is a failure.
    leaves
        Beginnings of names of temporary files that Python, or another package, leaves behind when it is killed.
    """

    name: str
    what: str
    cases: tuple[int, ...]
    run: Run
    share: float = 1.0
    most: int | None = None
    seconds: float = 120.0
    leaves: tuple[str, ...] = ()


@dataclass
class _Account:
    """What was tried of a kind so far."""

    kind: Kind
    begun: int = 0
    trials: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trials:
    """A part of the campaign that consists of trials.

    Parameters
    ----------
    only
        Number of the one trial to run, of each kind; None: all from 0 on.
    """

    part: str
    kinds: Sequence[Kind]
    only: int | None = None

    def select(self, name: str) -> "Trials":
        """Return the trials of one kind ("training-fork"), or one of them ("training-fork/17")."""
        kind, _, number = name.partition("/")
        kinds = [found for found in self.kinds if found.name == kind]
        if not kinds or not (number.isdigit() or not number):
            names = ", ".join(found.name for found in self.kinds)
            raise SystemExit(f"{self.part}/… must be one of {names}, or one of them with a number, got {name!r}.")
        return replace(self, kinds=kinds, only=int(number) if number else None)

    def __call__(self, budget_seconds: float, seed: int, say: Say) -> list[Result]:
        accounts = [_Account(kind) for kind in self.kinds]
        deadline = time.monotonic() + budget_seconds
        running: list[_Trial] = []
        if (why := run_isolated(enter_mount_namespace)) is not None:
            say(
                f"nothing may be mounted here ({why}): files that are left in /dev/shm are not noticed, and disks are "
                "not full, but files are limited in size",
                always=True,
            )
        with tempfile.TemporaryDirectory(prefix="faults-") as home:
            while True:
                while len(running) < _AT_ONCE and (account := self._next(accounts, deadline)):
                    running.append(_Trial(self.part, account, self._number(account), seed, Path(home)))
                if not running:
                    break
                wait([trial.receiving for trial in running], timeout=0.5)
                for trial in [trial for trial in running if trial.is_over()]:
                    running.remove(trial)
                    trial.settle(say)
                trials, failures = sum(one.trials for one in accounts), sum(len(one.failures) for one in accounts)
                say(f"{trials:,} trials, {failures} failures")
        return [
            Result(self.part, one.kind.cases, one.kind.what, one.trials, one.failures, one.seconds) for one in accounts
        ]

    def _number(self, account: _Account) -> int:
        account.begun += 1
        return account.begun - 1 if self.only is None else self.only

    def _next(self, accounts: Sequence[_Account], deadline: float) -> _Account | None:
        """Return the kind that has had the least of its share; each kind is tried once, whatever the time."""
        most = [1 if self.only is not None else account.kind.most for account in accounts]
        open_ = [
            account
            for account, limit in zip(accounts, most, strict=True)
            if (limit is None or account.begun < limit) and (not account.begun or time.monotonic() < deadline)
        ]
        return min(open_, key=lambda account: (account.seconds / account.kind.share, account.begun), default=None)


class _Trial:
    """One trial, which begins at once."""

    def __init__(self, part: str, account: _Account, number: int, seed: int, home: Path) -> None:
        self.account, self.seed, self.name = account, seed, f"{part}/{account.kind.name}/{number}"
        self.folder = home / f"{account.kind.name}-{number}"
        self.folder.mkdir()
        self.began = time.monotonic()
        self._ended = ExitStack()
        self.process, self.receiving = self._ended.enter_context(
            start_case(_run_trial, account.kind.run, f"{seed}/{self.name}", self.folder, number)
        )

    def is_over(self) -> bool:
        return self.receiving.poll() or time.monotonic() - self.began > self.account.kind.seconds

    def settle(self, say: Say) -> None:
        """Add the result to the account, and end what is left of the trial."""
        repeat = f'Repeat: python -m bench.campaign "{self.name}" --seed {self.seed}'
        try:
            assert self.receiving.poll(), f"no result within {self.account.kind.seconds:g} s"
            counted = receive(self.name, self.process, self.receiving, seconds=0)
            self.process.join()
            assert eventually(lambda: not session_members(self.process.pid), _LEAVE_SECONDS), "processes are left"
            names = [path.name for path in (self.folder / "tmp").iterdir()]
            left = [name for name in names if not name.startswith(self.account.kind.leaves)]
            assert left == [], f"temporary files are left: {left}"
            self.account.trials += counted
        except AssertionError as error:
            self.account.trials += 1
            last = str(error).strip().splitlines()[-_LINES:]
            self.account.failures.append("\n".join([f"{self.name}: {last[0]}", *last[1:], repeat]))
            say(self.account.failures[-1], always=True)
        finally:
            self._ended.close()
            self.account.seconds += time.monotonic() - self.began
            shutil.rmtree(self.folder, ignore_errors=True)


def _list_shared() -> list[Path]:
    return [path for path in _SHARED.iterdir() if not _UNNAMED.fullmatch(path.name)]


def _run_trial(run: Run, seed: str, folder: Path, number: int) -> int:
    # Workers that are spawned import the main module again, which is the campaign or pytest.
    sys.modules["__main__"] = ModuleType("__main__")
    logging.disable()
    faulthandler.disable()
    # A file system of its own in /dev/shm would hide the folder, if temporary files are there.
    is_private = not folder.resolve().is_relative_to(_SHARED) and enter_mount_namespace() is None
    if is_private:
        mount_tmpfs(_SHARED, "size=1g")
    (folder / "tmp").mkdir()
    (folder / "data").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    counted = run(random.Random(seed), folder / "data", number)
    gc.collect()
    if is_private:
        assert eventually(lambda: not _list_shared(), _LEAVE_SECONDS), f"left: {_list_shared()}"
    return 1 if counted is None else counted
