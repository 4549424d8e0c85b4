"""The report: one HTML file about a data set, a watched run, or both."""

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError
from penstock.core.version import __version__
from penstock.files.durable import write_aside
from penstock.observe.run_file import Run, read_run
from penstock.plan.facts import plan_facts
from penstock.plan.orders import shuffle_within
from penstock.plan.plan import Plan
from penstock.report.content import Drawn, Report
from penstock.report.facts import dataset_facts, dataset_path
from penstock.report.figures.items import plot_item
from penstock.report.page.render import rendered
from penstock.source.tar.source import RUN_ITEMS, TarSource

__all__ = ["gathered", "save", "write_report"]

_Path = str | os.PathLike[str]

_DRAWN = 3  # items
_TRIED = 12  # items that are read to find healthy ones
_REACH_ITEMS, _SEED = 1000, 42  # the defaults of WebDatasetLoader
_BATCH_SIZE = 32  # of the plan that is shown where there was no run: the default of create_webdataset_dataloader


def write_report(
    path: _Path, *, dataset: _Path | None = None, run: _Path | None = None, title: str | None = None
) -> Path:
    """Write a page about a data set, a watched run, or both: one HTML file that needs no network and no other file.

    Parameters
    ----------
    path
        The file to write, whole or not at all. One that is there already is replaced.
    dataset
        A folder of shards, a pattern of tars, or a folder whose folders are the splits of a conversion.
    run
        A file that `Watch.save` wrote.
    title
        Of the page; None: the name of the data set or the run file.

    Returns
    -------
    The path.

    Raises
    ------
    OptionError
        Neither a data set nor a run was given, or what was given is not there or no such thing.
    DamageError
        The run file or the manifest is damaged. Shards and items that are damaged do not raise: the page lists them.
    WriteError
        The file could not be written.

    Examples
    --------
    >>> import tempfile
    >>> from penstock import create_shards_from_arrays
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = create_shards_from_arrays(folder / "shards", {"x": np.arange(64.0)}, shard_size=16)
    >>> page = write_report(folder / "report.html", dataset=folder / "shards")
    >>> "64 items" in page.read_text()
    True
    """
    return save(Path(path), gathered(dataset=dataset, run=run, title=title))


def save(path: Path, report: Report) -> Path:
    """Write the page of a report."""
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name the file to write, such as {path / 'report.html'}.")
    if not path.parent.is_dir():
        raise OptionError(f"Cannot write {path}: there is no folder {path.parent}; make it first.")
    write_aside(path, rendered(report).encode(), lasting=False)
    return path


def gathered(*, dataset: _Path | None = None, run: _Path | None = None, title: str | None = None) -> Report:
    """Return all that a page says; the arguments are those of `write_report`."""
    if dataset is None and run is None:
        raise OptionError("A report needs dataset=..., a folder of shards, or run=..., a file that Watch.save wrote.")
    watched = None if run is None else read_run(run)
    where = None if dataset is None else dataset_path(dataset)
    facts = None if where is None else dataset_facts(where)
    shuffle = None if watched is None else watched.plan
    drawn, damaged, not_drawn = ([], [], "") if where is None else _drawn(where)
    if where is not None and shuffle is None:
        shuffle = _shuffle(where)
    return Report(
        title=title or _title(dataset, run),
        dataset=facts,
        run=watched,
        shuffle=shuffle,
        faults=[*_dataset_faults(facts), *damaged, *_run_faults(watched, facts)],
        drawn=drawn,
        not_drawn=not_drawn,
        made=_made(dataset, run, shuffle),
    )


def _title(dataset: _Path | None, run: _Path | None) -> str:
    names = [Path(where).absolute().name for where in (run, dataset) if where is not None]
    return " and ".join(names)


def _shuffle(where: str) -> dict[str, Any]:
    """Return the plan that `WebDatasetLoader(shuffle=True)` would run, or why there is none."""
    try:
        source = TarSource(where, chunk_items=RUN_ITEMS)
        order = shuffle_within(source.index, _REACH_ITEMS, held=source.manifest.compression != "none")
        plan = Plan(source.index, order, batch_size=min(_BATCH_SIZE, len(source.index)), seed=_SEED, tail="short")
        return {**plan_facts(plan, source), "of": "WebDatasetLoader(shuffle=True)"}
    except (ReadError, OSError) as error:  # a shard is gone, which the faults say, too
        return {"unknown": str(error)}


def _drawn(where: str) -> tuple[list[Drawn], list[dict[str, str]], str]:
    """Return some items drawn, what was damaged among them, and why there are none."""
    found: list[Drawn] = []
    faults: list[dict[str, str]] = []
    try:
        source = TarSource(where)
    except (ReadError, OSError) as error:
        return found, faults, str(error)
    count = len(source.index)
    # Evenly spread; where one is damaged, its neighbours.
    wanted = np.unique(np.linspace(0, count - 1, min(count, _DRAWN)).astype(np.int64)).tolist()
    tried = 0
    with tempfile.TemporaryDirectory(prefix="penstock-report-") as folder:
        for first in wanted:
            for item in range(first, count):
                if any(item == drawn.item for drawn in found):
                    break
                tried += 1
                try:
                    values = {name: array[0] for name, array in source.take(np.array([item])).items()}
                    found.append(_one_drawn(values, item, Path(folder) / "item.png"))
                except MissingDependency as error:
                    source.close()
                    return [], faults, str(error)
                except DamageError as error:
                    faults.append({"what": f"item {item:,}", "where": error.shard, "why": error.reason})
                    if tried < _TRIED:
                        continue
                break
    source.close()
    return found, faults, "" if found else "Every item that was tried is damaged."


def _one_drawn(values: dict[str, Any], item: int, path: Path) -> Drawn:
    plot_item(values, path)
    kinds = [
        f"{name} {array.dtype} {array.shape}" if isinstance(array, np.ndarray) and array.shape else str(name)
        for name, array in values.items()
    ]
    return Drawn(item, path.read_bytes(), f"Item {item:,}, a panel for each field: {', '.join(kinds)}.")


def _dataset_faults(facts: dict[str, Any] | None) -> list[dict[str, str]]:
    if facts is None:
        return []
    name = Path(facts["path"]).name
    return [
        *({"what": "shard", "where": name, "why": problem} for problem in facts["problems"]),
        *({"what": "input left out", "where": entry["file"], "why": entry["reason"]} for entry in facts["skipped"]),
        *_quarantine_faults(facts["quarantine"]),
    ]


def _quarantine_faults(quarantine: dict[str, Any]) -> list[dict[str, str]]:
    found = [
        {"what": f"item {entry['item']:,} in quarantine", "where": entry["shard"], "why": entry["reason"]}
        for entry in quarantine["entries"]
    ]
    left = quarantine["count"] - len(found)
    if left > 0:
        found.append({"what": f"{left:,} more items in quarantine", "where": quarantine["path"], "why": "see the file"})
    if quarantine.get("unreadable"):
        found.append({"what": "quarantine", "where": quarantine["path"], "why": quarantine["unreadable"]})
    return found


def _run_faults(run: Run | None, facts: dict[str, Any] | None) -> list[dict[str, str]]:
    if run is None:
        return []
    found: list[dict[str, str]] = []
    listed = None if facts is None else facts["quarantine"]["path"]
    if run.quarantine is not None and run.quarantine["path"] != listed:
        found += _quarantine_faults(run.quarantine)
    for line in run.notes["lines"]:
        # The second wording is that of run files written before it changed.
        if " is damaged and substituted: " in line or " is replaced by another one: " in line:
            continue  # the quarantine has it, with those that other processes found
        what = "workers started again" if "Started again at batch" in line else "warning"
        found.append({"what": what, "where": "the run", "why": line})
    left = run.notes["count"] - len(run.notes["lines"])
    if left > 0:
        found.append({"what": f"{left:,} more warnings", "where": "the run", "why": "only the first were kept"})
    for name, (count, first) in run.not_finite.items():
        why = f"{count:,} value{'s' if count > 1 else ''} of {name} were NaN or infinite, first at batch {first:,}"
        found.append({"what": f"{name} not finite", "where": "the training", "why": why})
    return found


def _made(dataset: _Path | None, run: _Path | None, shuffle: dict[str, Any] | None) -> dict[str, Any]:
    where = run if run is not None else dataset
    also = f" --dataset {dataset}" if run is not None and dataset is not None else ""
    return {
        "penstock": __version__,
        "command": f"penstock report {where}{also}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": None if shuffle is None else shuffle.get("seed"),
        "order_hash": None if shuffle is None else shuffle.get("order_hash"),
    }
