"""Run the tests in groups of folders, some groups at once: `make test`, `make test-all`; `measure` writes their times.

A group is a process of its own, which imports and collects only its folders: that is what a fork in a test copies, and
it is done once. Processes that share all tests would each collect all of them.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SECONDS = TESTS / "seconds.json"
# What takes longest comes first, so that the last groups are short. The empty group is the rest: all other folders.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("faults",),
    ("recipes",),
    (),
    ("docs", "files"),
    ("source",),
    ("convert",),
    ("recipes/webdataset", "recipes/streams", "recipes/mixture", "contracts"),
    ("run", "feed", "observe"),
    ("laws", "plan"),
    ("shard",),
    ("source/tar", "source/table", "source/files", "source/select"),
)
_NO_TESTS = 5  # exit code of pytest
_LEAST_SECONDS = 0.4  # all cases of a test together; what takes less is not written down


def arrange_groups() -> dict[str, list[str]]:
    """Return the paths of each group, and what of them other groups have; every folder of tests is in one group."""
    named = [name for group in GROUPS for name in group]
    tops = {name.split("/")[0] for name in named}
    rest = [path.name for path in sorted(TESTS.iterdir()) if path.name not in tops and any(path.rglob("test_*.py"))]
    groups = {}
    for group in GROUPS:
        apart = [name for name in named if name not in group and name.split("/")[0] in group]
        paths = [f"tests/{name}" for name in group or rest]
        groups[", ".join(group) or "the rest"] = [*paths, *(f"--ignore=tests/{name}" for name in apart)]
    return groups


def leave_out_slow() -> list[str]:
    """Return the options of pytest that leave slow tests out; files that were never measured are not even imported."""
    slow = [name for name, seconds in json.loads(SECONDS.read_text()).items() if seconds is None]
    apart = [name for name in slow if (ROOT / name).is_file() and "mark.canary(" not in (ROOT / name).read_text()]
    return ["-m", "not slow", *(f"--ignore={name}" for name in apart)]


def run_groups(groups: dict[str, list[str]], options: Sequence[str], at_once: int) -> list[str]:
    """Run them; print a line for each, and all that one says that fails. Return commands that run those again."""
    printing = threading.Lock()

    def run(name: str) -> str | None:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *options, *groups[name]]
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would wait for whatever a crash leaves
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
            output.seek(0)
            lines = output.read().strip().splitlines() or ["it said nothing"]
        good = done.returncode in (0, _NO_TESTS)
        with printing:
            if not good:
                print(*lines, sep="\n")
            said = lines[-1].strip("= ") if good else f"FAILED with exit code {done.returncode}"
            print(f"{name}: {said} [{time.monotonic() - begin:.0f} s]", flush=True)
        return None if good else shlex.join([*command[:3], *options[:2], *groups[name]])

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return [command for command in pool.map(run, groups) if command is not None]
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def write_seconds(folder: Path) -> None:
    """Write the mean CPU seconds of a case of each test that takes long, from the lines of `penstock_slow.measure`."""
    took: dict[str, list[float]] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            name, seconds = json.loads(line)
            took.setdefault(name, []).append(seconds)
    long = {name: all_of_it for name, all_of_it in took.items() if sum(all_of_it) >= _LEAST_SECONDS}
    means = {name: round(sum(long[name]) / len(long[name]), 2) for name in sorted(long)}
    SECONDS.write_text(json.dumps({name: max(mean, 0.01) for name, mean in means.items()}, indent=0) + "\n")


def main() -> int:
    """Return 0 if all groups passed."""
    parser = argparse.ArgumentParser(description="Run the tests in groups of folders, some groups at once.")
    parser.add_argument("tests", nargs="?", choices=("quick", "all", "measure"), default="quick")
    parser.add_argument(
        "--at-once", type=int, default=0, help="groups at once; 0: twice as many as cores, as many to measure"
    )
    chosen = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    # Tests wait for the disk and for processes that they start: two groups at once leave two of five seconds unused.
    at_once = chosen.at_once or (cores if chosen.tests == "measure" else 2 * cores)
    if chosen.tests == "all":
        os.environ.setdefault("PENSTOCK_TESTS", "all")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.tests == "measure":
            os.environ["PENSTOCK_SECONDS_FOLDER"] = folder
        failed = run_groups(arrange_groups(), leave_out_slow() if chosen.tests == "quick" else [], at_once)
        if chosen.tests == "measure":
            write_seconds(Path(folder))
    print(f"{len(failed)} groups failed" if failed else "All groups passed", f"in {time.monotonic() - begin:.0f} s.")
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
