"""What `import penstock` costs: user and system time of fresh interpreters, with and without it."""

import resource
import subprocess
import sys
from pathlib import Path

from bench.measure import Contender, measured_ms, report
from bench.sizes import sized

__all__ = ["run"]

_STARTS = sized(10, 2)


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    results = measured_ms(
        [
            Contender("python -c pass", starts, ("pass",)),
            Contender("import penstock", starts, ("import penstock",)),
            Contender("penstock --help, as imported", starts, ("import penstock.cli",)),
            Contender("import numpy", starts, ("import numpy",)),
            Contender("import torch", starts, ("import torch",)),
        ],
        repeats,
    )
    report(out, "imports", results)


def starts(code: str) -> float:
    """Start interpreters one after the other; return the milliseconds of the processor that each takes."""
    count = 3 if "torch" in code else _STARTS
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(count):
        subprocess.run([sys.executable, "-c", code], check=True)  # our own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / count
