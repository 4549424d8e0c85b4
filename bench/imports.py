"""What `import penstock` costs: user and system time of fresh interpreters, with and without it."""

import resource
import subprocess
import sys
from pathlib import Path

from bench.measure import Contender, measured, printed, saved

__all__ = ["run"]

_STARTS = 20


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print; the limit is an interpreter that imports nothing."""
    results = measured(
        [
            Contender("limit: python -c pass", starts, ("pass",)),
            Contender("import penstock", starts, ("import penstock",)),
            Contender("penstock --help, as imported", starts, ("import penstock.cli",)),
            Contender("import numpy", starts, ("import numpy",)),
            Contender("import torch", starts, ("import torch",)),
        ],
        repeats,
    )
    printed("imports: interpreters started, per second of processor time", "interpreters", results)
    for result in results[1:]:
        print(f"{result.name}: {1000 / result.rate - 1000 / results[0].rate:.1f} ms above the limit")
    print()
    saved(out, "imports", results)


def starts(code: str) -> float:
    """Start interpreters one after the other; processor time, since the clock of a shared machine is noisy."""
    count = 3 if "torch" in code else _STARTS
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(count):
        subprocess.run([sys.executable, "-c", code], check=True)  # our own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return count / (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
