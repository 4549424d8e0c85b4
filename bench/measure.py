"""How things are measured here: interleaved repeats, each in a process of its own, medians, ratios within one run.

The machine is shared and noisy, so a figure alone says little. Every repeat measures all contenders one after the
other, and a ratio is taken within a repeat before the median over repeats.
"""

import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Contender", "Result", "alone", "measured", "peak_private_mb", "printed", "saved"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the job; `run` returns units per second and is importable, since it runs in a fresh process."""

    name: str
    run: Callable[..., float]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What one contender reached over all repeats."""

    name: str
    rate: float
    ratio: float
    ratio_low: float
    ratio_high: float
    private_mb: float
    rates: tuple[float, ...] = ()
    """Of each repeat."""


def measured(contenders: list[Contender], repeats: int, limits: int = 1) -> list[Result]:
    """Measure all contenders, interleaved; the best of the first `limits` is what all are compared with."""
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    memory: dict[str, float] = {contender.name: 0.0 for contender in contenders}
    began = time.perf_counter()
    for repeat in range(repeats):
        for number, contender in enumerate(contenders):
            rate, private_mb = alone(_run, contender)
            rates[contender.name].append(rate)
            memory[contender.name] = max(memory[contender.name], private_mb)
            done = repeat * len(contenders) + number + 1
            left = (time.perf_counter() - began) / done * (repeats * len(contenders) - done)
            print(
                f"  repeat {repeat + 1}/{repeats}: {contender.name:28s} {rate:14,.0f}/s   about {left:.0f} s left",
                flush=True,
            )
    limit = [max(found) for found in zip(*(rates[contender.name] for contender in contenders[:limits]), strict=True)]
    results = []
    for name, found in rates.items():
        ratios = [rate / most for rate, most in zip(found, limit, strict=True)]
        middle = statistics.median(ratios)
        rate = statistics.median(found)
        results.append(Result(name, rate, middle, min(ratios), max(ratios), memory[name], tuple(found)))
    return results


def alone(job: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as process:
        return process.submit(job, *arguments).result()


def _run(contender: Contender) -> tuple[float, float]:
    return contender.run(*contender.arguments), peak_private_mb()


def peak_private_mb() -> float:
    """Return the private memory of this process in MB: anonymous and shared pages, without the page cache."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def printed(title: str, unit: str, results: Iterable[Result]) -> None:
    """Print a Markdown table."""
    print(f"\n## {title}\n\n| contender | {unit}/s | ratio to limit | lowest – highest | private MB |")
    print("|---|---|---|---|---|")
    for result in results:
        spread = f"{result.ratio_low:.2f} – {result.ratio_high:.2f}"
        print(f"| {result.name} | {result.rate:,.0f} | {result.ratio:.2f} | {spread} | {result.private_mb:.0f} |")
    print()


def saved(path: Path, name: str, results: Iterable[Any]) -> None:
    """Add the results, which are dataclasses, to a JSON file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[name] = [asdict(result) for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2))
