"""`python -m bench.campaign [PART ...] [--minutes M] [--seed S] [--write]`: break things at random, and count.

A part is named with or without a trial: `kills`, `kills/training-fork`, `kills/training-fork/17`.
"""

import argparse
import os
import secrets
import sys
import time
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
_PARTS = str(Path(__file__).parents[2] / "tests" / "parts")
if _PARTS not in sys.path:
    sys.path.insert(0, _PARTS)

from bench.campaign.parts import PARTS, SHARES, run_selection  # noqa: E402
from bench.campaign.result import Result, Say  # noqa: E402
from bench.campaign.table import (  # noqa: E402
    PAGE,
    make_tables,
    page_with,
    read_peers,
    read_results,
    write_results,
)


def main() -> int:
    """Run the campaign; return 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long it may take (default: 20)")
    parser.add_argument("--seed", type=int, help="repeats the random choices of a campaign (default: another one)")
    parser.add_argument("--write", action="store_true", help="store the counts, and the table in guarantees.md")
    parser.add_argument(
        "--tables", action="store_true", help="only write the table in guarantees.md, from what is stored"
    )
    options = parser.parse_args()
    if options.tables:
        write_page()
        return 0
    chosen = options.parts or list(PARTS)
    for name in chosen:
        if name.partition("/")[0] not in PARTS:
            parser.error(f"PART must be one of {', '.join(PARTS)}, got {name!r}.")
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"Fault campaign of {options.minutes:g} minutes, seed {seed}: {', '.join(chosen)}", flush=True)
    results = run_parts(chosen, 60 * options.minutes, seed)
    if options.write:
        write_results(results, seed)
        write_page()
    print(make_tables([vars(result) for result in results], read_peers()))
    failures = [failure for result in results for failure in result.failures]
    print(f"\n{sum(result.trials for result in results):,} trials, {len(failures)} failures, seed {seed}")
    print(*failures, sep="\n")
    return bool(failures)


def write_page() -> None:
    """Write the tables of what is stored into the page."""
    PAGE.write_text(page_with(PAGE.read_text(), make_tables(read_results()["results"], read_peers())))


def run_parts(chosen: list[str], seconds: float, seed: int) -> list[Result]:
    """Run parts one after the other; time that one did not need goes to those after it."""
    began, results = time.monotonic(), []
    for number, name in enumerate(chosen):
        left = [SHARES.get(other.partition("/")[0], 1) for other in chosen[number:]]
        budget = max((began + seconds - time.monotonic()) * left[0] / sum(left), 1.0)
        say = make_say(name, began, seconds)
        say(f"{budget:.0f} s", always=True)
        found = run_selection(name, budget, seed, say)
        trials, failures = sum(result.trials for result in found), sum(len(result.failures) for result in found)
        say(f"done: {trials:,} trials, {failures} failures", always=True)
        results += found
    return results


def make_say(name: str, began: float, seconds: float) -> Say:
    """Return a function that prints a line at most every five seconds."""
    last = 0.0

    def say(text: str, *, always: bool = False) -> None:
        nonlocal last
        now = time.monotonic()
        if always or now - last >= 5:
            last = now
            left = max(began + seconds - now, 0)
            print(f"[{_clock(now - began)}, {_clock(left)} left] {name}: {text}", flush=True)

    return say


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    sys.exit(main())
