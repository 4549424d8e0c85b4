"""The child processes of the demo: each can be killed at any moment, and leaves only files."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.core.errors import PenstockError
from penstock.demo.story import Story
from penstock.demo.task import Task
from penstock.files.durable import create_file
from penstock.files.regular import read_regular

__all__ = ["Process", "Processes"]


class Process:
    """A process that runs one task after another; it imports torch when it starts."""

    def __init__(self, folder: Path, errors: Path, environment: dict[str, str]) -> None:
        self._errors = errors
        with create_file(errors) as output:
            self._popen = subprocess.Popen(  # noqa: S603  # our own
                [
                    sys.executable,
                    "-m",
                    "penstock.demo.run",
                    str(folder),
                ],  # the folder identifies the process in a process list
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )

    @property
    def number(self) -> int:
        """The process id."""
        return self._popen.pid

    def do(self, task: Task, story: Story, *, steps: int = 0, since: int = 0, kill_at: int | None = None) -> None:
        """Run a task to its end, or kill it after `kill_at` steps; show progress from step `since` to `steps`."""
        assert self._popen.stdin is not None
        with create_file(task.path("steps")) if steps else nullcontext(io.BytesIO()) as log:
            with suppress(BrokenPipeError):  # it has already ended, which is reported below
                self._popen.stdin.write(f"{task.to_json()}\n".encode())
                self._popen.stdin.flush()
            began, done = time.monotonic(), since
            while self._popen.poll() is None and not task.report_path.exists():
                story.check_stop()
                began = time.monotonic() if done == since else began
                done += (fresh := log.read().count(b"\n"))
                if steps:
                    story.progress("step", done, steps, seconds=time.monotonic() - began, since=since)
                if kill_at is not None and done >= kill_at:
                    self._popen.kill()
                if not fresh:
                    time.sleep(0.002)
        expected = None if kill_at is None else -signal.SIGKILL
        if self._popen.returncode != expected:
            lines = read_regular(self._errors).decode().strip().splitlines() or [f"exit code {self._popen.returncode}"]
            raise PenstockError(f"Process {self.number} of the demo ({task.name}) failed: {lines[-1]}")

    def end(self) -> None:
        """End the process; idempotent."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()


class Processes:
    """All processes of a demo; they end with the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._caches = folder, folder / "caches"
        # torch, matplotlib and pynwb write their caches here, to be removed with everything else.
        self._places = dict.fromkeys(("TMPDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"), str(self._caches))
        self._all: list[Process] = []

    def __enter__(self) -> Self:
        self._caches.mkdir()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for process in self._all:
            process.end()
        shutil.rmtree(self._caches, ignore_errors=True)

    def start(self) -> Process:
        """Start a process, ideally before it is needed: importing torch takes seconds."""
        errors = self._caches / f"process-{len(self._all)}.errors"
        process = Process(self._folder, errors, {**os.environ, **self._places, "MPLBACKEND": "agg"})
        self._all.append(process)
        return process

    @contextmanager
    def redirect_caches(self) -> Iterator[None]:
        """Redirect the caches of packages imported meanwhile to the folder of the demo."""
        before = {name: os.environ.get(name) for name in self._places}
        os.environ.update(self._places)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
