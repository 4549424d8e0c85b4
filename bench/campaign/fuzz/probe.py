"""Gives one input to a parser, and says what came of it.

What counts as a finding:

1. `escaped`: an error that the target does not list, or one that it lists, made of a MemoryError (`memory`).
2. `wrote`: a file opened for writing, a process started or a network connection made.
3. `warned`: a value, but with a warning that the target does not list: nobody sees it in a training.
4. `wrong`: a value that differs from the one that the input holds.
5. `slow`, `hung`, `crashed`: the process is ended, by the timers that are set here or by the system; `supervise.py`
   sees that.
"""

import fnmatch
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from bench.campaign.fuzz.coverage import Coverage
from bench.campaign.fuzz.target import HARNESS, SkippedInput, Target, WrongValueError

__all__ = ["Finding", "Probe"]

PROCESSOR_SECONDS = 30  # for one input of at most 256 KiB; all take less than 3 on a machine of today
WALL_SECONDS = 300  # only for what waits without using a processor, such as opening a pipe
MEMORY_BYTES = 1 << 29  # beside what the process has after all imports

_SOURCE = str(Path(penstock.__path__[0]))
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "pty.spawn")
# Events of changes of files, and the place of the folder, as a file descriptor, that a relative path begins at.
_CHANGES = {"os.remove": 1, "os.rename": 2, "os.mkdir": 2, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 2}


@dataclass(frozen=True)
class Finding:
    """What a parser did that it must not do, and the input."""

    target: str
    kind: str
    reason: str
    """One line, the same for all inputs that fail in the same place."""

    content: bytes
    details: str = ""
    label: str = ""
    """Where the input is from, if it was given: a file of the corpus."""


class Probe:
    """One parser in this process, which must be used for nothing else: limits and hooks stay.

    Parameters
    ----------
    folder
        An empty folder for the files of the target.
    begin
        Called with each input before the parser gets it.
    """

    def __init__(self, target: Target, folder: Path, begin: Callable[[bytes], None] = lambda _: None) -> None:
        self.target, self.coverage, self._begin = target, Coverage(), begin
        self._run = target.prepare(folder)
        self._folder, self._is_on = os.path.realpath(folder), False
        self._seen: list[str] = []
        sys.dont_write_bytecode = True
        sys.addaudithook(self._audit)
        warnings.simplefilter("always")
        warnings.showwarning = self._note_warning  # type: ignore[assignment]  # shorter, for Python calls it by place
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)  # ends the process, also inside of C code

    def try_input(self, content: bytes) -> Finding | None:
        """Give an input to the parser; afterwards, `coverage.is_fresh` says whether it went where no other did."""
        self._begin(content)
        self._seen.clear()
        _set_timers(PROCESSOR_SECONDS, WALL_SECONDS)
        found: tuple[str, BaseException] | None = None
        self._is_on = True
        try:
            with self.coverage:
                self._run(content)
        except SkippedInput:
            pass
        except WrongValueError as error:
            found = "wrong", error
        except self.target.errors as error:
            self._seen = [line for line in self._seen if not line.startswith("warned")]
            if any(_is_out_of_memory(cause) for cause in _causes(error)):
                found = "memory", error
            for cause in _causes(error):
                self.coverage.note(_template(cause))
        except BaseException as error:  # this is what is looked for
            found = "escaped", error
        finally:
            self._is_on = False
            _set_timers(0, 0)
        if found is not None:
            kind, error = found
            details = "".join(traceback.format_exception(error, limit=-12))
            return Finding(self.target.name, kind, _describe(error), content, details)
        if self._seen:
            kind, _, reason = self._seen[0].partition(" ")
            return Finding(self.target.name, kind, reason, content)
        return None

    def _note_warning(self, message: Any, category: type[Warning], *_: Any) -> None:
        if self._is_on and not str(message).startswith(self.target.warnings or ("\0",)):
            self._seen.append(f"warned {category.__name__}: {_generalize(str(message))}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or HARNESS.is_writing:
            return
        if event == "open":
            path, mode, flags = arguments
            is_written = bool(mode and set(mode) & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
            if is_written and not isinstance(path, int):
                self._note_write(os.fspath(path))
        elif event in _CHANGES and not isinstance(arguments[0], int):
            folder = arguments[_CHANGES[event]]
            start = Path() if folder in (-1, None) else Path(f"/proc/self/fd/{folder}")
            self._note_write(str(start / os.fsdecode(arguments[0])))
        elif event.startswith(_STARTS):
            self._seen.append(f"wrote {event} {arguments!r}")

    def _note_write(self, path: str | bytes) -> None:
        full = os.path.realpath(os.fsdecode(path))
        inside = f"{full}/".startswith(f"{self._folder}/") and any(
            fnmatch.fnmatch(os.path.relpath(full, self._folder), pattern) for pattern in self.target.writes
        )
        if not inside and full != os.devnull:
            self._seen.append(f"wrote {_generalize(os.path.relpath(full, self._folder))}")


def _set_timers(processor_seconds: float, wall_seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether too much memory was asked for; Python's parser says the same of a text that is nested deeply."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, MemoryError) and not (frames and frames[-1].filename.endswith("/ast.py"))


def _template(error: BaseException) -> str:
    return f"{type(error).__name__}: {_generalize(str(error))}"


def _generalize(text: str) -> str:
    """Return a message without what differs from input to input."""
    text = re.sub(r"(/[\w.\-]+)+", "PATH", text[:300])
    text = re.sub(r"'[^']*'|\"[^\"]*\"|b'.*?'", "'…'", text)
    return re.sub(r"0x[0-9a-f]+|[-+]?\d[\d_.,e+]*", "N", text)[:120].replace("\n", " ")


def _describe(error: BaseException) -> str:
    """Return type and place of an error: the innermost line of Penstock, which caused it."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if frame.filename.startswith(_SOURCE)] or frames[-1:]
    last = inner[-1] if inner else None
    where = "" if last is None else f" in {Path(last.filename).stem}.{last.name}"
    return f"{_template(error)}{where}"
