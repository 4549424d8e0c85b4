"""Run the fault cases on other libraries: `python -m bench.campaign.peers.run [PEER ...] [--cases 11,12] [--out FILE]`.

Each case runs in a process of its own, forked off one that has imported the library. One that does not end within its
time is a hang, one that dies is a crash; everything else is decided by comparing values.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

from bench.campaign.peers.adapter import NotOfferedError
from bench.campaign.peers.adapters import ADAPTERS
from bench.campaign.peers.hostile import HOSTILE
from bench.campaign.peers.judge import FAILURES, outcome_of, shorten
from bench.campaign.peers.loading import LOADING
from bench.campaign.peers.ranks import RANKS
from bench.campaign.peers.storage import STORAGE

RESULTS = Path(__file__).parent / "results.json"
CASES = dict(sorted({**STORAGE, **HOSTILE, **LOADING, **RANKS}.items()))
SECONDS = 170.0


def run_case(peer: str, number: int, folder: Path) -> tuple[str, str]:
    """Run a case in a forked process; return its outcome and a line about it."""
    answer = folder / "answer"
    child = os.fork()
    if child == 0:
        os.setsid()
        silence()
        try:
            found = attempt(peer, number, folder)
        except BaseException as error:
            found = "broken", shorten(error) + traceback.format_exc()
        answer.write_text(json.dumps(found))
        os._exit(0)
    status = wait(child, SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "hang", f"no end within {SECONDS:.0f} s"
    if not answer.exists():
        code = os.waitstatus_to_exitcode(status)
        return "crash", f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    outcome, detail = json.loads(answer.read_text())
    return outcome, " ".join(detail.replace(str(folder), "…").split())


def attempt(peer: str, number: int, folder: Path) -> tuple[str, str]:
    adapter = ADAPTERS[peer]
    try:
        outcome, detail = CASES[number](adapter, folder / "set")
    except NotOfferedError as error:
        return "not offered", str(error)
    except FAILURES as error:
        return outcome_of(error)
    return outcome, f"{detail} ({adapter.note})" if adapter.note and number in range(11, 20) else detail


def wait(child: int, seconds: float) -> int | None:
    """Return the exit status of a child; None if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    return None


def silence() -> None:
    """Send what libraries print to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def run_peer(peer: str, numbers: list[int]) -> dict[str, dict[str, str]]:
    found = {}
    home = Path(tempfile.mkdtemp(prefix=f"penstock-{peer}-"))
    os.environ["HOME"] = str(home)  # where some of them keep caches
    ADAPTERS[peer].import_package()
    for number in numbers:
        folder = home / str(number)
        folder.mkdir()
        began = time.monotonic()
        outcome, detail = run_case(peer, number, folder)
        found[str(number)] = {"outcome": outcome, "detail": detail[:220]}
        print(f"{peer} {number}: {outcome}: {detail[:600]} [{time.monotonic() - began:.1f} s]", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    return found


def isolate() -> None:
    """Start again with a /dev/shm of its own, where that is allowed: others use the one of the machine."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = "mount -t tmpfs tmpfs /dev/shm"
    if "PENSTOCK_PEERS_ALONE" in os.environ or subprocess.run([*namespace, "sh", "-c", mount], check=False).returncode:
        return
    os.environ["PENSTOCK_PEERS_ALONE"] = "1"
    os.execvp(
        "unshare",
        [*namespace, "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-m", __spec__.name, *sys.argv[1:]],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(ADAPTERS)}; default: all")
    parser.add_argument("--cases", help="numbers, with commas between; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    numbers = [int(number) for number in options.cases.split(",")] if options.cases else list(CASES)
    warnings.simplefilter("ignore")
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for peer in options.peers or ADAPTERS:
        # A process for each library, so that what one imports is not there for the next.
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            found = run_peer(peer, numbers)
            os.write(writing, json.dumps({"version": ADAPTERS[peer].version(), "cases": found}).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            return 1
        answer = json.loads(text)
        answer["cases"] = {**results.get(peer, {}).get("cases", {}), **answer["cases"]}
        answer["cases"] = dict(sorted(answer["cases"].items(), key=lambda entry: int(entry[0])))
        results[peer] = answer
        options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    broken = [entry for peer in results.values() for entry in peer["cases"].values() if entry["outcome"] == "broken"]
    return bool(broken)


if __name__ == "__main__":
    isolate()
    sys.exit(main())
