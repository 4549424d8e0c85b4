"""Plot the result of a watch, and of a benchmark of several settings, as files."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.files.figures import save_figure
from penstock.observe.advice import describe_growth, format_duration, format_rate
from penstock.observe.durations import Floats, LoopTimes, Trace
from penstock.observe.picture import COLOURS, add_axes, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["WatchTraces", "plot_benchmark", "plot_watch"]

_STEP, _WAIT, _MEMORY, _GPU, _, _OTHER = COLOURS
_DPI = 120
_SHORTEST_MS = 1e-3  # shorter times are plotted as this
_OPTIONS = {
    "num_workers": "workers",
    "prefetch_factor": "prefetch",
    "persistent_workers": "persistent",
    "pin_memory": "pinned",
    "multiprocessing_context": "start",
}


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
    figure = make_figure(880, 560)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    unit, name = (1.0, "s") if figures["elapsed_seconds"] < 300 else (60.0, "min")
    above = add_axes(figure, grid[0, :], f"time ({name})")
    for trace, colour, what in ((traces.step, _STEP, "training on it"), (traces.wait, _WAIT, "waiting for it")):
        if len(trace.times):
            means, peaks = _clip_ms(trace.means), _clip_ms(trace.peaks)
            above.fill_between(trace.times / unit, means, peaks, color=colour, alpha=0.25, linewidth=0)
            above.plot(trace.times / unit, means, color=colour, linewidth=1.1, label=what)
    if len(traces.startup.times):
        at, high = traces.startup.times / unit, _clip_ms(traces.startup.peaks)
        above.plot(at, high, linestyle="", marker="v", markersize=5, color=_OTHER, label="start of an epoch")
    _scale_durations(above, "y")
    above.set_title("Each batch, over time", size=12, loc="left")
    if above.get_legend_handles_labels()[0]:
        above.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=11)
    below = add_axes(figure, grid[1, 0], "", "batches")
    for durations, colour in ((times.step, _STEP), (times.wait, _WAIT)):
        edges, counts = durations.histogram(1.08)
        if len(counts):
            below.stairs(counts, _clip_ms(edges), fill=True, color=colour, alpha=0.6)
    _scale_durations(below, "x")
    for fraction, top in ((0.5, 0.98), (0.95, 0.88)) if times.wait.count else ():
        median = max(1000 * times.wait.quantile(fraction), _SHORTEST_MS)
        below.axvline(median, color=_WAIT, linewidth=0.9, linestyle="--")
        words = f" p{100 * fraction:.0f} {format_duration(median)}"
        below.text(median, top, words, transform=below.get_xaxis_transform(), color=_WAIT, size=11, va="top")
    below.set_title("How long, how often", size=12, loc="left")
    beside, growth = add_axes(figure, grid[1, 1], f"time ({name})", "MB"), describe_growth(figures)
    for trace, colour, scale in ((traces.resident, _MEMORY, 1e6), (traces.gpu, _GPU, 1.0)):
        if len(trace.times):
            ax = beside if scale > 1 else beside.twinx()
            ax.plot(trace.times / unit, trace.means / scale, color=colour, linewidth=1.3)
            ax.set_ylim(0, 1.1 * float(trace.peaks.max()) / scale if scale > 1 else 105)
            ax.set_ylabel("MB" if scale > 1 else "GPU busy (%)")
    beside.set_title(f"Memory of all processes{(growth and f': {growth}') or ''}", size=12, loc="left")
    figure.suptitle(textwrap.shorten(figures["advice"][0].split(". ")[0], 110), x=0.01, ha="left", size=13)
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
    figure = make_figure(880, 110 + 36 * len(results))
    grid = figure.add_gridspec(1, 2, width_ratios=(1.6, 1))
    names = [_describe_setting(name, entry) for name, entry in results.items()]
    rates = [entry["batches_per_second"] for entry in results.values()]
    starts = [1000 * entry["startup_time"] for entry in results.values()]
    notes = [
        f" {format_rate(entry['batches_per_second'])}/s  "
        f"({format_duration(1000 * entry['mean_batch_time'])} ± {format_duration(1000 * entry['std_batch_time'])})"
        for entry in results.values()
    ]
    left, right = add_axes(figure, grid[0, 0]), add_axes(figure, grid[0, 1])
    left.set_title("Speed (batches/s)", size=12, loc="left")
    left.barh(names, rates, color=[_MEMORY if rate == max(rates) else _STEP for rate in rates])
    right.set_title("Time to the first batch", size=12, loc="left")
    right.barh(names, starts, color=_OTHER)
    right.set_yticks([])
    for ax, widths, texts in (
        (left, rates, notes),
        (right, starts, [f" {format_duration(start)}" for start in starts]),
    ):
        ax.invert_yaxis()
        ax.set_xticks([])
        ax.set_xlim(0, max(*widths, 1e-9) * 1.45)
        for row, (width, text) in enumerate(zip(widths, texts, strict=True)):
            ax.text(width, row, text, va="center", size=11)
    save_figure(figure, Path(path), _DPI)


def _describe_setting(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name and options of a setting, without its measurements."""
    kept = {key: value for key, value in entry.items() if key in _OPTIONS and value is not False}
    words = [f"{_OPTIONS[key]} {value}" if value is not True else _OPTIONS[key] for key, value in kept.items()]
    return textwrap.shorten(f"{name}: {', '.join(words) or 'as given'}", 70)


def _clip_ms(seconds: Floats) -> Floats:
    return np.maximum(1000 * seconds, _SHORTEST_MS)


def _scale_durations(ax: "Axes", axis: str) -> None:
    """Give an axis a logarithmic scale in milliseconds, labelled with readable units."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415  # optional

    ax.set(**{f"{axis}scale": "log"})
    scale = ax.xaxis if axis == "x" else ax.yaxis
    low, high = scale.get_view_interval()
    middle = (low * high) ** 0.5  # at least two decades: a single one would have one label or none
    ax.set(**{f"{axis}lim": (max(min(low, middle / 10), _SHORTEST_MS / 2), max(high, middle * 10))})
    scale.set_major_locator(LogLocator(numticks=8))
    scale.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value)))
    scale.set_minor_formatter(NullFormatter())
