"""From what a report says to the page that says it."""

from typing import Any

from penstock.observe.advice import format_bytes, format_duration, format_rate
from penstock.report.content import Report
from penstock.report.page.html import Html, joined, tag
from penstock.report.page.layout import document, notes, table, tiles
from penstock.report.sections import run as run_sections
from penstock.report.sections.dataset import dataset_section
from penstock.report.sections.shuffle import mixing_words, shuffle_section

__all__ = ["rendered"]

_WAITED = 0.2  # of the time: the training is data-bound, as the watch says, too


def rendered(report: Report) -> str:
    """Return the whole page."""
    run, data = report.run, report.dataset
    parts: list[tuple[str, str, Html | None]] = [("glance", "At a glance", _glance(report))]
    if data is not None:
        parts.append(("dataset", "Data set", dataset_section(data, report.drawn, report.not_drawn)))
    parts.append(("shuffle", "Shuffle", shuffle_section(report.shuffle, watched=run is not None)))
    if run is not None:
        parts += [
            ("training", "Training curve", run_sections.training(run) or _no_curve()),
            ("pace", "Throughput and waiting", run_sections.pace(run)),
            ("stages", "Stage timeline", run_sections.stages(run)),
            ("memory", "Memory", run_sections.memory(run)),
        ]
    parts.append(("faults", "Faults and quarantine", _faults(report)))
    parts.append(("made", "How this was made", _made(report)))
    lead = tag("p", _subtitle(report), class_="soft")
    foot = f"Made by Penstock {report.made['penstock']} on {_day(report.made['date'])}. This file needs no network."
    return document(report.title, lead, [(i, heading, content) for i, heading, content in parts if content], foot)


def _subtitle(report: Report) -> str:
    what = {(True, True): "A data set and a training on it", (True, False): "A data set", (False, True): "A training"}
    return f"{what[report.dataset is not None, report.run is not None]}, as Penstock sees it."


def _glance(report: Report) -> Html:
    lines: list[tuple[str, str]] = []
    figures: list[tuple[str, str]] = []
    data, run = report.dataset, report.run
    if data is not None:
        fields = [entry["name"] for entry in data["fields"] if not entry["is_metadata"]]
        part = f" (the split {data['split']})" if data["split"] else ""
        lines.append(
            (
                "",
                f"The data set{part} holds {data['items']:,} items in {_counted(data['shards'], 'shard')}, "
                f"{format_bytes(data['bytes'])}: {', '.join(fields)}.",
            )
        )
        figures += [("items", f"{data['items']:,}"), ("size", format_bytes(data["bytes"]))]
    lines.append(_health(report))
    known = report.shuffle is not None and "mixing" in report.shuffle
    if known and report.shuffle is not None:
        lines.append(mixing_words(report.shuffle))
        figures.append(("mixing", f"{report.shuffle['mixing']['score']:.2f} of 1"))
    if run is not None:
        seen = run.figures
        items = f", {seen['items']:,} items" if seen["items"] else ""
        batches, epochs = _counted(seen["batches"], "batch", "batches"), _counted(seen["epochs"], "epoch")
        lines.append(
            (
                "",
                f"The training took {batches} in {epochs}{items}, "
                f"in {format_duration(1000 * seen['elapsed_seconds'])}.",
            )
        )
        waited = seen["wait_fraction"]
        kind = "" if waited is None else "bad" if waited >= _WAITED else "good"
        lines += [(kind, line) for line in seen["advice"]]
        if waited is not None:
            figures.append(("waiting for data", f"{100 * waited:.{0 if waited >= 0.1 else 1}f} %"))
        if seen["items_per_second"]:
            figures.append(("items per second", format_rate(seen["items_per_second"])))
        for name, value in list(seen.get("values", {}).items())[:2]:
            figures.append((f"{name}, at the end", f"{value:.3g}".replace("-", "−")))
    figures.append(("faults", f"{len(report.faults):,}" if report.faults else "none"))
    return joined(notes(lines), tiles(figures))


def _health(report: Report) -> tuple[str, str]:
    if report.faults:
        whats = sorted({fault["what"] for fault in report.faults})
        short = ", ".join(whats[:3]) + (" and more" if len(whats) > 3 else "")
        return "bad", f"{_counted(len(report.faults), 'fault')}: {short}. See below for what, where and why."
    if report.dataset is not None:
        return (
            "good",
            joined(
                "Every shard is there with the size that was written, and no item is in quarantine. ",
                "To read every byte: ",
                tag("code", f"penstock verify {report.dataset['path']}"),
            ),
        )
    return "good", "No fault was met: no item in quarantine, no worker started again."


def _no_curve() -> Html:
    return tag(
        "p",
        "The training recorded no values. To see them here, call ",
        tag("code", "watched.record(loss=loss.item())"),
        " beside each batch.",
    )


def _faults(report: Report) -> Html:
    if not report.faults:
        return tag("p", "None: no shard is missing or has another size, and no item is in quarantine.")
    rows = [[fault["what"], fault["where"], fault["why"]] for fault in report.faults]
    words = joined(
        "An item in quarantine was damaged when it was read; a healthy one was delivered in its place. ",
        tag("code", "penstock verify"),
        " checks every byte of a data set, and names what to restore.",
    )
    return joined(table("Faults", ["what", "where", "why"], rows, long=(2,)), tag("p", words, class_="soft"))


def _made(report: Report) -> Html:
    made, run, data = report.made, report.run, report.dataset
    rows: list[list[str]] = [
        ["Penstock", made["penstock"]],
        ["command", tag("code", made["command"])],
        ["date", _day(made["date"])],
    ]
    if data is not None:
        rows += [["data set", data["path"]], ["fingerprint", data["fingerprint"]]]
    if run is not None:
        rows += [["run file", str(run.path)], ["watched", _watched(run.about)]]
        if run.dataset and data is None:
            add = tag("code", f"--dataset {run.dataset}")
            rows.append(["data set of the run", joined(run.dataset, "; to show it here, too: ", add)])
    if made["seed"] is not None:
        rows.append(["seed", str(made["seed"])])
    if made["order_hash"]:
        rows.append(["order hash, epoch 0", joined(made["order_hash"], " (equal wherever the order is)")])
    cells = [[name, joined(value)] for name, value in rows]  # as markup, whatever looks like a number is text here
    return table("How this was made", [], cells, long=(1,))


def _watched(about: dict[str, Any]) -> str:
    words = [f"{about.get('program') or 'a program'} on {_day(about.get('saved', 'an unknown date'))}"]
    words.append(
        f"Penstock {about.get('penstock', '?')}, Python {about.get('python', '?')}, {about.get('loader', '?')}"
    )
    return ", ".join(words)


def _day(date: str) -> str:
    """Return a date in UTC as a person reads it."""
    return f"{date[:10]} {date[11:16]} UTC" if date.endswith("+00:00") else date


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
