"""Call a function in a fresh process, of our environment or of that of the peers: nobody inherits caches or memory.

`python -m bench.alone RESULT` is such a process: it reads the call from its standard input.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import python_with

__all__ = ["alone", "environment"]

_ROOT = Path(__file__).parent.parent
_SOURCE_VARIABLE = "PENSTOCK_BENCH_SOURCE"
_MOST_SECONDS, _MOST_PEER_SECONDS = 900.0, 100.0


def alone(job: Callable[..., Any], *arguments: Any, peer: str = "") -> Any:
    """Call an importable function in a fresh process, and return what it returns.

    `peer` is a module: the process is of an environment that has it. What takes far too long is ended, with all
    processes that it has started.
    """
    python, seconds = (python_with(peer), _MOST_PEER_SECONDS) if peer else (sys.executable, _MOST_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        process = subprocess.Popen(
            [str(python), "-m", "bench.alone", str(result)],
            stdin=subprocess.PIPE,
            cwd=_ROOT,
            env=environment(),
        )
        try:
            process.communicate(pickle.dumps((job, arguments)), timeout=seconds)
        except BaseException as error:
            _end(process.pid)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"took longer than {seconds:.0f} seconds") from None
            raise
        if not result.exists():
            raise RuntimeError(f"the process ended with code {process.returncode}")
        found, value = pickle.loads(result.read_bytes())
    if not found:
        raise RuntimeError(value)
    return value


def environment(source: Path | None = None) -> dict[str, str]:
    """Return the variables of a process that measures and of its children; `source` is the `src` that they measure."""
    source = source or Path(os.environ.get(_SOURCE_VARIABLE) or _ROOT / "src")
    paths = [str(_ROOT), str(source), str(_ROOT / "tests" / "parts")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _SOURCE_VARIABLE: str(source)}


def _end(process_id: int) -> None:
    """End a process and all that it has started."""
    import psutil  # here, since the environments of peers may not have it

    try:
        first = psutil.Process(process_id)
        processes = [*first.children(recursive=True), first]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _serve(result: Path) -> None:
    try:
        job, arguments = pickle.load(sys.stdin.buffer)
        answer = (True, job(*arguments))
    except BaseException as error:  # told to who asked
        traceback.print_exc()
        answer = (False, f"{type(error).__name__}: {str(error).strip()}")
    unfinished = result.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(result)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
