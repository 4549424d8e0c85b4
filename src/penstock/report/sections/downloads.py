"""The section of a report about what a run downloaded."""

import numpy as np

from penstock.observe.advice import describe_downloads, format_bytes, format_duration
from penstock.observe.run_file import Run
from penstock.observe.text import format_number
from penstock.report.page.html import Html, join, tag
from penstock.report.page.layout import figure, table
from penstock.report.page.svg import Axis, Chart, Line
from penstock.report.sections.bins import row_step, time_bins, time_unit

__all__ = ["downloads_section"]


def downloads_section(run: Run) -> Html | None:
    """Return downloads over time and in total; None if the data was local."""
    figures = run.figures
    if "download_bytes" not in figures:
        return None
    hidden, waited = figures["download_hidden_seconds"], figures["download_waited_seconds"]
    rows = [
        ["downloaded", format_bytes(figures["download_bytes"])],
        ["requests", f"{figures['download_requests']:,}"],
        ["retries", f"{figures['download_retries']:,}"],
        ["reads found in the cache", _format_share(figures["cache_hits"], figures["cache_misses"])],
        ["download time that no read waited for", format_duration(1000 * hidden)],
        ["time that reads waited for downloads", format_duration(1000 * waited)],
    ]
    about = (
        "Of all processes of the loader. Downloads run side by side and ahead of the batches, so that their time may "
        "add up to more than that of the run."
    )
    return join(
        _rate_chart(run) if len(run.traces["download"]) else tag("p", f"{describe_downloads(figures)}."),
        table("Downloads", ["", "total"], rows),
        tag("p", about, class_="soft"),
    )


def _rate_chart(run: Run) -> Html:
    edges, unit = time_bins(run), time_unit(run.figures["elapsed_seconds"])
    speed = run.traces["download"].per_second(edges) / 1e6
    middle = (edges[:-1] + edges[1:]) / 2 / unit[0]
    chart = Chart(
        title="Downloads over time",
        finding=f"{describe_downloads(run.figures)}.",
        x=Axis(f"time ({unit[1]})", 0, float(edges[-1]) / unit[0]),
        y=Axis("MB per second", 0, max(1.08 * float(speed.max()), 1e-9)),
        content=(Line("downloads", middle, np.maximum(speed, 0.0)),),
    )
    rows = [
        [format_number(float(f"{at:.4g}")), format_number(float(f"{value:.4g}"))]
        for at, value in zip(middle, speed, strict=True)
    ]
    return figure("chart-downloads", chart, [f"time ({unit[1]})", "MB per second"], rows[:: row_step(len(rows))])


def _format_share(hits: int, misses: int) -> str:
    return f"{hits:,} of {hits + misses:,} ({100 * hits / (hits + misses):.0f} %)" if hits + misses else "–"
