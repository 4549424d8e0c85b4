"""The file of a run, `bench/results/DATE-COMMIT.json`: the state of the machine, and the tables that were measured."""

import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers import peer_versions

__all__ = [
    "RESULTS",
    "Quiet",
    "Watch",
    "begin_run",
    "describe_machine",
    "look",
    "mark_tables",
    "note_state",
    "read_rows",
    "read_tables",
    "saved",
]

RESULTS = Path(__file__).parent / "results"
_LOOK_SECONDS = 3
_MOST_BUSY, _MOST_STOLEN = 0.1, 0.02
_MEANWHILE_BUSY, _MEANWHILE_STOLEN = 0.2, 0.1  # the kernel works for us, too: it writes what we have written
_PACKAGES = ("torch", "numpy")


@dataclass(frozen=True, slots=True)
class Quiet:
    """How busy the processors are with other programs: shares of the time of all of them."""

    busy: float
    stolen: float

    @property
    def is_quiet(self) -> bool:
        """Whether the figures of a run say something about the code."""
        return self.busy <= _MOST_BUSY and self.stolen <= _MOST_STOLEN

    def __str__(self) -> str:
        return f"{self.busy:.0%} of the processors in use, {self.stolen:.0%} taken by other machines"


def look(seconds: float = _LOOK_SECONDS) -> Quiet:
    """Watch the processors, and return how much of them others use."""
    watch = Watch()
    time.sleep(seconds)
    return watch.others()


class Watch:
    """The processors from now on: how much of them is used by others than this process and those it has started."""

    def __init__(self) -> None:
        self._ticks, self._seconds = _processor_ticks(), _own_seconds()

    def others(self) -> Quiet:
        """Return what others have used so far; processes that this one started are told apart once they have ended."""
        user, nice, system, idle, waiting, *rest = (
            after - first for after, first in zip(_processor_ticks(), self._ticks, strict=True)
        )
        stolen = rest[2] if len(rest) > 2 else 0
        total = max(1, user + nice + system + idle + waiting + sum(rest[:3]))
        own = (_own_seconds() - self._seconds) * os.sysconf("SC_CLK_TCK")
        return Quiet(max(0.0, user + nice + system - own) / total, stolen / total)


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _processor_ticks() -> list[int]:
    stat = Path("/proc/stat")
    if not stat.exists():  # another system: nothing is known, and nothing is refused
        return [0, 0, 0, 1, 0]
    return [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]


def begin_run(quiet: Quiet, folder: Path = RESULTS) -> Path:
    """Write what is known of a run before it begins; return its file. A run of the same day and commit is continued."""
    commit, changed = _commit()
    now = datetime.now(UTC)
    path = folder / f"{now:%Y-%m-%d}-{commit}.json"
    found = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    found["run"] = {
        "number": 1 + max((other["run"]["number"] for other in _read_files(folder)), default=0),
        "date": f"{now:%Y-%m-%d}",
        "commit": commit,
        "has_changes": changed,
        "processors": os.cpu_count(),
        "machine": describe_machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "peers": peer_versions(),
    }
    found["quiet"] = _state(quiet)
    _write(path, found)
    return path


def describe_machine() -> str:
    """Return the model of the processors and the size of the memory, as far as the system tells."""
    try:
        lines = [*Path("/proc/cpuinfo").read_text().splitlines(), *Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return ""
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    memory = round(int(told["MemTotal"].split()[0]) / 2**20)
    return f"{told.get('model name', platform.machine())}, {memory} GB"


def note_state(path: Path, quiet: Quiet) -> None:
    """Say in the file of a run how busy the machine is before the next tables."""
    _write(path, json.loads(path.read_text()) | {"quiet": _state(quiet)})


def read_rows(path: Path) -> dict[str, Any]:
    """Return the tables of a run so far."""
    tables: dict[str, Any] = json.loads(path.read_text())["tables"]
    return tables


def mark_tables(path: Path, known: dict[str, Any], before: Quiet, meanwhile: Quiet) -> None:
    """Write into the tables that are not `known` how busy others were: before and meanwhile, whichever is more."""
    content = json.loads(path.read_text())
    worst = Quiet(max(before.busy, meanwhile.busy), max(before.stolen, meanwhile.stolen))
    was_quiet = meanwhile.busy <= _MEANWHILE_BUSY and meanwhile.stolen <= _MEANWHILE_STOLEN
    for name, table in content["tables"].items():
        if table != known.get(name):
            table["quiet"] = asdict(worst) | {"is_quiet": before.is_quiet and was_quiet}
    _write(path, content)


def _state(quiet: Quiet) -> dict[str, Any]:
    return asdict(quiet) | {"is_quiet": quiet.is_quiet}


def saved(path: Path, name: str, results: Iterable[Any]) -> None:
    """Add a table to the file of a run; its rows are dataclasses."""
    found = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    found["tables"][name] = {"quiet": found.get("quiet"), "rows": [asdict(result) for result in results]}
    _write(path, found)


def read_tables(folder: Path = RESULTS) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the newest rows of each table, and the run that measured them, by the name of the table."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for content in sorted(_read_files(folder), key=lambda content: content["run"]["number"]):
        found |= {name: (table, content["run"]) for name, table in content["tables"].items()}
    return found


def _read_files(folder: Path) -> list[dict[str, Any]]:
    """Return the content of all files; runs are numbered, because a clone of the tree has no times of its files."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _commit() -> tuple[str, bool]:
    """Return the commit of the tree, and whether files differ from it."""
    here = Path(__file__).parent.parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=here, capture_output=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--", "src", "bench"], cwd=here, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    return commit.stdout.decode().strip(), bool(status.stdout)
