"""The run file: the result of a watch as JSON, from which a report can be made anywhere, at any later time."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from penstock.core.errors import DamageError, OptionError, PenstockError, SourceError
from penstock.core.text import cause
from penstock.core.version import __version__
from penstock.files.durable import write_aside
from penstock.files.regular import open_regular, read_regular
from penstock.observe.curves import Curve
from penstock.observe.durations import Trace
from penstock.observe.faults import WarningNotes, read_quarantine
from penstock.observe.plot import WatchTraces
from penstock.observe.recorder import Recorder
from penstock.observe.timing import Timings
from penstock.plan.facts import find_plan, plan_facts
from penstock.shard.manifest import MANIFEST

__all__ = ["Run", "WatchResult", "is_run_file", "read_run", "write_run"]

_KEY, _VERSION = "penstock_run", 1
_TRACES = ("wait", "step", "startup", "resident", "gpu", "items", "download")
_MAX_STAGES = 12
_MAX_BYTES = 64 << 20  # a larger file is not a run file
# Figures that the report requires, and figures that may be unknown (None); all are numbers.
_REQUIRED = ("batches", "epochs", "bytes", "elapsed_seconds", "warmup_batches", "steady_seconds")
_OPTIONAL = (
    "items", "wait_fraction", "batches_per_second", "items_per_second", "bytes_per_second", "startup_ms",
    "startup_fraction", "resident_peak_bytes", "resident_slope_mb_per_minute",
    *(f"{what}_{which}_ms" for what in ("wait", "step") for which in ("mean", "p50", "p95", "max")),
)  # fmt: skip
# Figures of a loader that reads from a URL: all of them, or none.
_DOWNLOADS = (
    *(f"download_{name}" for name in ("bytes", "requests", "retries", "hidden_seconds", "waited_seconds")),
    *("cache_hits", "cache_misses"),
)


@dataclass(frozen=True, slots=True)
class WatchResult:
    """Everything that a watch puts into a run file."""

    loader: Any
    figures: dict[str, Any]
    traces: WatchTraces
    recorder: Recorder
    notes: WarningNotes
    began: float
    """As given by `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class Run:
    """Content of a run file."""

    path: Path
    figures: dict[str, Any]
    traces: dict[str, Curve]
    recorded: dict[str, Curve]
    not_finite: dict[str, tuple[int, int]]
    stages: dict[str, dict[str, Any]]
    """By name: calls, seconds, bytes, and the curve of seconds."""

    plan: dict[str, Any] | None
    dataset: str | None
    quarantine: dict[str, Any] | None
    notes: dict[str, Any]
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON, without curves."""
        stages = {
            name: {"calls": e["calls"], "seconds": e["seconds"], "bytes": e["bytes"]} for name, e in self.stages.items()
        }
        about = {"dataset": self.dataset, "about": self.about}
        return {"path": str(self.path), "figures": self.figures, "stages": stages, **about}


def write_run(path: str | os.PathLike[str], result: WatchResult) -> None:
    """Write a run file atomically."""
    content = {
        _KEY: _VERSION,
        "about": {
            "penstock": __version__,
            "python": platform.python_version(),
            # Without arguments: reports are passed on, and a command line may hold secrets.
            "program": Path(sys.argv[0]).name if sys.argv else "",
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "loader": type(result.loader).__name__,
        },
        "figures": result.figures,
        "traces": {name: Curve.of(getattr(result.traces, name)).to_json() for name in _TRACES},
        "recorded": {name: Curve.of(trace).to_json() for name, trace in result.recorder.traces.items()},
        "not_finite": {name: list(entry) for name, entry in result.recorder.not_finite.items()},
        "stages": _describe_stages(result),
        "notes": {"count": result.notes.count, "lines": list(result.notes.lines)},
        **_describe_loader(result.loader),
    }
    content["checksum"] = _checksum(content)
    write_aside(Path(path), json.dumps(content, allow_nan=False).encode() + b"\n", lasting=False)


def is_run_file(path: Path) -> bool:
    """Return whether a file begins like a run file."""
    try:
        with open_regular(path) as file:
            return f'"{_KEY}"'.encode() in file.read(64)
    except OSError:
        return False


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run file; raise if it is missing, damaged, or not a run file."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            size = path.stat().st_size
            raise SourceError(f"{path} is not a run file: those have at most {_MAX_BYTES:,} bytes, got {size:,}.")
        stored = json.loads(read_regular(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise OptionError(f"There is no run file {path}. Write one with Watch.save(path).") from error
    except OSError as error:
        raise OptionError(f"Could not read the run file {path}: {cause(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise DamageError(str(path), None, f"the run file is not valid JSON (truncated?): {error}") from error
    if not isinstance(stored, dict) or _KEY not in stored:
        raise SourceError(f"{path} is not a run file of Penstock. Write one with Watch.save(path).")
    if stored[_KEY] != _VERSION:
        raise SourceError(f"{path} must have version {_VERSION}, got {stored[_KEY]!r}. Update Penstock to read it.")
    if stored.pop("checksum", None) != _checksum(stored):
        raise DamageError(str(path), None, "the run file does not match its own checksum")
    try:
        return _parse_run(path, stored)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(str(path), None, f"the run file is malformed: {error}") from error


def _parse_run(path: Path, stored: dict[str, Any]) -> Run:
    figures = dict(stored["figures"])
    downloads = _DOWNLOADS if any(name in figures for name in _DOWNLOADS) else ()
    for name in (*_REQUIRED, *_OPTIONAL, *downloads):
        value = figures[name]
        if not (isinstance(value, int | float) or (value is None and name in _OPTIONAL)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    figures["advice"] = [str(line) for line in figures["advice"]]
    return Run(
        path=path,
        figures=figures,
        traces={name: Curve.from_json(_find_trace(stored["traces"], name)) for name in _TRACES},
        recorded={str(name): Curve.from_json(curve) for name, curve in stored["recorded"].items()},
        not_finite={str(name): (int(count), int(first)) for name, (count, first) in stored["not_finite"].items()},
        stages={
            str(name): {
                "calls": int(entry["calls"]),
                "seconds": float(entry["seconds"]),
                "bytes": int(entry["bytes"]),
                "curve": Curve.from_json(entry["curve"]),
            }
            for name, entry in stored["stages"].items()
        },
        plan=_parse_plan(stored["plan"]),
        dataset=None if stored["dataset"] is None else str(stored["dataset"]),
        quarantine=_parse_quarantine(stored["quarantine"]),
        notes={"count": int(stored["notes"]["count"]), "lines": [str(line) for line in stored["notes"]["lines"]]},
        about={str(name): str(value) for name, value in stored["about"].items()},
    )


def _find_trace(traces: Mapping[str, Any], name: str) -> Any:
    """Return a stored trace; an empty one of downloads, if the file was written without them."""
    return Curve.of(Trace()).to_json() if name == "download" and name not in traces else traces[name]


def _parse_plan(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    if stored is None or "unknown" in stored:
        return stored
    access, mixing = stored["access"], stored["mixing"]
    borders = access["borders"]
    positions, items = [int(place) for place in access["positions"]], [int(item) for item in access["items"]]
    if len(positions) != len(items):
        raise ValueError("the access map must have as many items as positions")
    return {
        **stored,
        "description": str(stored["description"]),
        "batch_size": int(stored["batch_size"]),
        "mixing": {
            "score": float(mixing["score"]),
            "read_amplification": float(mixing["read_amplification"]),
            "batches_measured": int(mixing["batches_measured"]),
            **({"padding": float(mixing["padding"])} if "padding" in mixing else {}),
        },
        "access": {
            "positions": positions,
            "items": items,
            "n_positions": int(access["n_positions"]),
            "n_items": int(access["n_items"]),
            "n_parts": int(access["n_parts"]),
            "borders_of": str(access["borders_of"]),
            "borders": None if borders is None else [int(border) for border in borders],
        },
    }


def _parse_quarantine(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    if stored is None:
        return None
    entries = [
        {"item": int(entry["item"]), "shard": str(entry["shard"]), "reason": str(entry["reason"])}
        for entry in stored["entries"]
    ]
    return {**stored, "path": str(stored["path"]), "count": int(stored["count"]), "entries": entries}


def _describe_stages(result: WatchResult) -> dict[str, Any]:
    timings = Timings.of(result.loader)
    if timings is None:
        return {}
    curves = {name: Curve.of(trace, result.began - timings.began) for name, trace in timings.traces().items()}
    return {
        name: {
            "calls": timings.stages[name].calls,
            "seconds": timings.stages[name].seconds,
            "bytes": timings.stages[name].nbytes,
            "curve": curve.to_json(),
        }
        for name, curve in list(curves.items())[:_MAX_STAGES]
    }


def _describe_loader(loader: Any) -> dict[str, Any]:
    """Return the plan, the dataset and the quarantine of a loader, if it has them.

    If the dataset is gone, the run is still saved, with the error in place of the plan.
    """
    found: dict[str, Any] = {"plan": None, "dataset": None, "quarantine": None}
    source = getattr(loader, "source", None)
    try:
        plan = find_plan(loader)
        found["plan"] = None if plan is None else plan_facts(plan, source)
    except (PenstockError, OSError) as error:
        found["plan"] = {"unknown": str(error)}
    manifest, path = getattr(source, "manifest", None), getattr(source, "path", None)
    if source is None or manifest is None or path is None:
        return found
    found["dataset"] = str(path.parent if path.name == MANIFEST else path)
    if source.quarantine is not None:
        found["quarantine"] = read_quarantine(source.quarantine, manifest.fingerprint)
    return found


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
