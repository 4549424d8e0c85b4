"""The page: one HTML file about a dataset, a watched run, or both, in light and dark, for any width and for print.

Each picture has its numbers in a table, for those who do not see it. No text gets into the page without being escaped.
"""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError
from penstock.core.text import count
from penstock.core.version import __version__
from penstock.files.durable import write_aside
from penstock.files.stores.url import is_url
from penstock.observe.advice import (
    describe_downloads,
    describe_growth,
    format_bytes,
    format_duration,
    format_rate,
)
from penstock.observe.curves import Curve
from penstock.observe.durations import Floats
from penstock.observe.faults import read_quarantine
from penstock.observe.finding import Finding
from penstock.observe.html import Html, join, show_chart, show_charts, show_document, show_picture, show_table, tag
from penstock.observe.picture import Chart, draw_item, format_number
from penstock.observe.run_file import Run, read_run
from penstock.plan.facts import plan_facts
from penstock.plan.orders import shuffle_within
from penstock.plan.plan import Plan
from penstock.shard.manifest import MANIFEST, METADATA, manifest_path
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.summary import find_problems
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["Report", "gather_report", "render_page", "save_report", "write_report"]

_Path = str | os.PathLike[str]

_N_PLOTTED, _MOST_TRIED = 3, 12  # items; items read to find healthy ones
_REACH_ITEMS, _SEED, _BATCH_SIZE = 1000, 42, 32  # the defaults of the WebDataset loaders
_MOST_ROWS, _MOST_BINS, _MOST_GROUPS = 24, 48, 40
_APART = 30.0  # ratio: curves that differ by more get separate charts, or the smaller ones would be flat lines
_STAGES = ("read", "transform", "collate", "wait", "device")
_WELL, _SOME = 0.8, 0.3


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a page."""

    title: str
    dataset: dict[str, Any] | None
    run: Run | None
    shuffle: dict[str, Any] | None
    """The plan of the run, or of a shuffled loader over the dataset; `unknown` says why there is none."""

    faults: list[Finding]
    made: dict[str, Any]
    """Version, command, date, seed and order hash."""

    items: dict[int, dict[str, Any]]
    """Some items that are plotted, by number."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as plain JSON, without curves and pictures."""
        known = (
            None if self.shuffle is None else {name: self.shuffle[name] for name in self.shuffle if name != "access"}
        )
        return {
            "title": self.title,
            "dataset": self.dataset,
            "run": None if self.run is None else self.run.to_dict(),
            "shuffle": known,
            "faults": [fault.to_dict() for fault in self.faults],
            "drawn_items": list(self.items),
            "made": self.made,
        }


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


# -- what it says ------------------------------------------------------------------------------------------------------


def gather_report(*, dataset: _Path | None = None, run: _Path | None = None, title: str | None = None) -> Report:
    """Return the content of a report; the arguments are those of `write_report`."""
    if dataset is None and run is None:
        raise OptionError("A report requires dataset= (a folder of shards) or run= (a file written by Watch.save).")
    watched = None if run is None else read_run(run)
    where = None if dataset is None else _find_dataset(dataset)
    facts = None if where is None else _dataset_facts(where)
    shuffle = None if watched is None else watched.plan
    items, faults = ({}, []) if where is None else _read_items(where)
    if where is not None and shuffle is None:
        shuffle = _shuffle_facts(where)
    given = [str(place) for place in (run, dataset) if place is not None]
    made = {
        "penstock": __version__,
        "command": f"penstock inspect {shlex.join(given)} --page FILE",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": None if shuffle is None else shuffle.get("seed"),
        "order_hash": None if shuffle is None else shuffle.get("order_hash"),
    }
    return Report(
        title=title or " and ".join(Path(place).absolute().name for place in given),
        dataset=facts,
        run=watched,
        shuffle=shuffle,
        faults=[*_dataset_faults(facts), *faults, *_run_faults(watched, facts)],
        made=made,
        items=items,
    )


def _find_dataset(where: _Path) -> str:
    """Return the path or URL of a dataset; in a folder of splits, that of `train`, or else of the first split."""
    path = Path(where)
    if not is_url(where) and not manifest_path(path).exists():
        splits = sorted(entry.name for entry in path.glob("*") if (entry / MANIFEST).is_file()) if path.is_dir() else []
        if splits:
            return str(path / ("train" if "train" in splits else splits[0]))
        if path.is_file() and ".tar" not in path.suffixes:
            raise OptionError(
                "A report requires a folder of shards, a pattern of tars given to `penstock index`, or a file written "
                f"by Watch.save, got {path}."
            )
        if not path.exists() and not any(letter in path.name for letter in "{*?["):
            raise OptionError(f"{path} does not exist. Give a folder of shards, or a file written by Watch.save.")
    return os.fspath(where)


def _dataset_facts(where: str) -> dict[str, Any]:
    """Return totals, fields, splits, statistics and faults of a dataset as plain JSON; reads only the manifest."""
    manifest, archives = open_dataset(where)
    counts = [shard.n_items for shard in manifest.shards]
    converted = manifest.metadata.get("conversion") or {}
    split = converted.get("split")
    nothing: dict[str, Any] = {"path": "", "count": 0, "entries": []}  # of a URL: a loader keeps it on its own machine
    quarantine = manifest_path(where).with_name("quarantine.jsonl") if not is_url(where) else None
    return {
        "path": str(where),
        "items": manifest.n_items,
        "shards": len(counts),
        "items_per_shard": [min(counts), max(counts)],
        "bytes": sum(shard.stored_bytes for shard in manifest.shards),
        "compression": manifest.compression,
        "fingerprint": manifest.fingerprint,
        "fields": [
            {
                "name": name,
                "dtype": None if info.dtype is None else str(info.dtype),
                "shape": None if info.shape is None else list(info.shape),
                "stored_as": info.suffix.rpartition(".")[2],
                "item_bytes": math.prod(info.shape) * info.dtype.itemsize
                if info.dtype is not None and info.shape is not None
                else None,
                "is_metadata": name == METADATA,
            }
            for name, info in manifest.fields.items()
        ],
        "split": split or None,
        "inputs": len(converted.get("inputs", [])),
        "skipped": [{"file": str(e["file"]), "reason": str(e["reason"])[:300]} for e in converted.get("skipped", [])],
        "metadata": {
            str(name): str(value)[:300]
            for name, value in manifest.metadata.items()
            if name not in ("conversion", "identity", "statistics")
        },
        "problems": find_problems(manifest, archives),
        "quarantine": nothing if quarantine is None else read_quarantine(quarantine, manifest.fingerprint),
    }


def _shuffle_facts(where: str) -> dict[str, Any]:
    """Return the facts of the plan of `WebDatasetLoader(shuffle=True)`, or why there is none."""
    try:
        source = TarSource(where, chunk_items=STRETCH_ITEMS)
        order = shuffle_within(source.index, _REACH_ITEMS, held=source.manifest.compression != "none")
        plan = Plan(source.index, order, batch_size=min(_BATCH_SIZE, len(source.index)), seed=_SEED, tail="short")
        return {**plan_facts(plan, source), "of": "WebDatasetLoader(shuffle=True)"}
    except (ReadError, OSError) as error:  # a shard is missing, which the faults list, too
        return {"unknown": str(error)}


def _read_items(where: str) -> tuple[dict[int, dict[str, Any]], list[Finding]]:
    """Return some items to plot, evenly spread, and those that are damaged; a damaged one is followed by the next."""
    items: dict[int, dict[str, Any]] = {}
    faults: list[Finding] = []
    try:
        source = TarSource(where)
    except (ReadError, OSError):  # which the shuffle says
        return items, faults
    n_items = len(source.index)
    for first in np.unique(np.linspace(0, n_items - 1, min(n_items, _N_PLOTTED)).astype(np.int64)).tolist():
        for item in range(first, n_items):
            if item in items or len(items) + len(faults) >= _MOST_TRIED:
                break
            try:
                items[item] = {name: array[0] for name, array in source.take(np.array([item])).items()}
                break
            except DamageError as error:
                text = f"Item {item:,} in {error.shard} is damaged: {error.reason}."
                faults.append(Finding("data.item", "problem", text, "Copy its shard again.", _check_command(where)))
    source.close()
    return items, faults


def _check_command(where: object) -> str:
    return f"penstock check {shlex.quote(str(where))} --all"


def _dataset_faults(facts: dict[str, Any] | None) -> list[Finding]:
    if facts is None:
        return []
    check, advice = _check_command(facts["path"]), "Copy the shard and its .index file again."
    again = "Mend the file, and convert again."
    return [
        *(Finding("data.shards", "problem", f"{problem}.", advice, check) for problem in facts["problems"]),
        *(
            Finding("data.skipped", "warning", f"{entry['file']} was skipped: {entry['reason']}", again)
            for entry in facts["skipped"]
        ),
        *_quarantine_faults(facts["quarantine"], check),
    ]


def _quarantine_faults(quarantine: dict[str, Any], check: str) -> list[Finding]:
    advice, level = "A healthy one was delivered in its place. Copy its shard again, then remove the list.", "warning"
    texts = [f"Item {e['item']:,} of {e['shard']} is in quarantine: {e['reason']}." for e in quarantine["entries"]]
    left = quarantine["count"] - len(texts)
    texts += [f"{left:,} more items are in quarantine: see {quarantine['path']}."] if left > 0 else []
    if quarantine.get("unreadable"):
        texts.append(f"{quarantine['path']} cannot be read: {quarantine['unreadable']}.")
    return [Finding("data.quarantine", level, text, advice, check) for text in texts]  # type: ignore[arg-type]


def _run_faults(run: Run | None, facts: dict[str, Any] | None) -> list[Finding]:
    if run is None:
        return []
    found: list[Finding] = []
    if run.quarantine is not None and run.quarantine["path"] != (facts or {}).get("quarantine", {}).get("path"):
        found += _quarantine_faults(run.quarantine, _check_command(run.dataset))
    for line in run.notes["lines"]:
        if " is damaged and substituted: " in line:
            continue  # the quarantine has it, with those that other processes found
        restarted = "Started again at batch" in line
        name, advice = ("run.restarted", "See why workers end.") if restarted else ("run.warning", "See what it says.")
        found.append(Finding(name, "warning", line, advice))
    left = run.notes["count"] - len(run.notes["lines"])
    if left > 0:
        found.append(Finding("run.warning", "warning", f"{left:,} more warnings were logged.", "See the log."))
    for name, (number, first) in run.not_finite.items():
        text = f"{count(number, 'value')} of {name} were NaN or infinite, first at batch {first:,}."
        found.append(Finding("run.not_finite", "warning", text, "See what that batch held: plan.explain(batch)."))
    return found


# -- how it is shown ---------------------------------------------------------------------------------------------------


def render_page(report: Report) -> str:
    """Return the whole page."""
    run, data = report.run, report.dataset
    about = " and ".join(["a dataset"] * (data is not None) + ["a training run"] * (run is not None))
    parts: dict[str, tuple[str, Html | None]] = {"glance": ("At a glance", _show_glance(report))}
    if data is not None:
        parts["dataset"] = "Dataset", _show_dataset(data, report.items)
    parts["shuffle"] = "Shuffle", _show_shuffle(report.shuffle, watched=run is not None)
    if run is not None:
        parts |= {
            "training": ("Training curve", _show_training(run)),
            "pace": ("Throughput and waiting", _show_pace(run)),
            "downloads": ("Downloads", _show_downloads(run)),
            "stages": ("Stage timeline", _show_stages(run)),
            "memory": ("Memory", _show_memory(run)),
        }
    parts |= {
        "faults": ("Faults and quarantine", _show_faults(report)),
        "made": ("How this was made", _show_made(report)),
    }
    foot = f"Made by Penstock {report.made['penstock']} on {_format_date(report.made['date'])}. It needs no network."
    return show_document(report.title, f"A Penstock report on {about}.", parts, foot)


def _show_glance(report: Report) -> Html:
    lines: list[tuple[str, str]] = []
    figures: dict[str, str] = {}
    data, run, shuffle = report.dataset, report.run, report.shuffle
    if data is not None:
        fields = [entry["name"] for entry in data["fields"] if not entry["is_metadata"]]
        part = f" ({data['split']['name']} split)" if data["split"] else ""
        totals = f"{count(data['items'], 'item')} in {count(data['shards'], 'shard')}, {format_bytes(data['bytes'])}"
        lines.append(("", f"The dataset{part} holds {totals}: {', '.join(fields)}."))
        figures |= {"items": f"{data['items']:,}", "size": format_bytes(data["bytes"])}
    if report.faults:
        short = "; ".join(fault.text for fault in report.faults[:2]) + ("; …" if report.faults[2:] else "")
        lines.append(("bad", f"{count(len(report.faults), 'fault')}: {short} Details are below."))
    elif data is not None:
        text = "All shards are present with the right size, and no item is in quarantine. To read every byte: "
        lines.append(("good", join(text, tag("code", _check_command(data["path"])))))
    else:
        lines.append(("good", "No faults: no item in quarantine, no worker restarted."))
    if shuffle is not None and "mixing" in shuffle:
        score = float(shuffle["mixing"]["score"])
        lines.append(("good" if score >= _WELL else "", _describe_mixing(score)))
        figures["mixing score"] = f"{score:.2f} of 1"
    if run is not None:
        seen, waited = run.figures, run.figures["wait_fraction"]
        items = f", {count(seen['items'], 'item')}" if seen["items"] else ""
        batches, took = count(seen["batches"], "batch"), format_duration(1000 * seen["elapsed_seconds"])
        lines.append(("", f"The training ran {batches} in {count(seen['epochs'], 'epoch')}{items}, in {took}."))
        kinds = {"ok": "good", "note": "", "warning": "bad", "problem": "bad"}
        lines += [(kinds[entry["level"]], f"{entry['text']} {entry['advice']}".strip()) for entry in seen["findings"]]
        if waited is not None:
            figures["waiting for data"] = f"{100 * waited:.{0 if waited >= 0.1 else 1}f} %"
        if "download_bytes" in seen:
            figures["downloaded"] = format_bytes(seen["download_bytes"])
        if seen["items_per_second"]:
            figures["items per second"] = format_rate(seen["items_per_second"])
        for name, value in list(seen.get("values", {}).items())[:2]:
            figures[f"last {name}"] = f"{value:.3g}".replace("-", "−")
    figures["faults"] = f"{len(report.faults):,}" if report.faults else "none"
    return join(
        tag("ul", *(tag("li", line, class_=kind or None) for kind, line in lines), class_="lead"),
        tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in figures.items()), class_="tiles"),
    )


def _describe_mixing(score: float) -> str:
    if score < 0.02:
        return "Items come in storage order (mixing score 0.00): right for validation, rarely for training."
    how = "well" if score >= _WELL else "partly" if score >= _SOME else "little"
    return f"The shuffle mixes {how}: score {score:.2f} (1: uniform, 0: storage order)."


def _show_dataset(data: dict[str, Any], items: Mapping[int, dict[str, Any]]) -> Html:
    low, high = data["items_per_shard"]
    each = f"{count(low, 'item')} each" if low == high else f"{low:,} to {high:,} items each"
    packed = "not compressed" if data["compression"] == "none" else f"compressed with {data['compression']}"
    inputs = f" Converted from {count(data['inputs'], 'input')}." if data["inputs"] else ""
    if data["split"]:
        shares = ", ".join(f"{name} {share:g}" for name, share in data["split"]["shares"].items())
        kind = data["split"]["group_by"]
        alone = "windows across a border are left out" if kind == "time" else f"no {kind} is in two of them"
        inputs += f" It is {data['split']['name']} of the splits {shares}, by {kind}: {alone}."
    rows = [
        [
            entry["name"],
            entry["dtype"] or entry["stored_as"],
            "varies" if entry["shape"] is None else _format_shape(entry["shape"]) if entry["dtype"] else "–",
            "varies" if entry["item_bytes"] is None else format_bytes(entry["item_bytes"]),
            f".{entry['stored_as']}",
        ]
        for entry in data["fields"]
    ]
    return join(
        tag("p", f"{count(data['shards'], 'shard')} of {each}, {format_bytes(data['bytes'])}, {packed}.{inputs}"),
        tag("h3", "Fields"),
        show_table("Fields", ["field", "type", "shape per item", "size per item", "stored as"], rows),
        tag("h3", "Metadata") if data["metadata"] else None,
        show_table("Metadata", ["name", "value"], data["metadata"].items()) if data["metadata"] else None,
        tag("h3", "Example items"),
        show_charts(*[_show_item(number, item) for number, item in items.items()]),
        None if items else tag("p", "There are no items to plot: all that were tried are missing or damaged."),
    )


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{length:,}" for length in shape) if shape else "one value"


def _show_item(number: int, item: dict[str, Any]) -> Html:
    words = f"Item {number:,}, one panel per field: {', '.join(item)}."
    try:
        shown = show_picture(f"item-{number}", words, lambda width: draw_item(item, width))
    except MissingDependency as error:
        shown = tag("p", f"{error}.")
    return tag("figure", tag("figcaption", tag("b", f"Item {number:,}")), shown)


def _show_shuffle(shuffle: dict[str, Any] | None, *, watched: bool) -> Html:
    if shuffle is None or "mixing" not in shuffle:
        why = "" if shuffle is None else str(shuffle.get("unknown", ""))
        if watched and not why:
            why = (
                "The loader of this run has no plan, so that its order is unknown. Penstock loaders have one; for a "
                "torch DataLoader, name the dataset as well to see what a shuffle would do."
            )
        return tag("p", f"There is no order to show. {why}".strip())
    mixing = shuffle["mixing"]
    whose = "The order of this run" if "of" not in shuffle else f"The order of {shuffle['of']}"
    explanation = (
        " The mixing score compares the positions of a batch's items in storage with two extremes. 0: a batch is a run "
        "of neighbours. 1: its items are as spread out as independent random samples. Neighbours in storage are often "
        "alike (one recording, one subject), and batches of similar items make training noisy."
    )
    costs = (
        f"If only whole chunks can be read, this order reads {mixing['read_amplification']:.2f} times the items that "
        f"it delivers, measured over {count(mixing['batches_measured'], 'batch')} of epoch 0. In uncompressed shards, "
        "any item is cheap to read."
    )
    if "padding" in mixing:
        costs += f" {mixing['padding']:.1%} of the tokens in its batches are padding."
    return join(
        tag("p", f"{whose}: {shuffle['description']}."),
        tag("p", _describe_mixing(float(mixing["score"])), explanation),
        _show_access(shuffle["access"], max(1, shuffle["batch_size"])),
        tag("p", costs, class_="soft"),
    )


def _show_access(access: dict[str, Any], batch_size: int) -> Html:
    positions, items = (np.asarray(access[name], np.float64) for name in ("positions", "items"))
    unit, borders = access["borders_of"], access["borders"]
    lines = f"Dotted lines are the borders of the {access['n_parts']:,} {unit}."
    if not borders:
        lines = f"The {access['n_parts']:,} {unit} are too many to show their borders."
        lines = lines if borders is None else f"All items are in one {unit.removesuffix('s')}."
    some = f" {len(items):,} of {access['n_positions']:,} items are shown." * (len(items) < access["n_positions"])
    cloud = _describe_cloud(positions, items, access["n_items"])
    finding = f"Each point is an item of epoch 0. {cloud} {lines}{some}"
    series = {"item": (positions / batch_size, items)}
    high = max(1.0, float(access["n_items"]))
    chart = Chart("points", "batch", "item number in storage", series, high=high, borders=borders or ())
    return show_chart("access", "Access map: which item comes when", finding, chart)


def _describe_cloud(positions: Floats, items: Floats, n_items: int) -> str:
    """Return a sentence about the cloud of points: a line, evenly filled, or clusters."""
    if len(items) < 3 or n_items < 3:
        return ""
    if np.array_equal(items, np.sort(items)):
        return "The points lie on a rising line: storage order."
    # Counts in the cells of a grid: for a uniform order, their variance is no more than about their mean.
    cells = max(2, min(10, int(np.sqrt(len(items) / 6))))
    counts, _, _ = np.histogram2d(positions, items, bins=cells, range=[[0, positions.max() + 1], [0, n_items]])
    if counts.var() <= 2 * counts.mean():
        return "The points fill the map evenly: at any time, items come from all over the storage."
    return "The points lie in clusters: parts of the storage are visited together, as in a shuffle within windows."


def _show_training(run: Run) -> Html:
    curves = {name: curve for name, curve in run.recorded.items() if len(curve)}
    if not curves:
        how = tag("code", "watched.record(loss=loss.item())")
        return tag("p", "The training recorded no values. To record them, call ", how, " after each batch.")
    charts = []
    for number, names in enumerate(_group_by_magnitude(curves)):
        series = {name: (curves[name].x, curves[name].mean) for name in names}
        low = min(float(y.min()) for _, y in series.values())
        span = max(float(y.max()) for _, y in series.values()) - low
        finding = " ".join(_describe_curve(name, y) for name, (_, y) in series.items())
        chart = Chart("lines", "batches", "value", series, low=0.0 if 0 <= low <= span else None)
        charts.append(show_chart(f"training-{number}", f"{' and '.join(names)} by batch", finding, chart))
    return show_charts(*charts)


def _group_by_magnitude(curves: Mapping[str, Curve]) -> list[list[str]]:
    """Group names whose values have similar magnitude, in order."""
    groups: list[tuple[float, float, list[str]]] = []
    for name, curve in curves.items():
        most = max(float(np.abs(curve.mean).max()), 1e-12)
        for place, (low, high, names) in enumerate(groups):
            if max(high, most) <= _APART * min(low, most):
                groups[place] = min(low, most), max(high, most), [*names, name]
                break
        else:
            groups.append((most, most, [name]))
    return [names for _, _, names in groups]


def _describe_curve(name: str, values: Floats) -> str:
    first, last, low, high = map(format_number, (values[0], values[-1], values.min(), values.max()))
    return f"{name} went from {first} to {last} (lowest {low}, highest {high})."


def _time_bins(run: Run) -> tuple[Floats, float, str]:
    """Return the edges of equal time bins in seconds, each with a few batches, and the unit that shows them."""
    seconds = max(float(run.figures["elapsed_seconds"]), 1e-6)
    n_bins = min(_MOST_BINS, max(4, int(run.traces["items"].count.sum()) // 3))
    unit, name = (1.0, "s") if seconds < 300 else (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")
    return np.linspace(0, seconds, n_bins + 1), unit, f"time ({name})"


def _stack(run: Run, unit: str, parts: Mapping[str, tuple[Curve, float]]) -> Chart:
    """Return a chart of some amounts per second on each other."""
    edges, seconds, label = _time_bins(run)
    series = {name: (edges / seconds, scale * curve.per_second(edges)) for name, (curve, scale) in parts.items()}
    return Chart("stack", label, unit, series, high=100.0 if unit.endswith("(%)") else None)


def _per_second(run: Run, unit: str, values: Floats) -> Chart:
    """Return a chart of one amount per second, in time bins."""
    edges, seconds, label = _time_bins(run)
    series = {unit: ((edges[:-1] + edges[1:]) / 2 / seconds, np.maximum(values, 0.0))}
    return Chart("lines", label, f"{unit} per second", series)


def _show_pace(run: Run) -> Html:
    figures, items, charts = run.figures, run.traces["items"], list[Html]()
    if len(items):
        what, amounts = ("items", None) if items.total.sum() else ("batches", items.count)
        steady = figures[f"{what}_per_second"]
        rate = (
            f"{format_rate(steady)} {what} per second of waiting and training, without the start of each epoch, the "
            f"first {figures['warmup_batches']:,} batches, and pauses such as validation. The chart has them all."
            if steady
            else "The run was too short for a single figure."
        )
        speed = _per_second(run, what, items.per_second(_time_bins(run)[0], amounts))
        charts.append(show_chart("throughput", "Throughput over time", rate, speed))
        names = {"training": "step", "waiting for data": "wait", "starting an epoch": "startup"}
        shares = {name: (run.traces[trace], 100.0) for name, trace in names.items()}
        rest = f"{figures['advice'][0]} The rest is other time, such as validation."
        charts.append(show_chart("shares", "Where the time went", rest, _stack(run, "fraction of time (%)", shares)))
    rows = []
    for name, what in (("wait", "waiting for a batch"), ("step", "training on a batch")):
        times = [figures[f"{name}_{which}_ms"] for which in ("mean", "p50", "p95", "max")]
        rows.append([what, *("–" if time is None else format_duration(time) for time in times)])
    startup = format_duration(figures["startup_ms"] or 0.0)
    about = (
        f"Without the first {figures['warmup_batches']:,} batches and the first of each epoch, which took {startup}."
    )
    return join(
        show_charts(*charts), show_table("Time per batch", ["", "mean", "p50", "p95", "max"], rows), tag("p", about)
    )


def _show_downloads(run: Run) -> Html | None:
    if "download_bytes" not in run.figures:
        return None
    chart = _per_second(run, "MB", run.traces["download"].per_second(_time_bins(run)[0]) / 1e6)
    return show_chart("downloads", "Downloads over time", f"{describe_downloads(run.figures)}.", chart)


def _show_stages(run: Run) -> Html:
    if not run.stages:
        how = tag("code", "Loader(source, plan, observer=Timings())")
        return tag("p", "No stages were timed. To time them, give the loader an observer: ", how, ".")
    names = sorted(run.stages, key=lambda name: _STAGES.index(name) if name in _STAGES else len(_STAGES))
    rows, seconds = [], {name: float(run.stages[name]["curve"].total.sum()) for name in names}
    most = max((name for name in names if name != "wait"), key=lambda name: seconds[name], default="wait")
    finding = (
        f"The slowest stage of the loader was {most}: {format_duration(1000 * seconds[most])} in "
        f"{format_duration(1000 * run.figures['elapsed_seconds'])}. Stages run in parallel with each other and with "
        "the training, so that they may add up to more than one second per second."
    )
    for name in names:
        calls, n_bytes = run.stages[name]["calls"], run.stages[name]["bytes"]
        times = [format_duration(1000 * seconds[name]), format_duration(1000 * seconds[name] / max(1, calls))]
        rows.append([name, f"{calls:,}", *times, format_bytes(n_bytes) if n_bytes else "–"])
    chart = _stack(run, "seconds per second", {name: (run.stages[name]["curve"], 1.0) for name in names})
    table = show_table("Stages", ["stage", "calls", "total", "mean", "bytes"], rows)
    return join(show_chart("stages", "Time per stage", finding, chart), table)


def _show_memory(run: Run) -> Html | None:
    resident, gpu, parts = run.traces["resident"], run.traces["gpu"], list[Html]()
    _, seconds, label = _time_bins(run)
    if len(resident):
        rate = describe_growth(run.figures)
        growth = "The run was too short to measure growth." if rate is None else f"It changed by {rate}."
        finding = f"{format_bytes(float(resident.peak.max()))} peak. {growth}"
        chart = Chart("lines", label, "memory (MB)", {"MB": (resident.x / seconds, resident.mean / 1e6)})
        parts.append(show_chart("memory", "Memory of all processes", finding, chart))
    if len(gpu):
        finding = f"{float((gpu.mean * gpu.count).sum() / gpu.count.sum()):.0f} % of the time on average."
        chart = Chart("lines", label, "utilization (%)", {"%": (gpu.x / seconds, gpu.mean)}, high=100.0)
        parts.append(show_chart("gpu", "GPU utilization", finding, chart))
    return show_charts(*parts) if parts else None


def _show_faults(report: Report) -> Html:
    if not report.faults:
        return tag("p", "None: all shards are present with the right size, and no item is in quarantine.")
    rows = [
        [fault.name, fault.text, join(fault.advice, " ", tag("code", fault.command) if fault.command else "")]
        for fault in report.faults
    ]
    return show_table("Faults", ["name", "what", "what to do"], rows)


def _show_made(report: Report) -> Html:
    made, run, data = report.made, report.run, report.dataset
    rows: list[tuple[str, str]] = [
        ("Penstock", made["penstock"]),
        ("command", tag("code", made["command"])),
        ("date", _format_date(made["date"])),
    ]
    if data is not None:
        rows += [("dataset", data["path"]), ("fingerprint", data["fingerprint"])]
    if run is not None:
        about = {
            name: run.about.get(name) or "unknown" for name in ("program", "saved", "penstock", "python", "loader")
        }
        versions = f"Penstock {about['penstock']}, Python {about['python']}, {about['loader']}"
        rows += [("run file", str(run.path))]
        rows += [("watched", f"{about['program']} on {_format_date(about['saved'])}, {versions}")]
        rows += [("dataset of the run", run.dataset)] if run.dataset and data is None else []
    if made["seed"] is not None:
        rows.append(("seed", str(made["seed"])))
    if made["order_hash"]:
        rows.append(("order hash, epoch 0", f"{made['order_hash']} (equal for equal orders)"))
    return show_table("How this was made", [], [[name, join(value)] for name, value in rows])


def _format_date(date: str) -> str:
    return f"{date[:10]} {date[11:16]} UTC" if date.endswith("+00:00") else date
