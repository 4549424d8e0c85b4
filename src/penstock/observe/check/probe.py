"""What only another process can try: start workers, import packages. `run_probe` runs it as a script, for some time.

A package that cannot be imported may end the process, a driver may hang: neither must happen to the examination.
"""

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["run_probe"]

_METHODS = ("fork", "forkserver", "spawn")
_ANSWER_SECONDS = 30.0
_PROBE_SECONDS = 120.0
_POLL_SECONDS = 0.2
_DONE = b"null"


def run_probe(
    packages: Sequence[str], on_progress: Callable[[str, str, int, int, str], None], seconds: float = _PROBE_SECONDS
) -> dict[str, Any]:
    """Return what works in another process, within some seconds; what could not be tried is left out.

    Returns
    -------
    `start_methods`: seconds until a worker answered, or why it did not, by method. `imports`: empty, or the error, by
    package. `gpus`: names of the CUDA devices that torch finds. `ended`: why the process ended early, if it did.
    """
    # -P: the folder of this script is no place to import from.
    command = [sys.executable, "-P", __file__, *packages]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(  # noqa: S603  # this very file
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            lines, is_late = _read_lines(child, len(_METHODS) + len(packages), on_progress, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and the processes that it started
            child.communicate()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    ended = f"exit code {child.returncode}{last and f': {last}'}"
    return _merge_lines(lines, f"no answer within {seconds:.0f} s" if is_late else "" if _DONE in lines else ended)


def _read_lines(
    child: "subprocess.Popen[bytes]",
    total: int,
    on_progress: Callable[[str, str, int, int, str], None],
    seconds: float,
) -> tuple[list[bytes], bool]:
    """Return the lines that a process prints, and whether it was still running after some seconds."""
    assert child.stdout is not None
    out, read, until = child.stdout.fileno(), b"", time.monotonic() + seconds
    while time.monotonic() < until:
        on_progress("Workers, imports", "checks", read.count(b"\n"), total, "")
        if select.select([out], [], [], _POLL_SECONDS)[0]:
            more = os.read(out, 1 << 16)
            read += more
            if not more or read.endswith(_DONE + b"\n"):
                return read.splitlines(), False
    return read.splitlines(), True


def _merge_lines(lines: list[bytes], ended: str) -> dict[str, Any]:
    found: dict[str, Any] = {"start_methods": {}, "imports": {}, "gpus": [], "ended": ended}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # what a package prints while it is imported
            topic, name, value = json.loads(line)
            if topic == "gpus":
                found["gpus"].append(name)
            else:
                found[topic][name] = value
    return found


def _answer(pipe: Any) -> None:
    pipe.send(os.getpid())


def _try_method(method: str) -> float | str:
    """Start a worker; return the seconds until it answered, or why it did not."""
    began = time.monotonic()
    try:
        context: Any = mp.get_context(method)
        here, there = context.Pipe()
        worker = context.Process(target=_answer, args=(there,), daemon=True)
        worker.start()
        there.close()
        if not here.poll(_ANSWER_SECONDS):
            return f"no answer within {_ANSWER_SECONDS:.0f} s"
        here.recv()
        worker.join()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return time.monotonic() - began


def _try_import(package: str) -> str:
    try:
        importlib.import_module(package)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _print_answers(packages: list[str]) -> None:
    def write(*line: Any) -> None:
        print(json.dumps(line), flush=True)  # noqa: T201  # the answer, read by run_probe

    for method in _METHODS:  # before any package starts threads
        write("start_methods", method, _try_method(method))
    for package in packages:
        write("imports", package, _try_import(package))
    with contextlib.suppress(Exception):
        cuda = sys.modules["torch"].cuda
        for number in range(cuda.device_count()):
            write("gpus", cuda.get_device_name(number), None)
    print(_DONE.decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    _print_answers(sys.argv[1:])
