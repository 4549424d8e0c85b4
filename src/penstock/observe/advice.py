"""Turn the figures of a watch into text and findings. Pure: figures in, lines and findings out."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.text import count
from penstock.observe.finding import Finding

__all__ = [
    "DATA_BOUND",
    "advise",
    "describe_downloads",
    "describe_growth",
    "format_bytes",
    "format_duration",
    "format_rate",
    "live_line",
    "summary",
]

DATA_BOUND = 0.2  # fraction of the time spent waiting: without it, training would be a quarter faster
_NOTICEABLE = 0.05
_MUCH_STARTING = 0.1
_STARTING_SECONDS = 0.05
_MUCH_WAITED = 0.1  # of the time of downloads: the others are too few to make batches late
_ALONE = 0.02  # with a smaller fraction of the time in the training step, there is no training
_GROWTH_SECONDS = 30.0  # what happens in a few seconds does not go on for a minute
_GROWTH_BYTES, _GROWTH_SHARE = 64e6, 0.05

Figures = Mapping[str, Any]


def format_duration(milliseconds: float) -> str:
    """Return a duration in a readable unit.

    Examples
    --------
    >>> format_duration(0.0123), format_duration(80.04), format_duration(1234.0), format_duration(1.2e6)
    ('12.3 µs', '80 ms', '1.23 s', '20.0 min')
    """
    if milliseconds < 1:
        return f"{1000 * milliseconds:.3g} µs"
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1000:.3g} s" if milliseconds < 300_000 else f"{milliseconds / 60_000:,.1f} min"


def format_bytes(nbytes: float) -> str:
    """Return bytes in a readable unit.

    Examples
    --------
    >>> format_bytes(512), format_bytes(1_500_000), format_bytes(2.34e9)
    ('512 bytes', '1.5 MB', '2.34 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= 0.9995 * unit:
            return f"{nbytes / unit:.3g} {name}" if abs(nbytes) < 999.5 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes:.0f} bytes"


def format_rate(per_second: float) -> str:
    """Return a number per second with three digits, never in scientific notation.

    Examples
    --------
    >>> format_rate(12345.6), format_rate(7.4146)
    ('12,346', '7.41')
    """
    return f"{per_second:,.0f}" if per_second >= 99.95 else f"{per_second:.3g}"


def summary(figures: Figures) -> str:
    """Return the figures in a few lines, followed by the advice."""
    return "\n".join([*_describe(figures), *(f"→ {line}" for line in figures["advice"])])


def live_line(figures: Figures, total: int | None) -> str:
    """Return the current state in one line."""
    of = f" of {total:,}" if total else ""
    parts = [f"batch {figures['epoch_batch']:,}{of} of epoch {figures['epochs']}"]
    if figures["wait_fraction"] is not None:
        parts.append(
            f"{100 * figures['wait_fraction']:.0f} % waiting for data (p50 {format_duration(figures['wait_p50_ms'])})"
        )
        parts.append(f"{format_rate(figures['batches_per_second'])} batches/s")
    if "download_bytes" in figures:
        parts.append(f"{format_bytes(figures['download_bytes'])} downloaded")
    if figures["resident_bytes"] is not None:
        parts.append(format_bytes(figures["resident_bytes"]))
    if "gpu_utilization_percent" in figures:
        parts.append(f"GPU {figures['gpu_utilization_percent']:.0f} %")
    return ", ".join(parts)


def advise(figures: Figures, *, restarts_workers: bool) -> list[Finding]:
    """Return what the figures mean for the training, and what to do about it.

    Parameters
    ----------
    restarts_workers
        Whether the loader starts its worker processes again for each epoch, and could keep them.
    """
    return [
        *_advise_on_waiting(figures),
        *_advise_on_downloads(figures),
        *_advise_on_startup(figures, restarts_workers),
        *_advise_on_memory(figures),
    ]


def _describe(figures: Figures) -> Iterator[str]:
    epochs = count(figures["epochs"], "epoch")
    items = f", {count(figures['items'], 'item')}" if figures["items"] is not None else ""
    content = f"{items}, {format_bytes(figures['bytes'])}" if figures["bytes"] else items
    took = format_duration(1000 * figures["elapsed_seconds"])
    yield f"Watched: {count(figures['batches'], 'batch')} in {epochs}{content}, {took}"
    for name, what in (("wait", "Waiting for a batch"), ("step", "Training on a batch")):
        if figures[f"{name}_p50_ms"] is not None:
            times = ", ".join(
                f"{key} {format_duration(figures[f'{name}_{key}_ms'])}" for key in ("mean", "p50", "p95", "max")
            )
            share = (
                f" ({100 * figures['wait_fraction']:.0f} % of the time)"
                if name == "wait" and _has_wait_fraction(figures)
                else ""
            )
            yield f"{what}: {times}{share}"
    if _has_wait_fraction(figures):
        rates = [f"{format_rate(figures['batches_per_second'])} batches/s"]
        if figures["items_per_second"] is not None:
            rates.append(f"{format_rate(figures['items_per_second'])} items/s")
        if figures["bytes_per_second"]:
            rates.append(f"{format_bytes(figures['bytes_per_second'])}/s")
        yield f"Speed: {', '.join(rates)}"
    if figures["startup_ms"] is not None:
        ending = f", end {format_duration(figures['shutdown_ms'])}" if figures["shutdown_ms"] is not None else ""
        share = f" ({100 * figures['startup_fraction']:.0f} % of the time)"
        yield f"Epoch start, including the first batch: {format_duration(figures['startup_ms'])}{ending}{share}"
    if figures["resident_peak_bytes"] is not None:
        growth = f", {rate}" if (rate := describe_growth(figures)) is not None else ""
        yield f"Memory of all processes: peak {format_bytes(figures['resident_peak_bytes'])}{growth}"
    if "download_bytes" in figures:
        yield f"Downloads: {describe_downloads(figures)}"
    if "gpu_utilization_percent" in figures:
        yield (
            f"GPU: {figures['gpu_utilization_percent']:.0f} % busy, "
            f"peak memory {format_bytes(figures['gpu_memory_peak_bytes'])}"
        )


def describe_downloads(figures: Figures) -> str:
    """Return what a run downloaded, and how much of that time the training did not notice.

    Examples
    --------
    >>> figures = {"download_bytes": 2.5e9, "download_requests": 1200, "download_retries": 1, "cache_hits": 300}
    >>> times = {"download_hidden_seconds": 9.5, "download_waited_seconds": 0.5}
    >>> describe_downloads({**figures, **times, "cache_misses": 900})
    '2.5 GB in 1,200 requests, 1 retry, 25 % from the cache; 95 % of the download time was hidden (500 ms waited)'
    """
    requests, retries = figures["download_requests"], figures["download_retries"]
    asked = figures["cache_hits"] + figures["cache_misses"]
    parts = [f"{format_bytes(figures['download_bytes'])} in {count(requests, 'request')}"]
    if retries:
        parts.append(count(retries, "retry"))
    if asked:
        parts.append(f"{100 * figures['cache_hits'] / asked:.0f} % from the cache")
    hidden, waited = figures["download_hidden_seconds"], figures["download_waited_seconds"]
    if not hidden + waited:
        return ", ".join(parts)
    share = f"{100 * hidden / (hidden + waited):.0f} % of the download time was hidden"
    return f"{', '.join(parts)}; {share} ({format_duration(1000 * waited)} waited)"


def describe_growth(figures: Figures) -> str | None:
    """Return how memory changed in the second half of a run, when caches have filled; None if it was too short.

    Examples
    --------
    >>> describe_growth({"steady_seconds": 300, "resident_late_slope_mb_per_minute": -2.25})
    '−2.25 MB per minute in the second half'
    """
    late = figures["resident_late_slope_mb_per_minute"]
    if late is None or figures["steady_seconds"] < _GROWTH_SECONDS:
        return None
    return f"{late:+.3g} MB per minute in the second half".replace("-", "−")


def _has_wait_fraction(figures: Figures) -> bool:
    return figures["wait_fraction"] is not None


def _advise_on_waiting(figures: Figures) -> Iterator[Finding]:
    fraction, facts = figures["wait_fraction"], {"wait_fraction": figures["wait_fraction"]}
    if fraction is None:
        text = (
            f"Too few batches to judge whether the training waits for data: {figures['batches']:,} in total; the "
            f"first of each epoch and {figures['warmup_batches']} warm-up batches do not count."
        )
        yield Finding("run.waiting", "note", text, facts=facts)
        return
    percent, median = f"{100 * fraction:.{0 if fraction >= 0.1 else 1}f} %", format_duration(figures["wait_p50_ms"])
    waited, tune = f"The training waited {percent} of the time for data", "penstock.tune(loader)"
    if fraction > 1 - _ALONE:
        rate = f"{format_rate(figures['batches_per_second'])} batches/s (p50 {median} per batch)"
        text = f"There was almost no training between the batches, so this is the speed of the loader alone: {rate}."
        yield Finding("run.waiting", "note", text, facts=facts)
    elif fraction >= DATA_BOUND:
        gain = f"Without waiting it would be {1 / (1 - fraction):.2g} times as fast."
        text = f"{waited} (p50 {median} per batch): it is data-bound. {gain}"
        yield Finding("run.waiting", "warning", text, f"Try {tune}.", tune, facts)
    elif fraction >= _NOTICEABLE:
        text = f"{waited} (p50 {median} per batch): more than it has to, but data is not the bottleneck."
        yield Finding("run.waiting", "note", text, f"{tune} may win this time back.", tune, facts)
    else:
        text = f"{waited}: it is not data-bound, and a faster loader would gain almost nothing."
        yield Finding("run.waiting", "ok", text, facts=facts)
    if _NOTICEABLE <= fraction <= 1 - _ALONE and figures["wait_mean_ms"] > 3 * figures["wait_p50_ms"]:
        text = f"A few batches cause most of the waiting (p50 {median}, max {format_duration(figures['wait_max_ms'])})."
        yield Finding("run.bursts", "warning", text, "A larger prefetch would even this out.")


def _advise_on_downloads(figures: Figures) -> Iterator[Finding]:
    fraction = figures["wait_fraction"]
    if "download_bytes" not in figures or fraction is None or not _NOTICEABLE <= fraction <= 1 - _ALONE:
        return
    hidden, waited = figures["download_hidden_seconds"], figures["download_waited_seconds"]
    if waited < _MUCH_WAITED * (hidden + waited):
        return
    rate = format_bytes(figures["download_bytes"] / max(figures["elapsed_seconds"], 1e-9))
    yield Finding(
        "run.downloads",
        "warning",
        f"Reads waited {format_duration(1000 * waited)} for downloads, which came at {rate}/s.",
        "If that is the speed of the network, a larger cache is the cure: cache= and cache_bytes= of the source; "
        "`penstock inspect URL --cache SIZE` says what it saves.",
    )


def _advise_on_startup(figures: Figures, restarts_workers: bool) -> Iterator[Finding]:
    if figures["epochs"] < 2 or figures["startup_fraction"] < _MUCH_STARTING:
        return
    if figures["startup_ms"] < 1000 * _STARTING_SECONDS:
        return
    cure = (
        "Use persistent_workers=True to keep the workers from one epoch to the next."
        if restarts_workers
        else "Use longer epochs, fewer workers or a smaller prefetch."
    )
    took = f"{format_duration(figures['startup_ms'])} to the first batch"
    text = f"Starting and ending epochs took {100 * figures['startup_fraction']:.0f} % of the time ({took})."
    yield Finding("run.startup", "warning", text, cure)


def _advise_on_memory(figures: Figures) -> Iterator[Finding]:
    slope, late = figures["resident_slope_mb_per_minute"], figures["resident_late_slope_mb_per_minute"]
    if slope is None or late is None or figures["steady_seconds"] < _GROWTH_SECONDS:
        return
    growth_bytes = slope * 1e6 * figures["steady_seconds"] / 60
    # A cache fills up and then stays, which is no leak: the second half must grow as well.
    if growth_bytes < max(_GROWTH_BYTES, _GROWTH_SHARE * figures["resident_peak_bytes"]) or late < slope / 2:
        return
    yield Finding(
        "run.memory",
        "warning",
        f"Memory grew by {format_bytes(slope * 1e6)} per minute without stopping.",
        "Look for lists that keep batches, and for losses kept with their graph (keep loss.item() instead).",
    )
