"""The fuzz as a part of the campaign, in a program of its own: it forks, and must have no threads."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.campaign.result import Result, Say

__all__ = ["run_fuzz"]

_ROOT = Path(__file__).parents[3]
_START_SECONDS = 20  # imports, and the end of what is being tried when the time is up
_INPUTS = 200_000


def run_fuzz(budget_seconds: float, seed: int, say: Say) -> list[Result]:
    """Give random inputs to every parser; the input of each finding is written into tests/corpus."""
    seconds = max(budget_seconds - _START_SECONDS, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        options = ["--save", "--inputs", str(_INPUTS), "--seconds", f"{seconds:.0f}", "--seed", str(seed)]
        command = [sys.executable, "-m", "bench.campaign.fuzz", *options, "--json", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "a pipe was asked for"
            for line in process.stdout:
                if " inputs in " in line:
                    say(" ".join(line.split()))
        if not path.exists():
            return [Result("fuzz", (), "random input to parsers", 0, [f"the fuzz ended with {process.returncode}"])]
        groups = json.loads(path.read_text())
    return [_sum_up(group, seed) for group in groups]


def _sum_up(group: dict[str, Any], seed: int) -> Result:
    outcomes = group["targets"]
    failures = [
        f"{outcome['target']}: {finding['kind']}: {finding['reason']}; its input is in tests/corpus/"
        f"{outcome['target']}, or: python -m bench.campaign.fuzz {outcome['target']} --seed {seed}"
        for outcome in outcomes
        for finding in outcome["findings"]
    ]
    trials = sum(outcome["inputs"] for outcome in outcomes)
    seconds = sum(outcome["seconds"] for outcome in outcomes)
    what = f"random input to parsers of {group['what']}"
    return Result("fuzz", tuple(group["cases"]), what, trials, failures, seconds)
