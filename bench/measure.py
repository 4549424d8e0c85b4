"""How things are measured here: interleaved repeats, each in a process of its own, medians, ratios within one run.

The machine is shared and noisy, so a figure alone says little. Every repeat measures all contenders one after the
other, and a ratio is taken within a repeat before the median over repeats.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.alone import alone
from bench.peers import has_peer, kind_of
from bench.result_file import saved
from bench.sizes import is_compared

__all__ = [
    "Contender",
    "Result",
    "Time",
    "alone",
    "best_ms",
    "measured",
    "measured_ms",
    "peak_private_mb",
    "report",
    "saved",
]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the job; `run` returns units per second and is importable, since it runs in a fresh process."""

    name: str
    run: Callable[..., float]
    arguments: tuple[Any, ...] = ()
    needs: str = ""
    """The module of a peer, in whose environment it runs; it is left out if that module is not there."""


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

    failure: str = ""
    """Why a peer has no figures."""


@dataclass(frozen=True, slots=True)
class Time:
    """How long something took over all repeats."""

    name: str
    ms: float
    lowest: float
    highest: float
    failure: str = ""
    """Why a peer has no figures."""


def measured(contenders: list[Contender], repeats: int, limits: int = 1) -> list[Result]:
    """Measure all contenders, interleaved; the best of the first `limits` is what all are compared with."""
    found = _Found.collect(contenders, repeats, "/s")
    limit = [max(rates) for rates in zip(*list(found.figures.values())[:limits], strict=True)]
    results = []
    for name, rates in found.figures.items():
        if name in found.failures:
            results.append(Result(name, 0.0, 0.0, 0.0, 0.0, 0.0, (), found.failures[name]))
            continue
        ratios = [rate / most for rate, most in zip(rates, limit, strict=True)]
        middle, rate = statistics.median(ratios), statistics.median(rates)
        results.append(Result(name, rate, middle, min(ratios), max(ratios), found.memory[name], tuple(rates)))
    return results


def measured_ms(contenders: list[Contender], repeats: int) -> list[Time]:
    """Measure contenders whose functions return milliseconds, interleaved."""
    found = _Found.collect(contenders, repeats, " ms")
    return [
        Time(name, 0.0, 0.0, 0.0, found.failures[name])
        if name in found.failures
        else Time(name, statistics.median(times), min(times), max(times))
        for name, times in found.figures.items()
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    """What contenders returned, by their names."""

    figures: dict[str, list[float]]
    memory: dict[str, float]
    failures: dict[str, str]

    @classmethod
    def collect(cls, contenders: list[Contender], repeats: int, unit: str) -> "_Found":
        if is_compared():
            contenders = [contender for contender in contenders if kind_of(contender.name) == "ours"]
        present = [contender for contender in contenders if not contender.needs or has_peer(contender.needs)]
        for contender in contenders:
            if contender not in present:
                print(f"  {contender.name} is left out: {contender.needs} is not installed", flush=True)
        found = cls({one.name: [] for one in present}, {one.name: 0.0 for one in present}, {})
        began = time.perf_counter()
        for repeat in range(repeats):
            for number, contender in enumerate(present):
                if contender.name in found.failures:
                    continue
                told = found.measure(contender, unit)
                done = repeat * len(present) + number + 1
                left = (time.perf_counter() - began) / done * (repeats * len(present) - done)
                print(f"  {repeat + 1}/{repeats}: {contender.name:50s} {told}   about {left:.0f} s left", flush=True)
        return found

    def measure(self, contender: Contender, unit: str) -> str:
        """Run a contender once; return what came of it. A peer that fails is noted, one of ours ends the workload."""
        try:
            figure, private_mb = alone(_run, contender, peer=contender.needs)
        except RuntimeError as error:
            if not contender.needs:
                raise
            self.failures[contender.name] = str(error).splitlines()[0][:200]
            return f"failed: {self.failures[contender.name]}"
        self.figures[contender.name].append(figure)
        self.memory[contender.name] = max(self.memory[contender.name], private_mb)
        return f"{figure:14,.0f}{unit}"


def _run(contender: Contender) -> tuple[float, float]:
    return contender.run(*contender.arguments), peak_private_mb()


def peak_private_mb() -> float:
    """Return the private memory of this process in MB: anonymous and shared pages, without the page cache."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def best_ms(job: Callable[[], Any], tries: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the milliseconds of the fastest of a few calls: what disturbs a call only ever makes it longer."""
    found = []
    for _ in range(tries):
        began = clock()
        job()
        found.append(1000 * (clock() - began))
    return min(found)


def report(out: Path, name: str, rows: Iterable[Any]) -> None:
    """Print a table, and save it to the file of the run; rows are dataclasses of one kind that begin with `name`."""
    rows = list(rows)
    if not rows:  # of a comparison: all are limits or peers
        return
    fields = [field for field in rows[0].__slots__ if field not in ("rates", "failure")]
    print(f"\n## {name}\n\n| {' | '.join(fields)} |\n|{'---|' * len(fields)}")
    for row in rows:
        cells = ["failed" if getattr(row, "failure", "") else _cell(getattr(row, field)) for field in fields[1:]]
        print(f"| {' | '.join([str(getattr(row, fields[0])), *cells])} |")
    print(flush=True)
    saved(out, name, rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
