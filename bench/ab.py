"""`python -m bench ab OLD NEW [NAME ...]` compares the speed and memory of two commits.

OLD and NEW are paths of checkouts or revisions of git; `make` gives each an environment of its own. The benchmarks of
this checkout measure both, in pairs: old then new, new then old, each workload in a process of its own with data of its
own. Every pair is a line of one file, so that a run that is stopped continues. How much two runs of the same code
differ is measured first, as OLD against OLD, once for each machine and workload.

A figure falls if the median of new over old is worse than 1 by more than 5 % and the noise. The exit code is 1 if any
falls.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.alone import environment
from bench.result_file import RESULTS, Watch, describe_machine, look, read_rows
from bench.sizes import COMPARED_VARIABLE, QUICK_VARIABLE
from bench.workloads import GROUPS, WORKLOADS, Workload

__all__ = ["Pair", "Side", "Verdict", "judge", "main", "read_figures"]

_ROOT = Path(__file__).parent.parent
_PAIRS = 8
_TOLERANCE = 0.05
_MOST_QUICK_MINUTES = 10.0
_MOST_BUSY = 0.2
# Figures that are judged, by their fields: what grows if the code gets better, and what grows if it gets worse.
_MORE_IS_BETTER = {"rate", "rate_mb", "items_per_s", "limited_mb", "kept_in_use"}
_LESS_IS_BETTER = {
    *("ms", "start_ms", "resume_ms", "first_ms", "open_ms", "later_ms", "again_ms", "cpu_ms", "best_us", "at_us"),
    *("seconds", "seconds_with_chunks", "private_mb", "peak_mb", "open_mb", "grown_mb", "mb", "held", "peak"),
    *("round_trips", "requests", "downloaded", "read", "share", "waiting", "total"),
}
_MEANINGLESS = {"private_mb": 8.0, "peak_mb": 1.0, "open_mb": 8.0, "grown_mb": 8.0, "mb": 8.0, "held": 0.1, "peak": 0.1}
_MEANINGLESS |= {"share": 0.01, "waiting": 0.01, "ms": 0.5, "first_ms": 0.5, "start_ms": 0.1, "resume_ms": 0.1}
"""Differences that say nothing whatever their ratio: both values are compared with so much added."""

Figures = dict[str, float]
"""Values by `TABLE | ROW | FIELD`."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout that is measured: what it is called in the file, its sources, its interpreter."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / ".venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides of a workload, measured one after the other."""

    old: Figures
    new: Figures


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure of both sides: medians, the median of new over old within the pairs (above 1 is better), the noise."""

    name: str
    old: float
    new: float
    ratio: float
    noise: float

    @property
    def falls(self) -> bool:
        """Whether the new side is worse beyond noise."""
        return self.ratio < 1 - _TOLERANCE - self.noise

    def __str__(self) -> str:
        values = f"{self.old:12,.4g} -> {self.new:12,.4g}   {self.ratio:6.3f}   noise {self.noise:5.3f}"
        return f"{self.name:78s} {values}   {'FALLS' if self.falls else 'holds'}"


def main(arguments: list[str]) -> int:
    """Measure and judge; return the exit code."""
    chosen = _parse(arguments)
    names = [name for given in chosen.names or WORKLOADS for name in GROUPS.get(given, [given])]
    workloads = [WORKLOADS[name] for name in dict.fromkeys(names)]
    with tempfile.TemporaryDirectory() as temporary:
        data = chosen.data or Path(temporary)
        old, new = (_open_side(given, data) for given in (chosen.old, chosen.new))
        log = _Log(chosen.results, chosen.quick)
        minutes = sum(
            _minutes(workload, chosen) * (1 - len(log.read(workload, sides)) / chosen.pairs)
            for workload in workloads
            for sides in {(old, old), (old, new)}
        )
        print(f"{old.name} against {new.name}: {len(workloads)} workloads, about {minutes:.0f} minutes.", flush=True)
        if chosen.quick and minutes > _MOST_QUICK_MINUTES:
            print(f"A quick run takes {_MOST_QUICK_MINUTES:.0f} minutes at most if fewer workloads are named.")
        falls = []
        for workload in workloads:
            noise = _measure(workload, (old, old), chosen, data, log)
            pairs = noise if new == old else _measure(workload, (old, new), chosen, data, log)
            verdicts = judge(pairs, noise)
            print(f"\n## {workload.name}, {len(pairs)} pairs\n", *verdicts, sep="\n", flush=True)
            falls += [verdict for verdict in verdicts if verdict.falls]
    print(f"\n{len(falls)} figures fall." if falls else "\nNothing falls.", *falls, sep="\n")
    return 1 if falls else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench ab", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="the checkout, or revision of git, that is compared with")
    parser.add_argument("new", metavar="NEW", help="the one that is judged; the same as OLD: only the noise")
    known = ", ".join([*WORKLOADS, *GROUPS])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}; all by default")
    parser.add_argument("--pairs", type=int, default=_PAIRS, help=f"of each workload (default and least: {_PAIRS})")
    parser.add_argument("--quick", action="store_true", help="a quarter of the data: a few workloads in 10 minutes")
    parser.add_argument("--data", type=Path, help="keep checkouts and generated data here (default: a new folder)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "ab.jsonl", help="the file that pairs are added to, and read from"
    )
    parser.add_argument("--busy", action="store_true", help="measure even if other programs are running")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - {*WORKLOADS, *GROUPS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use {known}")
    if chosen.pairs < _PAIRS:
        parser.error(f"--pairs must be {_PAIRS} or more, got {chosen.pairs}")
    return chosen


def _minutes(workload: Workload, chosen: argparse.Namespace) -> float:
    """Return about how long all pairs of a workload take; peers and limits take two of five minutes of a whole run."""
    return 2 * chosen.pairs * workload.minutes / workload.repeats * (0.15 if chosen.quick else 0.6)


def _open_side(given: str, data: Path) -> Side:
    """Return the checkout of a path or a revision, with its environment."""
    folder = Path(given)
    if not (folder / "src" / "penstock").is_dir():
        commit = _git("rev-parse", "--short=10", f"{given}^{{commit}}")
        folder = data / "checkouts" / commit
        if not folder.exists():
            _git("clone", "--quiet", "--no-checkout", str(_ROOT), str(folder))
            _git("checkout", "--quiet", "--detach", commit, folder=folder)
    folder = folder.resolve()
    subprocess.run(
        ["make", "--quiet", "-C", str(folder), ".venv/.ready", "src/penstock/source/libnative.so"], check=True
    )
    name = _git("rev-parse", "--short=10", "HEAD", folder=folder)
    changes = _git("diff", "HEAD", "--", "src", folder=folder)
    return Side(f"{name}+{hashlib.blake2b(changes.encode(), digest_size=4).hexdigest()}" if changes else name, folder)


def _git(*arguments: str, folder: Path = _ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


class _Log:
    """The file of pairs: a line each, of any machine, workload and sides."""

    def __init__(self, path: Path, is_quick: bool) -> None:
        self._path, self._about = path, {"machine": describe_machine(), "quick": is_quick}

    def _key(self, workload: Workload, sides: tuple[Side, Side]) -> dict[str, Any]:
        # Noise is that of the machine and the workload, whichever code was measured against itself.
        names = ["", ""] if sides[0] == sides[1] else [side.name for side in sides]
        return self._about | {"workload": workload.name, "sides": names}

    def read(self, workload: Workload, sides: tuple[Side, Side]) -> list[Pair]:
        """Return the pairs that were measured before."""
        if not self._path.exists():
            return []
        key = self._key(workload, sides)
        lines = map(json.loads, self._path.read_text().splitlines())
        return [Pair(line["old"], line["new"]) for line in lines if line["about"] == key]

    def add(self, workload: Workload, sides: tuple[Side, Side], pair: Pair, busy: float) -> None:
        """Add a pair."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"about": self._key(workload, sides), "busy": round(busy, 3), "old": pair.old, "new": pair.new}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _measure(
    workload: Workload, sides: tuple[Side, Side], chosen: argparse.Namespace, data: Path, log: _Log
) -> list[Pair]:
    """Return the pairs of a workload: those of the file, and as many more as are missing."""
    pairs = log.read(workload, sides)
    began, known = time.monotonic(), len(pairs)
    while len(pairs) < chosen.pairs:
        _wait_until_quiet(chosen.busy)
        watch = Watch()
        turns = (0, 1) if len(pairs) % 2 == 0 else (1, 0)
        found = {turn: _run(workload, sides[turn], chosen.quick, data / sides[turn].name) for turn in turns}
        busy = watch.others().busy
        if busy > _MOST_BUSY and not chosen.busy:
            print(f"  measured again: others used {busy:.0%} of the processors", flush=True)
            continue
        pairs.append(Pair(found[0], found[1]))
        log.add(workload, sides, pairs[-1], busy)
        what = "noise of " if sides[0] == sides[1] else ""
        left = (time.monotonic() - began) / (len(pairs) - known) * (chosen.pairs - len(pairs))
        print(f"  {what}{workload.name}: {len(pairs)} of {chosen.pairs} pairs, about {left:.0f} s left", flush=True)
    return pairs


def _wait_until_quiet(is_busy: bool) -> None:
    while not is_busy and not (quiet := look(2)).is_quiet:
        print(f"  waiting: {quiet}", flush=True)


def _run(workload: Workload, side: Side, is_quick: bool, data: Path) -> Figures:
    """Run a workload once with the code of a side; return its figures."""
    data.mkdir(parents=True, exist_ok=True)
    variables = {COMPARED_VARIABLE: "1"} | ({QUICK_VARIABLE: "1"} if is_quick else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tables.json"
        done = subprocess.run(
            [str(side.python), "-m", "bench.workloads", workload.name, str(data), str(out), "1"],
            cwd=_ROOT,
            env=environment(side.folder / "src") | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * (10 + 4 * workload.minutes),
        )
        if done.returncode:
            sys.exit(f"{workload.name} failed with {side.name}:\n{done.stderr[-2000:]}")
        return read_figures(read_rows(out))


def read_figures(tables: dict[str, Any]) -> Figures:
    """Return the judged figures of the tables of a run."""
    return {
        f"{table} | {row['name']} | {field}": float(f"{value:.5g}")
        for table, content in tables.items()
        for row in content["rows"]
        if not row.get("failure")
        for field, value in row.items()
        if field in _MORE_IS_BETTER | _LESS_IS_BETTER or (table, field) == ("small items sizes", "ratio")
    }


def judge(pairs: list[Pair], noise: list[Pair]) -> list[Verdict]:
    """Compare the figures that both sides have; the noise is that of pairs of the same code."""
    verdicts = []
    for name in _shared(pairs):
        ratios = _ratios(name, pairs)
        still = _ratios(name, noise) if name in _shared(noise) else ratios
        old, new = (statistics.median(side[name] for side in sides) for sides in zip(*_sides(pairs), strict=True))
        verdicts.append(Verdict(name, old, new, statistics.median(ratios), _spread(still)))
    return verdicts


def _sides(pairs: list[Pair]) -> Iterator[tuple[Figures, Figures]]:
    return ((pair.old, pair.new) for pair in pairs)


def _shared(pairs: list[Pair]) -> list[str]:
    """Return the figures that both sides of all pairs have: rows may come and go."""
    return [name for name in pairs[0].old if all(name in side for sides in _sides(pairs) for side in sides)]


def _ratios(name: str, pairs: list[Pair]) -> list[float]:
    """Return new over old of a figure in all pairs, such that more is better."""
    field = name.rsplit(" | ", 1)[1]
    add = _MEANINGLESS.get(field, 1e-12)
    ratios = [(max(new[name], 0) + add) / (max(old[name], 0) + add) for old, new in _sides(pairs)]
    return ratios if field in _MORE_IS_BETTER else [1 / ratio for ratio in ratios]


def _spread(ratios: list[float]) -> float:
    """Return how far the median of as many ratios of the same code is from 1 by chance: the notch of a box plot."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return max(1.57 * (high - low) / len(ratios) ** 0.5, abs(statistics.median(ratios) - 1))
