"""The report: one HTML file about a dataset, a watched run, or both."""

import os
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
from penstock.report.content import ItemPicture, Report
from penstock.report.facts import dataset_facts, dataset_path
from penstock.report.figures.items import plot_light_and_dark
from penstock.report.page.layout import DARK
from penstock.report.page.render import render_page
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["gather_report", "save_report", "write_report"]

_Path = str | os.PathLike[str]

_N_PLOTTED = 3  # items
_MOST_TRIED = 12  # items read to find healthy ones
_REACH_ITEMS, _SEED = 1000, 42  # the defaults of WebDatasetLoader
_BATCH_SIZE = 32  # of the plan shown if there is no run: the default of create_webdataset_dataloader


def write_report(
    path: _Path, *, dataset: _Path | None = None, run: _Path | None = None, title: str | None = None
) -> Path:
    """Write a page about a dataset, a watched run, or both: one HTML file that needs no network and no other file.

    Parameters
    ----------
    path
        The file to write, atomically. An existing file is replaced.
    dataset
        A folder of shards, a pattern of tars, or a folder with the splits of a conversion.
    run
        A file written by `Watch.save`.
    title
        Title of the page; None: the name of the dataset or the run file.

    Returns
    -------
    The path.

    Raises
    ------
    OptionError
        Neither a dataset nor a run was given, or one of them does not exist or is something else.
    DamageError
        The run file or the manifest is damaged. Damaged shards and items do not raise: the page lists them.
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
    return save_report(Path(path), gather_report(dataset=dataset, run=run, title=title))


def save_report(path: Path, report: Report) -> Path:
    """Write the page of a report."""
    if path.is_dir():
        raise OptionError(f"path must be a file, such as {path / 'report.html'}, got the folder {path}.")
    if not path.parent.is_dir():
        raise OptionError(f"The folder of {path} must exist, got {path.parent}. Create it first.")
    write_aside(path, render_page(report).encode(), lasting=False)
    return path


def gather_report(*, dataset: _Path | None = None, run: _Path | None = None, title: str | None = None) -> Report:
    """Return the content of a report; the arguments are those of `write_report`."""
    if dataset is None and run is None:
        raise OptionError("A report requires dataset= (a folder of shards) or run= (a file written by Watch.save).")
    watched = None if run is None else read_run(run)
    where = None if dataset is None else dataset_path(dataset)
    facts = None if where is None else dataset_facts(where)
    shuffle = None if watched is None else watched.plan
    pictures, damaged, no_pictures = ([], [], "") if where is None else _plot_items(where)
    if where is not None and shuffle is None:
        shuffle = _shuffle_facts(where)
    return Report(
        title=title or _title(dataset, run),
        dataset=facts,
        run=watched,
        shuffle=shuffle,
        faults=[*_dataset_faults(facts), *damaged, *_run_faults(watched, facts)],
        pictures=pictures,
        no_pictures=no_pictures,
        provenance=_provenance(dataset, run, shuffle),
    )


def _title(dataset: _Path | None, run: _Path | None) -> str:
    names = [Path(where).absolute().name for where in (run, dataset) if where is not None]
    return " and ".join(names)


def _shuffle_facts(where: str) -> dict[str, Any]:
    """Return the facts of the plan of `WebDatasetLoader(shuffle=True)`, or why there is none."""
    try:
        source = TarSource(where, chunk_items=STRETCH_ITEMS)
        order = shuffle_within(source.index, _REACH_ITEMS, held=source.manifest.compression != "none")
        plan = Plan(source.index, order, batch_size=min(_BATCH_SIZE, len(source.index)), seed=_SEED, tail="short")
        return {**plan_facts(plan, source), "of": "WebDatasetLoader(shuffle=True)"}
    except (ReadError, OSError) as error:  # a shard is missing, which the faults list, too
        return {"unknown": str(error)}


def _plot_items(where: str) -> tuple[list[ItemPicture], list[dict[str, str]], str]:
    """Plot some items; return the pictures, the damaged items, and if there are no pictures, why."""
    found: list[ItemPicture] = []
    faults: list[dict[str, str]] = []
    try:
        source = TarSource(where)
    except (ReadError, OSError) as error:
        return found, faults, str(error)
    count = len(source.index)
    # Evenly spread; if one is damaged, the next healthy one.
    wanted = np.unique(np.linspace(0, count - 1, min(count, _N_PLOTTED)).astype(np.int64)).tolist()
    tried = 0
    for first in wanted:
        for item in range(first, count):
            if any(item == picture.item for picture in found):
                break
            tried += 1
            try:
                values = {name: array[0] for name, array in source.take(np.array([item])).items()}
                found.append(_plot_one(values, item))
            except MissingDependency as error:
                source.close()
                return [], faults, str(error)
            except DamageError as error:
                faults.append({"what": f"item {item:,}", "where": error.shard, "why": error.reason})
                if tried < _MOST_TRIED:
                    continue
            break
    source.close()
    return found, faults, "" if found else "All items that were tried are damaged."


def _plot_one(values: dict[str, Any], item: int) -> ItemPicture:
    (light, dark), (narrow, narrow_dark) = (
        plot_light_and_dark(values, is_narrow=is_narrow, ground=DARK["ground"], text=DARK["text"])
        for is_narrow in (False, True)
    )
    kinds = [
        f"{name} {array.dtype} {array.shape}" if isinstance(array, np.ndarray) and array.shape else str(name)
        for name, array in values.items()
    ]
    words = f"Item {item:,}, one panel per field: {', '.join(kinds)}."
    return ItemPicture(item, light, dark, narrow, narrow_dark, words)


def _dataset_faults(facts: dict[str, Any] | None) -> list[dict[str, str]]:
    if facts is None:
        return []
    name = Path(facts["path"]).name
    return [
        *({"what": "shard", "where": name, "why": problem} for problem in facts["problems"]),
        *({"what": "skipped input", "where": entry["file"], "why": entry["reason"]} for entry in facts["skipped"]),
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


def _provenance(dataset: _Path | None, run: _Path | None, shuffle: dict[str, Any] | None) -> dict[str, Any]:
    where = run if run is not None else dataset
    also = f" --dataset {dataset}" if run is not None and dataset is not None else ""
    return {
        "penstock": __version__,
        "command": f"penstock report {where}{also}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": None if shuffle is None else shuffle.get("seed"),
        "order_hash": None if shuffle is None else shuffle.get("order_hash"),
    }
