"""Renders the content of a report as an HTML page."""

from typing import Any

from penstock.core.text import count
from penstock.observe.advice import format_bytes, format_duration, format_rate
from penstock.report.content import Report
from penstock.report.page.html import Html, join, tag
from penstock.report.page.layout import document, notes, table, tiles
from penstock.report.sections import run as run_sections
from penstock.report.sections.dataset import dataset_section
from penstock.report.sections.downloads import downloads_section
from penstock.report.sections.shuffle import describe_mixing, shuffle_section

__all__ = ["render_page"]

_WAITED = 0.2  # fraction of time from which the training is data-bound; the watch uses the same


def render_page(report: Report) -> str:
    """Return the whole page."""
    run, data = report.run, report.dataset
    parts: list[tuple[str, str, Html | None]] = [("glance", "At a glance", _glance(report))]
    if data is not None:
        parts.append(("dataset", "Dataset", dataset_section(data, report.pictures, report.no_pictures)))
    parts.append(("shuffle", "Shuffle", shuffle_section(report.shuffle, watched=run is not None)))
    if run is not None:
        parts += [
            ("training", "Training curve", run_sections.training_section(run) or _no_curve()),
            ("pace", "Throughput and waiting", run_sections.pace_section(run)),
            ("downloads", "Downloads", downloads_section(run)),
            ("stages", "Stage timeline", run_sections.stages_section(run)),
            ("memory", "Memory", run_sections.memory_section(run)),
        ]
    parts.append(("faults", "Faults and quarantine", _faults_section(report)))
    parts.append(("made", "How this was made", _provenance_section(report)))
    lead = tag("p", _subtitle(report), class_="soft")
    made = report.provenance
    foot = f"Made by Penstock {made['penstock']} on {_format_date(made['date'])}. This file needs no network."
    return document(report.title, lead, [(i, heading, content) for i, heading, content in parts if content], foot)


def _subtitle(report: Report) -> str:
    subjects = {
        (True, True): "a dataset and a training run",
        (True, False): "a dataset",
        (False, True): "a training run",
    }
    return f"A Penstock report on {subjects[report.dataset is not None, report.run is not None]}."


def _glance(report: Report) -> Html:
    lines: list[tuple[str, str]] = []
    figures: list[tuple[str, str]] = []
    data, run = report.dataset, report.run
    if data is not None:
        fields = [entry["name"] for entry in data["fields"] if not entry["is_metadata"]]
        part = f" ({data['split']} split)" if data["split"] else ""
        lines.append(
            (
                "",
                f"The dataset{part} holds {count(data['items'], 'item')} in {count(data['shards'], 'shard')}, "
                f"{format_bytes(data['bytes'])}: {', '.join(fields)}.",
            )
        )
        figures += [("items", f"{data['items']:,}"), ("size", format_bytes(data["bytes"]))]
    lines.append(_health(report))
    known = report.shuffle is not None and "mixing" in report.shuffle
    if known and report.shuffle is not None:
        lines.append(describe_mixing(report.shuffle))
        figures.append(("mixing score", f"{report.shuffle['mixing']['score']:.2f} of 1"))
    if run is not None:
        seen = run.figures
        items = f", {count(seen['items'], 'item')}" if seen["items"] else ""
        batches, epochs = count(seen["batches"], "batch"), count(seen["epochs"], "epoch")
        lines.append(
            (
                "",
                f"The training ran {batches} in {epochs}{items}, in {format_duration(1000 * seen['elapsed_seconds'])}.",
            )
        )
        waited = seen["wait_fraction"]
        kind = "" if waited is None else "bad" if waited >= _WAITED else "good"
        lines += [(kind, line) for line in seen["advice"]]
        if waited is not None:
            figures.append(("waiting for data", f"{100 * waited:.{0 if waited >= 0.1 else 1}f} %"))
        if "download_bytes" in seen:
            figures.append(("downloaded", format_bytes(seen["download_bytes"])))
        if seen["items_per_second"]:
            figures.append(("items per second", format_rate(seen["items_per_second"])))
        for name, value in list(seen.get("values", {}).items())[:2]:
            figures.append((f"last {name}", f"{value:.3g}".replace("-", "−")))
    figures.append(("faults", f"{len(report.faults):,}" if report.faults else "none"))
    return join(notes(lines), tiles(figures))


def _health(report: Report) -> tuple[str, str]:
    if report.faults:
        whats = sorted({fault["what"] for fault in report.faults})
        short = ", ".join(whats[:3]) + (" and more" if len(whats) > 3 else "")
        return "bad", f"{count(len(report.faults), 'fault')}: {short}. Details are below."
    if report.dataset is not None:
        return (
            "good",
            join(
                "All shards are present with the right size, and no item is in quarantine. To verify every byte: ",
                tag("code", f"penstock verify {report.dataset['path']}"),
            ),
        )
    return "good", "No faults: no item in quarantine, no worker restarted."


def _no_curve() -> Html:
    return tag(
        "p",
        "The training recorded no values. To record them, call ",
        tag("code", "watched.record(loss=loss.item())"),
        " after each batch.",
    )


def _faults_section(report: Report) -> Html:
    if not report.faults:
        return tag("p", "None: all shards are present with the right size, and no item is in quarantine.")
    rows = [[fault["what"], fault["where"], fault["why"]] for fault in report.faults]
    words = join(
        "An item in quarantine was damaged when it was read; a healthy one was delivered in its place. ",
        tag("code", "penstock verify"),
        " checks every byte of a dataset, and lists what to restore.",
    )
    return join(table("Faults", ["what", "where", "why"], rows, long=(2,)), tag("p", words, class_="soft"))


def _provenance_section(report: Report) -> Html:
    made, run, data = report.provenance, report.run, report.dataset
    rows: list[list[str]] = [
        ["Penstock", made["penstock"]],
        ["command", tag("code", made["command"])],
        ["date", _format_date(made["date"])],
    ]
    if data is not None:
        rows += [["dataset", data["path"]], ["fingerprint", data["fingerprint"]]]
    if run is not None:
        rows += [["run file", str(run.path)], ["watched", _describe_run(run.about)]]
        if run.dataset and data is None:
            add = tag("code", f"--dataset {run.dataset}")
            rows.append(["dataset of the run", join(run.dataset, "; to include it: ", add)])
    if made["seed"] is not None:
        rows.append(["seed", str(made["seed"])])
    if made["order_hash"]:
        rows.append(["order hash, epoch 0", join(made["order_hash"], " (equal for equal orders)")])
    cells = [[name, join(value)] for name, value in rows]  # as markup, so that numbers are not right-aligned
    return table("How this was made", [], cells, long=(1,))


def _describe_run(about: dict[str, Any]) -> str:
    words = [f"{about.get('program') or 'a program'} on {_format_date(about.get('saved', 'an unknown date'))}"]
    words.append(
        f"Penstock {about.get('penstock', '?')}, Python {about.get('python', '?')}, {about.get('loader', '?')}"
    )
    return ", ".join(words)


def _format_date(date: str) -> str:
    """Return a readable date in UTC."""
    return f"{date[:10]} {date[11:16]} UTC" if date.endswith("+00:00") else date
