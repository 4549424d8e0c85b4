"""`python -m bench [NAME ...]`: measures all workloads, or the named ones, one after the other, into a file of results.

`cold`, `remote`, `peers` (those with other packages) and `ours` (those without) name several. A workload that fails
does not stop the others. `python -m bench.render` then writes the figures into the documentation.
`python -m bench ab OLD NEW` compares two commits instead.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import ab
from bench.alone import environment
from bench.peers import peers_python
from bench.result_file import RESULTS, Quiet, Watch, begin_run, look, mark_tables, note_state, read_rows
from bench.sizes import QUICK_VARIABLE
from bench.workloads import GROUPS, WORKLOADS, Workload

_ROOT = Path(__file__).parent.parent
_SETTLE_TRIES = 10


def main() -> int:
    """Run the workloads that the command line names; return the exit code."""
    if sys.argv[1:2] == ["ab"]:
        return ab.main(sys.argv[2:])
    chosen = _parse()
    names = [name for given in chosen.names or WORKLOADS for name in GROUPS.get(given, [given])]
    workloads = [WORKLOADS[name] for name in dict.fromkeys(names)]
    if not chosen.without_peers and peers_python() is None:
        without = [workload.name for workload in workloads if workload.peers]
        workloads = [workload for workload in workloads if not workload.peers]
        if without:
            print(f"Left out without the peers' environment: {', '.join(without)}. `make bench BENCH=peers` runs them.")
    quiet = look()
    if not quiet.is_quiet and not chosen.busy:
        print(f"The machine is busy: {quiet}. Wait until it is quiet, or measure all the same with --busy.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        results = chosen.results or (Path(folder) / "results" if chosen.quick else RESULTS)
        out = begin_run(quiet, results)
        failures = _run_all(workloads, chosen, chosen.data or Path(folder), out)
        print("Nothing is kept of a quick run." if results.is_relative_to(folder) else f"Saved to {out}.")
    for name, reason in failures.items():
        print(f"FAILED {name}: {reason}")
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    known = ", ".join([*WORKLOADS, *GROUPS])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}; all by default")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (default: those of each workload, 1 to 3)")
    parser.add_argument("--minutes", type=float, help="begin no workload that would end after so many minutes")
    parser.add_argument("--quick", action="store_true", help="little data, one repeat, nothing kept: does it run?")
    parser.add_argument("--data", type=Path, help="keep generated data here (default: a temporary folder)")
    parser.add_argument("--results", type=Path, help="write the results into this folder (default: bench/results)")
    parser.add_argument("--busy", action="store_true", help="measure even if other programs are running, and say so")
    parser.add_argument(
        "--without-peers", action="store_true", help="run workloads with other packages without them, if need be"
    )
    parser.add_argument("--list", action="store_true", help="print the workloads and their minutes, and end")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {*WORKLOADS, *GROUPS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use {known}")
    if chosen.list:
        for workload in WORKLOADS.values():
            print(f"{workload.name:20s} {workload.minutes:4.1f} min{'   with peers' if workload.peers else ''}")
        print(f"{'all':20s} {sum(workload.minutes for workload in WORKLOADS.values()):4.1f} min")
        sys.exit(0)
    return chosen


def _run_all(workloads: list[Workload], chosen: argparse.Namespace, folder: Path, out: Path) -> dict[str, str]:
    """Run workloads one after the other; return why some of them have no results."""
    failures: dict[str, str] = {}
    began, speed = time.monotonic(), 1.0
    for number, workload in enumerate(workloads):
        passed = (time.monotonic() - began) / 60
        left = speed * sum(later.minutes for later in workloads[number:])
        if chosen.minutes and passed + speed * workload.minutes > chosen.minutes:
            failures[workload.name] = f"not begun: {chosen.minutes:g} minutes are nearly over"
            continue
        told = "" if chosen.quick else f", about {left:.0f} min left"
        print(f"# [{number + 1}/{len(workloads)}] {workload.name} ({passed:.0f} min{told})", flush=True)
        reason = _run_one(workload, chosen, folder, out)
        if reason:
            failures[workload.name] = reason
            print(f"# {workload.name} failed: {reason}", flush=True)
        else:
            taken = (time.monotonic() - began) / 60 - passed
            print(f"# {workload.name} took {taken:.1f} min", flush=True)
        expected = sum(earlier.minutes for earlier in workloads[: number + 1])
        speed = max(0.2, (time.monotonic() - began) / 60 / expected)
    return failures


def _run_one(workload: Workload, chosen: argparse.Namespace, folder: Path, out: Path) -> str:
    """Run one in a process of its own, and mark its tables if others were busy meanwhile; return why it failed."""
    before = _settle(chosen.busy)
    note_state(out, before)
    known = read_rows(out)
    repeats = 1 if chosen.quick else chosen.repeats or workload.repeats
    watch = Watch()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.workloads", workload.name, str(folder), str(out), str(repeats)],
        env=environment() | ({QUICK_VARIABLE: "1"} if chosen.quick else {}),
        cwd=_ROOT,
        start_new_session=True,
    )
    reason = ""
    try:
        code = process.wait(timeout=60 * (10 + 4 * workload.minutes * (chosen.repeats or 1)))
        reason = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        reason = "took far longer than it should"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    mark_tables(out, known, before, watch.others())
    return reason


def _settle(is_busy: bool) -> Quiet:
    """Wait until the workload before has written everything; return the state of the machine."""
    quiet = look(1)
    for _ in range(0 if is_busy else _SETTLE_TRIES):
        if quiet.is_quiet:
            break
        quiet = look(1)
    return quiet


if __name__ == "__main__":
    sys.exit(main())
