"""The sections of a report about a watched run: training curve, pace, stages and memory."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.observe.advice import describe_growth, format_bytes, format_duration, format_rate
from penstock.observe.curves import Curve
from penstock.observe.durations import Floats
from penstock.observe.run_file import Run
from penstock.observe.text import format_number
from penstock.report.page.html import Html, join, tag
from penstock.report.page.layout import figure, table
from penstock.report.page.svg import Axis, Chart, Line, Stack
from penstock.report.sections.bins import row_step, time_bins, time_unit

__all__ = ["memory_section", "pace_section", "stages_section", "training_section"]

_APART = 30.0  # ratio: curves that differ by more get separate charts, or the smaller ones would be flat lines
_ORDER = ("read", "transform", "collate", "wait", "device")


def training_section(run: Run) -> Html | None:
    """Return charts of the recorded values; None if the training recorded none."""
    curves = {name: curve for name, curve in run.recorded.items() if len(curve)}
    if not curves:
        return None
    charts = []
    for count, names in enumerate(_group_by_magnitude(curves)):
        kept = {name: curves[name] for name in names}
        low = min(float(curve.mean.min()) for curve in kept.values())
        high = max(float(curve.mean.max()) for curve in kept.values())
        last = max(float(curve.x[-1]) for curve in kept.values())
        chart = Chart(
            title=f"{_join_names(list(kept))} by batch",
            finding=" ".join(_describe_curve(name, curve) for name, curve in kept.items()),
            x=Axis("batches", 0, last),
            y=_padded_axis("value", low, high),
            content=tuple(Line(name, curve.x, curve.mean) for name, curve in kept.items()),
        )
        charts.append(figure(f"chart-training-{count}", chart, *_curve_table(kept)))
    return join(*charts)


def pace_section(run: Run) -> Html:
    """Return throughput and waiting over time, and the durations of both."""
    figures = run.figures
    parts: list[Html | None] = []
    edges, unit = time_bins(run), time_unit(figures["elapsed_seconds"])
    items = run.traces["items"]
    if len(items):
        parts += [_throughput_chart(run, edges, unit), _time_chart(run, edges, unit)]
    rows = [
        [
            what,
            *(
                "–" if figures[f"{name}_{which}_ms"] is None else format_duration(figures[f"{name}_{which}_ms"])
                for which in ("mean", "p50", "p95", "max")
            ),
        ]
        for name, what in (("wait", "waiting for a batch"), ("step", "training on a batch"))
    ]
    about = (
        f"Excludes the first {figures['warmup_batches']:,} batches and the first of each epoch; starting an epoch took "
        f"{format_duration(figures['startup_ms'] or 0.0)} on average. p95: 95 % of the batches took no longer."
    )
    return join(
        *parts,
        tag("h3", "Time per batch"),
        table("Time per batch", ["", "mean", "p50", "p95", "max"], rows),
        tag("p", about, class_="soft"),
    )


def _throughput_chart(run: Run, edges: Floats, unit: tuple[float, str]) -> Html:
    items = run.traces["items"]
    counted = bool(items.total.sum())
    what = "items" if counted else "batches"
    speed = items.per_second(edges, None if counted else items.count)
    middle = (edges[:-1] + edges[1:]) / 2 / unit[0]
    steady = run.figures[f"{what}_per_second"]
    rate = (
        f"{format_rate(steady)} {what} per second of waiting and training, without the start of each epoch, the first "
        f"{run.figures['warmup_batches']:,} batches, and pauses such as validation. The chart has them all. "
        if steady
        else "The run was too short for a single figure. "
    )
    chart = Chart(
        title="Throughput over time",
        finding=f"{rate}Between {format_rate(float(speed.min()))} and {format_rate(float(speed.max()))} {what} per "
        "second.",
        x=Axis(f"time ({unit[1]})", 0, float(edges[-1]) / unit[0]),
        y=Axis(f"{what} per second", 0, max(1.08 * float(speed.max()), 1e-9)),
        content=(Line(what, middle, speed),),
    )
    rows = [[format_number(float(at)), format_rate(float(value))] for at, value in zip(middle, speed, strict=True)]
    return figure("chart-throughput", chart, [f"time ({unit[1]})", f"{what} per second"], rows[:: row_step(len(rows))])


def _time_chart(run: Run, edges: Floats, unit: tuple[float, str]) -> Html:
    names = ("training", "waiting for data", "starting an epoch")
    heights = tuple(100 * run.traces[name].per_second(edges) for name in ("step", "wait", "startup"))
    chart = Chart(
        title="Where the time went",
        finding=" ".join(run.figures["advice"][:1])
        + " Stacked from bottom to top in legend order; the rest is other time, such as validation or the first step "
        "of an epoch.",
        x=Axis(f"time ({unit[1]})", 0, float(edges[-1]) / unit[0]),
        y=Axis("fraction of time (%)", 0, 100),
        content=(Stack(names, edges / unit[0], heights),),
    )
    return figure("chart-shares", chart, *_stack_table(names, edges, heights, unit))


def stages_section(run: Run) -> Html:
    """Return the stages of the loader over time; if they were not observed, how to observe them."""
    if not run.stages:
        return tag(
            "p",
            "No stages were timed. To time them, give the loader an observer: ",
            tag("code", "Loader(source, plan, observer=Timings())"),
            ".",
        )
    edges, unit = time_bins(run), time_unit(run.figures["elapsed_seconds"])
    names = sorted(run.stages, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    heights = tuple(run.stages[name]["curve"].per_second(edges) for name in names)
    seconds = {name: float(run.stages[name]["curve"].total.sum()) for name in names}
    most = max((name for name in names if name != "wait"), key=lambda name: seconds[name], default="wait")
    top = float(np.sum(heights, axis=0).max())
    chart = Chart(
        title="Time per stage",
        finding=f"The slowest stage of the loader was {most}: {format_duration(1000 * seconds[most])} in "
        f"{format_duration(1000 * run.figures['elapsed_seconds'])}. Stages run in parallel with each other and with "
        "the training, so that they may add up to more than one second per second.",
        x=Axis(f"time ({unit[1]})", 0, float(edges[-1]) / unit[0]),
        y=Axis("seconds per second", 0, max(1.05 * top, 1e-9)),
        content=(Stack(tuple(names), edges / unit[0], heights),),
    )
    rows = [
        [
            name,
            f"{run.stages[name]['calls']:,}",
            format_duration(1000 * seconds[name]),
            format_duration(1000 * seconds[name] / max(1, run.stages[name]["calls"])),
            format_bytes(run.stages[name]["bytes"]) if run.stages[name]["bytes"] else "–",
        ]
        for name in names
    ]
    return join(
        figure("chart-stages", chart, *_stack_table(names, edges, heights, unit)),
        table("Stages", ["stage", "calls", "total", "mean", "bytes"], rows),
    )


def memory_section(run: Run) -> Html | None:
    """Return memory and GPU utilization over time; None if neither is known."""
    resident, gpu = run.traces["resident"], run.traces["gpu"]
    unit = time_unit(run.figures["elapsed_seconds"])
    time_axis = Axis(f"time ({unit[1]})", 0, max(run.figures["elapsed_seconds"] / unit[0], 1e-9))
    parts: list[Html] = []
    if len(resident):
        scale, name = (1e9, "GB") if resident.peak.max() >= 1e10 else (1e6, "MB")
        values = resident.mean / scale
        rate = describe_growth(run.figures)
        growth = "The run was too short to measure growth." if rate is None else f"It changed by {rate}."
        chart = Chart(
            title="Memory of all processes",
            finding=f"{format_bytes(float(resident.peak.max()))} peak. {growth}",
            x=time_axis,
            y=Axis(f"memory ({name})", 0, 1.08 * float(values.max())),
            content=(Line("memory", resident.x / unit[0], values),),
        )
        rows = [
            [format_number(float(at)), format_number(float(f"{value:.4g}"))]
            for at, value in zip(resident.x / unit[0], values, strict=True)
        ]
        parts.append(figure("chart-memory", chart, [time_axis.label, f"memory ({name})"], rows[:: row_step(len(rows))]))
    if len(gpu):
        busy = float((gpu.mean * gpu.count).sum() / gpu.count.sum())
        chart = Chart(
            title="GPU utilization",
            finding=f"{busy:.0f} % of the time on average.",
            x=time_axis,
            y=Axis("utilization (%)", 0, 100),
            content=(Line("GPU", gpu.x / unit[0], gpu.mean),),
        )
        points = zip(gpu.x / unit[0], gpu.mean, strict=True)
        rows = [[format_number(float(at)), format_number(float(value))] for at, value in points]
        parts.append(figure("chart-gpu", chart, [time_axis.label, "utilization (%)"], rows[:: row_step(len(rows))]))
    return join(*parts) if parts else None


# -- inside ------------------------------------------------------------------------------------------------------------


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


def _describe_curve(name: str, curve: Curve) -> str:
    first, last = float(curve.mean[0]), float(curve.mean[-1])
    if len(curve) == 1:
        return f"{name} is {format_number(last)}."
    low, high = format_number(float(curve.mean.min())), format_number(float(curve.mean.max()))
    return f"{name} went from {format_number(first)} to {format_number(last)} (lowest {low}, highest {high})."


def _padded_axis(label: str, low: float, high: float) -> Axis:
    """Return an axis with a margin, starting at 0 if that is near."""
    span = (high - low) or abs(high) or 1.0
    below = 0.0 if 0 <= low <= span else low - 0.06 * span
    return Axis(label, below, high + 0.06 * span)


def _curve_table(curves: Mapping[str, Curve]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows for curves that may have been recorded at different batches."""
    batches = np.unique(np.concatenate([curve.x for curve in curves.values()]))
    rows = []
    for batch in batches[:: row_step(len(batches))]:
        cells = [format_number(float(f"{batch:.6g}"))]
        for curve in curves.values():
            at = int(np.searchsorted(curve.x, batch, side="right")) - 1
            cells.append("–" if at < 0 else format_number(float(curve.mean[at])))
        rows.append(cells)
    return ["batch", *curves], rows


def _stack_table(
    names: Sequence[str], edges: Floats, heights: Sequence[Floats], unit: tuple[float, str]
) -> tuple[list[str], list[list[str]]]:
    middle = (edges[:-1] + edges[1:]) / 2 / unit[0]
    rows = [
        [format_number(float(f"{at:.4g}")), *(format_number(float(f"{height[row]:.3g}")) for height in heights)]
        for row, at in enumerate(middle)
    ]
    return [f"time ({unit[1]})", *names], rows[:: row_step(len(rows))]


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
