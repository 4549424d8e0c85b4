"""Plot the result of a watch, and of a benchmark of several settings."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.errors import MissingDependency, OptionError
from penstock.files.figures import save_figure
from penstock.observe.advice import describe_growth, format_duration, format_rate
from penstock.observe.durations import Durations, Floats, LoopTimes, Trace
from penstock.observe.text import GREY, SANS, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["WatchTraces", "plot_benchmark", "plot_watch"]

# Okabe and Ito's colours, as in all figures.
_WAIT, _STEP, _MEMORY, _GPU = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
_DPI = 120
_SHORTEST_MS = 1e-3  # shorter times are plotted as this
_BIN = 1.08  # from one edge to the next: about 60 bins for two decades


@dataclass(frozen=True, slots=True)
class WatchTraces:
    """Values that a watch keeps, over the seconds since it began."""

    wait: Trace = field(default_factory=Trace)
    step: Trace = field(default_factory=Trace)
    startup: Trace = field(default_factory=Trace)
    resident: Trace = field(default_factory=Trace)
    gpu: Trace = field(default_factory=Trace)
    items: Trace = field(default_factory=Trace)
    """Items of every batch, including warm-up."""

    download: Trace = field(default_factory=Trace)
    """Bytes that were downloaded since the value before."""


def plot_watch(traces: WatchTraces, times: LoopTimes, figures: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Plot waiting and training over time, the distribution of both, and the memory."""
    figure = _make_figure(10.0, 6.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    unit, name = (1.0, "s") if figures["elapsed_seconds"] < 300 else (60.0, "min")
    above = _add_axes(figure, grid[0, :], "Each batch, over time", f"time ({name})", "")
    for trace, colour, what in ((traces.step, _STEP, "training on it"), (traces.wait, _WAIT, "waiting for it")):
        _plot_trace(above, trace, unit, colour, what)
    if len(traces.startup.times):
        at, high = traces.startup.times / unit, _clip_ms(traces.startup.peaks)
        above.plot(at, high, linestyle="", marker="v", markersize=5, color=GREY, label="start of an epoch")
    _scale_durations(above, "y")
    above.set_xlim(0, max(figures["elapsed_seconds"] / unit, 1e-3))
    if above.get_legend_handles_labels()[0]:
        above.legend(
            loc="lower left", bbox_to_anchor=(0.45, 1.0), ncols=3, frameon=False, prop={"family": SANS, "size": 8.5}
        )
    _plot_distributions(_add_axes(figure, grid[1, 0], "How long, how often", "", "batches"), times)
    _plot_memory(
        _add_axes(figure, grid[1, 1], "Memory of all processes", f"time ({name})", "MB"), traces, figures, unit
    )
    figure.suptitle(
        shorten(figures["advice"][0].split(". ")[0], 130),
        x=0.01, ha="left", size=10.5, family=SANS, parse_math=False,
    )  # fmt: skip
    save_figure(figure, Path(path), _DPI)


def plot_benchmark(results: Mapping[str, Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Plot the batches per second and the time to the first batch of each setting.

    Parameters
    ----------
    results
        Maps the name of a setting to its options, with `batches_per_second`, and `mean_batch_time`, `std_batch_time`
        and `startup_time` in seconds.
    """
    if not results:
        raise OptionError("There are no results to plot. Run a benchmark first.")
    figure = _make_figure(10.0, 1.5 + 0.5 * len(results))
    grid = figure.add_gridspec(1, 2, width_ratios=(1.6, 1))
    rows = np.arange(len(results))
    rates = [entry["batches_per_second"] for entry in results.values()]
    starts = [1000 * entry["startup_time"] for entry in results.values()]
    best = int(np.argmax(rates))
    left = _add_axes(figure, grid[0, 0], "Speed (batches/s)", "", "")
    left.barh(rows, rates, height=0.62, color=[_MEMORY if row == best else _STEP for row in rows])
    left.set_yticks(rows, [_describe_setting(name, entry) for name, entry in results.items()])
    notes = [
        f" {format_rate(speed)}/s  "
        f"({format_duration(1000 * entry['mean_batch_time'])} ± {format_duration(1000 * entry['std_batch_time'])})"
        for speed, entry in zip(rates, results.values(), strict=True)
    ]
    right = _add_axes(figure, grid[0, 1], "Time to the first batch", "", "")
    right.barh(rows, starts, height=0.62, color="#999999")
    right.set_yticks([])
    for ax, widths, texts in (
        (left, rates, notes),
        (right, starts, [f" {format_duration(start)}" for start in starts]),
    ):
        ax.invert_yaxis()
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.set_xlim(0, max(*widths, 1e-9) * 1.45)
        for row, (width, text) in enumerate(zip(widths, texts, strict=True)):
            ax.text(width, row, text, va="center", size=8, family=SANS, parse_math=False)
    save_figure(figure, Path(path), _DPI)


def _describe_setting(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name and options of a setting, without its measurements."""
    kept = {key: value for key, value in entry.items() if key in _OPTIONS and value is not False}
    words = [f"{_OPTIONS[key]} {value}" if value is not True else _OPTIONS[key] for key, value in kept.items()]
    return shorten(f"{name}: {', '.join(words) or 'as given'}", 70)


_OPTIONS = {
    "num_workers": "workers",
    "prefetch_factor": "prefetch",
    "persistent_workers": "persistent",
    "pin_memory": "pinned",
    "multiprocessing_context": "start",
}


def _plot_trace(ax: "Axes", trace: Trace, unit: float, colour: str, what: str) -> None:
    if not len(trace.times):
        return
    times, means, peaks = trace.times / unit, _clip_ms(trace.means), _clip_ms(trace.peaks)
    ax.fill_between(times, means, peaks, color=colour, alpha=0.25, linewidth=0)
    ax.plot(
        times, means, color=colour, linewidth=1.1, marker="o" if len(times) <= 64 else "", markersize=2.5, label=what
    )


def _plot_distributions(ax: "Axes", times: LoopTimes) -> None:
    top = 0
    for durations, colour in ((times.step, _STEP), (times.wait, _WAIT)):
        edges, counts = durations.histogram(_BIN)
        if len(counts):
            top = max(top, int(counts.max()))
            ax.stairs(counts, _clip_ms(edges), fill=True, color=colour, alpha=0.6)
    _scale_durations(ax, "x")
    ax.locator_params(axis="y", integer=True, nbins=6)
    ax.set_ylim(0, max(1.22 * top, 1.0))
    if times.wait.count:
        _mark_quantiles(ax, times.wait, top)


def _mark_quantiles(ax: "Axes", wait: Durations, top: int) -> None:
    """Mark the median and the 95th percentile of the times."""
    for fraction, high in ((0.5, 1.15), (0.95, 1.06)):
        at = max(1000 * wait.quantile(fraction), _SHORTEST_MS)
        ax.axvline(at, ymax=high / 1.22, color=_WAIT, linewidth=0.9, linestyle="--")
        ax.text(
            at,
            high * top,
            f" p{100 * fraction:.0f} {format_duration(at)}",
            color=_WAIT,
            size=8,
            family=SANS,
            va="center",
        )


def _plot_memory(ax: "Axes", traces: WatchTraces, figures: Mapping[str, Any], unit: float) -> None:
    resident = traces.resident
    if len(resident.times):
        times, mb = resident.times / unit, resident.means / 1e6
        ax.plot(times, mb, color=_MEMORY, linewidth=1.3, marker="o" if len(times) <= 32 else "", markersize=2.5)
        low, high = float(mb.min()), float(mb.max())
        # The range follows the data, but is never so small that noise looks like growth.
        margin = max(0.08 * high, 1.2 * (high - low)) - (high - low)
        ax.set_ylim(max(0.0, low - margin / 2), high + margin / 2)
    ax.set_xlim(0, max(figures["elapsed_seconds"] / unit, 1e-3))
    growth = describe_growth(figures)
    if growth is not None:
        ax.set_title(f"Memory of all processes: {growth}", size=9.5, family=SANS, loc="left")
    if len(traces.gpu.times):
        beside = ax.twinx()
        beside.plot(traces.gpu.times / unit, traces.gpu.means, color=_GPU, linewidth=1.0)
        beside.set_ylim(0, 105)
        beside.set_ylabel("GPU busy (%)", size=8.5, family=SANS, color=_GPU)
        beside.tick_params(labelsize=8, labelfontfamily=SANS, color=GREY, labelcolor=_GPU)
        beside.spines["top"].set_visible(False)


def _clip_ms(seconds: Floats) -> Floats:
    return np.maximum(1000 * seconds, _SHORTEST_MS)


def _scale_durations(ax: "Axes", axis: str) -> None:
    """Give an axis a logarithmic scale in milliseconds, labelled with readable units."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415  # optional

    ax.set(**{f"{axis}scale": "log"})
    scale = ax.xaxis if axis == "x" else ax.yaxis
    low, high = scale.get_view_interval()
    # At least two decades: a single one would have one label or none.
    middle = math.sqrt(low * high)
    limits = (min(low, middle / 10), max(high, middle * 10))
    ax.set(**{f"{axis}lim": (max(limits[0], _SHORTEST_MS / 2), limits[1])})
    few = limits[1] < 1e4 * limits[0]
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if few and axis == "x" else (1,), numticks=14))
    scale.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value)))
    scale.set_minor_formatter(NullFormatter())


def _make_figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "Plotting a watch") from error
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _add_axes(figure: "Figure", cell: Any, title: str, xlabel: str, ylabel: str) -> "Axes":
    ax = figure.add_subplot(cell)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(labelsize=8, labelfontfamily=SANS, color=GREY, labelcolor="#222222")
    ax.tick_params(which="minor", color="#BBBBBB")
    ax.set_title(title, size=9.5, family=SANS, loc="left")
    ax.set_xlabel(xlabel, size=8.5, family=SANS)
    ax.set_ylabel(ylabel, size=8.5, family=SANS)
    return ax
