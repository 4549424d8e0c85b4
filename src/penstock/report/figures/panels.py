"""Plots one array: a function for each kind, which fills cells of a figure and returns notes for the caption.

Arrays are real numbers, with NaN for gaps. They are first reduced to about as many points as there are pixels: by
minimum and maximum if peaks must remain, by the mean for images.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.observe.text import GREY, MONO, SANS, array_lines, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.image import AxesImage

__all__ = [
    "LARGEST",
    "FieldView",
    "is_picture",
    "plot_curve",
    "plot_image",
    "plot_raster",
    "plot_traces",
    "plot_values",
    "plot_volume",
    "plot_waveform",
    "write_lines",
]

# The colours of Okabe and Ito, which people with any colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GAP = "#E4E4E4"
LARGEST = 1e290  # beyond this, sums and differences overflow
_MOST_POINTS = 1000  # along an axis: the figure is 1 200 pixels wide
_MOST_TRACES = 32
_DYNAMIC_RANGE_DB = 80  # sounds that much fainter than the loudest one are inaudible

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FieldView:
    """An array with the sampling rate and unit of its values."""

    array: NDArray[Any]
    rate_hz: float | None = None
    unit: str = ""

    def time_label(self, step: str) -> str:
        """Return the label of the time axis, which counts in `step` if the rate is unknown."""
        return f"time ({step})" if self.rate_hz is None else "time (s)"

    def times(self, steps: Any) -> Any:
        """Return the positions of steps on the time axis."""
        return steps / (self.rate_hz or 1.0)

    def label(self, word: str) -> str:
        """Return a label with the unit of the values."""
        return f"{word} ({self.unit})" if self.unit else word


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether three axes are those of an image: colours last, or first as in torch."""
    return len(shape) == 3 and (
        (shape[2] in (1, 3, 4) and min(shape[:2]) >= 8) or (shape[0] in (1, 3) and min(shape[1:]) >= 8)
    )


def plot_raster(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot counts, (time, units), such that every event is visible."""
    from matplotlib.colors import PowerNorm  # noqa: PLC0415  # optional

    n_times, n_units = view.array.shape
    numbers = _mask_gaps(view.array) if view.array.dtype.kind == "f" else view.array
    counts = _mask_gaps(_reduce(np.fmax, _reduce(np.fmax, numbers, 0), 1, most=240))
    low = float(np.fmin.reduce(counts, axis=None))
    low = low if low > 0 else 0.0
    ax = _add_axes(figure, cells[0], xlabel=view.time_label("bins"), ylabel="unit")
    shown = ax.imshow(
        counts.T,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="Greys",
        # A concave scale: a single event must be visible beside bins of ten.
        norm=PowerNorm(0.6, vmin=low, vmax=max(low + 1.0, float(np.fmax.reduce(counts, axis=None)))),
        extent=(0, view.times(n_times), -0.5, n_units - 0.5),
    )
    _add_colour_bar(ax, shown, "count", whole=True)
    ax.locator_params(axis="both" if view.rate_hz is None else "y", integer=True)
    return ["highest count in each pixel"] if counts.size < view.array.size else []


def plot_traces(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot channels below each other, the first on top; the longer axis is time."""
    array = view.array if view.array.shape[0] >= view.array.shape[1] else view.array.T
    n_times, n_channels = array.shape
    chosen = np.unique(np.linspace(0, n_channels - 1, min(n_channels, _MOST_TRACES)).round().astype(int))
    lines = [_mask_gaps(array[:, channel]) for channel in chosen]
    spreads = np.array([_spread(line) for line in lines])
    some = spreads[spreads > 0] if (spreads > 0).any() else np.ones(1)
    # Channels such as position and speed have separate scales; electrodes share one.
    few = len(chosen) <= 8
    alone = few and some.max() > 5 * some.min()
    steps = (
        np.where(spreads > 0, spreads, 1.0)
        if alone
        else np.full(len(chosen), some.max() if few else 0.75 * np.median(some))
    )
    ax = _add_axes(figure, cells[0], xlabel=view.time_label("frames"), ylabel="channel")
    for row, (line, step) in enumerate(zip(lines, steps, strict=True)):
        x, y = _envelope(line)
        colour = _COLOURS[row % len(_COLOURS)] if len(chosen) <= len(_COLOURS) else _COLOURS[0]
        _plot_line(ax, view.times(x), (y - _middle(line)) / step - row, colour=colour, width=0.9 if few else 0.6)
    labelled = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), 8)).round().astype(int))
    ax.set_yticks(-labelled, [str(chosen[row]) for row in labelled])
    margin = 0.7 if few else 1.0
    ax.set_ylim(1 - len(chosen) - margin, margin)
    ax.set_xlim(0, view.times(n_times))
    apart = f"traces {format_number(float(steps[0]))}{f' {view.unit}' if view.unit else ''} apart"
    notes = ["each channel has its own scale" if alone else apart] if spreads.any() else []
    return [f"{len(chosen)} of {n_channels} channels, evenly spaced", *notes] if len(chosen) < n_channels else notes


def plot_waveform(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot one or two channels of sound, with the spectrogram below."""
    array = view.array.reshape(len(view.array), -1)
    channels = _mask_gaps(array if array.shape[0] >= array.shape[1] else array.T)
    n_times, n_channels = channels.shape
    above = _add_axes(figure, cells[0], ylabel=view.label("amplitude"))
    for channel in range(n_channels):
        x, y = _envelope(channels[:, channel])
        _plot_line(above, view.times(x), y, colour=_COLOURS[channel], width=0.6, alpha=1.0 if n_channels == 1 else 0.7)
    above.tick_params(labelbottom=False)
    power, middles, width = _spectrogram(channels.mean(axis=1))
    half = view.times(middles[1] - middles[0]) / 2
    below = _add_axes(
        figure,
        cells[1],
        xlabel=view.time_label("frames"),
        ylabel="frequency (cycles/sample)" if view.rate_hz is None else "frequency (Hz)",
    )
    shown = below.imshow(
        power,
        aspect="auto",
        origin="lower",
        cmap="magma",
        vmin=-_DYNAMIC_RANGE_DB,
        vmax=0,
        extent=(view.times(middles[0]) - half, view.times(middles[-1]) + half, 0, (view.rate_hz or 1.0) / 2),
    )
    _add_colour_bar(below, shown, "dB re peak")
    for ax in (above, below):
        ax.set_xlim(0, view.times(n_times))
    notes = [f"spectrogram with windows of {width} frames"]
    return ["2 channels, spectrogram of their mean", *notes[1:]] if n_channels == 2 else notes


def plot_image(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot a matrix, or an image whose colours are on the last axis or, as in torch, on the first."""
    height, width = _sides(view.array.shape)
    # Pixels are square, unless the image would be a thin line.
    square = max(height, width) <= 3 * min(height, width)
    return _plot_picture(_add_axes(figure, cells[0], xlabel="column", ylabel="row"), view, square=square)


def plot_volume(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot the middle slices along three axes; for a film, three frames."""
    array, notes = view.array, []
    inner = cells[0].subgridspec(1, 3)
    if array.ndim == 4 and is_picture(array.shape[1:]):
        for column, frame in enumerate((0, len(array) // 2, len(array) - 1)):
            ax = _add_axes(figure, inner[column], title=f"frame {frame}")
            notes = _plot_picture(ax, FieldView(array[frame]), square=True)
        return ["first, middle and last frame", *notes]
    while array.ndim > 3:
        notes.append(f"index {len(array) // 2} of the first axis" if not notes else f"then {len(array) // 2}")
        array = array[len(array) // 2]
    first = view.array.ndim - 3
    # One range for all three, so that a colour means one value.
    limits = _limits(_mask_gaps(array[tuple(slice(None, None, max(1, side // 64)) for side in array.shape)]))
    for axis in range(3):
        middle = array.shape[axis] // 2
        across = [number for number in range(3) if number != axis]
        ax = _add_axes(
            figure,
            inner[axis],
            title=f"axis {first + axis} at {middle}",
            xlabel=f"axis {first + across[1]}",
            ylabel=f"axis {first + across[0]}",
        )
        cut = np.take(array, middle, axis=axis)
        square = max(cut.shape) <= 5 * min(cut.shape)
        _plot_picture(ax, FieldView(cut, unit=view.unit), square=square, limits=limits, bar=axis == 2)
    return ["middle slices", *notes]


def plot_curve(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Plot a sequence of numbers."""
    line = _mask_gaps(view.array.reshape(-1))
    ax = _add_axes(
        figure,
        cells[0],
        xlabel="index" if view.rate_hz is None else "time (s)",
        ylabel=view.label("value"),
    )
    x, y = _envelope(line)
    _plot_line(ax, view.times(x), y, colour=_COLOURS[0], width=1.0, marker="o" if len(line) <= 64 else "")
    if view.rate_hz is None:
        ax.locator_params(axis="x", integer=True)
    return []


def plot_values(figure: "Figure", cells: list["SubplotSpec"], view: FieldView) -> list[str]:
    """Write the numbers as text."""
    write_lines(figure, cells[0], array_lines(view.array, line_letters(figure)))
    return []


def line_letters(figure: "Figure") -> int:
    """Return how many letters of `write_lines` fit into the width of a figure."""
    return min(118, int(12 * figure.get_figwidth()))


def write_lines(figure: "Figure", cell: "SubplotSpec", lines: list[str]) -> None:
    """Write lines of text."""
    ax = figure.add_subplot(cell)
    ax.set_axis_off()
    # Not part of the layout: a long line must not push the panels aside.
    text = ax.text(0, 1, "\n".join(lines), va="top", family=MONO, size=8, parse_math=False, linespacing=1.3)
    text.set_in_layout(False)


def _plot_picture(
    ax: "Axes", view: FieldView, *, square: bool, limits: tuple[float, float] | None = None, bar: bool = True
) -> list[str]:
    """Plot a matrix or image on `ax`; only detail is lost."""
    array = view.array
    height, width = _sides(array.shape)
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    notes: list[str] = []
    if array.ndim == 3 and array.shape[2] > 1:
        pixels, notes = _to_rgba(_pool(array), array.dtype)
        shown = ax.imshow(pixels, extent=(0, width, height, 0), aspect="equal" if square else "auto")
    else:
        matrix = _pool(array.reshape(height, width))
        low, high = limits or _limits(matrix)
        shown = ax.imshow(
            matrix,
            extent=(0, width, height, 0),
            aspect="equal" if square else "auto",
            interpolation="nearest" if matrix.size < 250_000 else "antialiased",
            cmap="gray" if array.dtype.kind in "ub" else "viridis",
            vmin=low,
            vmax=high,
        )
        if bar:
            _add_colour_bar(ax, shown, view.unit, narrow=square)
    ax.set_anchor("NW")
    ax.locator_params(integer=True)
    return notes


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of a matrix or image."""
    return (shape[1], shape[2]) if len(shape) == 3 and shape[2] not in (1, 3, 4) else (shape[0], shape[1])


def _to_rgba(pixels: Floats, dtype: np.dtype[Any]) -> tuple[Floats, list[str]]:
    """Return red, green, blue and opacity from 0 to 1; opacity is 0 if a colour is missing."""
    low, high = float(np.fmin.reduce(pixels, axis=None)), float(np.fmax.reduce(pixels, axis=None))
    notes = []
    if dtype.kind == "u":
        low, high = 0.0, float(np.iinfo(dtype).max)
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    else:
        notes = [f"colours stretched from {format_number(low)} – {format_number(high)}"]
    seen = np.isfinite(pixels).all(axis=2)
    scaled = np.clip((np.nan_to_num(pixels) - low) / ((high - low) or 1.0), 0, 1)
    alpha = scaled[..., 3] if scaled.shape[2] == 4 else np.ones(seen.shape)
    return np.dstack([scaled[..., :3], np.where(seen, alpha, 0)]), notes


def _add_axes(figure: "Figure", cell: "SubplotSpec", *, xlabel: str = "", ylabel: str = "", title: str = "") -> "Axes":
    ax = figure.add_subplot(cell)
    ax.set_facecolor("white")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(labelsize=8, labelfontfamily=SANS, color=GREY, labelcolor="#222222")
    ax.set_xlabel(xlabel, size=8.5, family=SANS, parse_math=False)
    ax.set_ylabel(ylabel, size=8.5, family=SANS, parse_math=False)
    if title:
        ax.set_title(title, size=8.5, family=SANS, color=GREY, loc="left")
    return ax


def _add_colour_bar(ax: "Axes", shown: "AxesImage", label: str, *, whole: bool = False, narrow: bool = False) -> None:
    """Add a colour bar beside `ax`, and a grey background for gaps."""
    ax.set_facecolor(_GAP)
    beside = ax.inset_axes((1.04, 0, 0.05, 1) if narrow else (1.01, 0, 0.012, 1))
    bar = ax.figure.colorbar(shown, cax=beside)
    bar.outline.set_visible(False)
    bar.set_label(label, size=8, family=SANS, parse_math=False)
    beside.tick_params(labelsize=7.5, labelfontfamily=SANS, color=GREY)
    beside.locator_params(axis="y", nbins=5, integer=whole)


def _plot_line(ax: "Axes", x: Floats, y: Floats, *, colour: str, width: float, **style: Any) -> None:
    ax.plot(x, y, color=colour, linewidth=width, markersize=3, **style)
    # A point between two gaps has no line that would show it.
    seen = np.pad(np.isfinite(y), 1)
    lonely = seen[1:-1] & ~seen[:-2] & ~seen[2:]
    ax.plot(x[lonely], y[lonely], color=colour, linestyle="", marker=".", markersize=2)


def _mask_gaps(array: NDArray[Any]) -> Floats:
    """Return numbers that a figure can scale: NaN for values that are infinite or larger than `LARGEST`."""
    with np.errstate(over="ignore"):  # of long doubles
        numbers = array.astype(np.float64)
    numbers[~(np.abs(numbers) <= LARGEST)] = np.nan
    return numbers


def _edges(n: int, most: int) -> NDArray[np.int64]:
    return np.arange(min(n, most)) * n // min(n, most)


def _reduce(rule: np.ufunc, array: NDArray[Any], axis: int, most: int = _MOST_POINTS) -> NDArray[Any]:
    """Return at most `most` values along an axis, each computed by `rule` from a stretch of the array."""
    edges = _edges(array.shape[axis], most)
    return np.asarray(rule.reduceat(array, edges, axis=axis)) if len(edges) < array.shape[axis] else array


def _pool(array: NDArray[Any]) -> Floats:
    """Return the mean of the finite values in each pixel; subsamples a very large image first."""
    rows, columns = (max(1, side // (2 * _MOST_POINTS)) for side in array.shape[:2])
    numbers = _mask_gaps(array[::rows, ::columns])
    if max(numbers.shape[:2]) <= _MOST_POINTS:
        return numbers
    seen = np.isfinite(numbers)
    sums, counts = np.where(seen, numbers, 0.0), seen.astype(np.float64)
    for axis in (0, 1):
        sums, counts = _reduce(np.add, sums, axis), _reduce(np.add, counts, axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _envelope(line: Floats) -> tuple[Floats, Floats]:
    """Return x and y to plot: all points, or the minimum and maximum of each pixel."""
    if len(line) <= 2 * _MOST_POINTS:
        return np.arange(len(line), dtype=np.float64), line
    edges = _edges(len(line), _MOST_POINTS)
    extremes = np.stack([np.fmin.reduceat(line, edges), np.fmax.reduceat(line, edges)], axis=1)
    return np.repeat(edges.astype(np.float64), 2), extremes.reshape(-1)


def _middle(line: Floats) -> float:
    seen = line[np.isfinite(line)]
    return float(np.median(seen)) if len(seen) else 0.0


def _spread(line: Floats) -> float:
    seen = line[np.isfinite(line)]
    return float(np.subtract(*np.percentile(seen, (99.5, 0.5)))) if len(seen) else 0.0


def _limits(matrix: Floats) -> tuple[float, float]:
    """Return the values of the darkest and the brightest colour, ignoring a few outliers."""
    seen = matrix[np.isfinite(matrix)]
    if not len(seen):
        return 0.0, 1.0
    low, high = (float(limit) for limit in np.percentile(seen, (0.2, 99.8)))
    return (low, high) if low < high else (float(seen.min()), float(seen.max()))


def _spectrogram(signal: Floats) -> tuple[Floats, Floats, int]:
    """Return decibels below the peak, (frequency, time); the centres of the windows; and their width in frames."""
    width = 2 ** int(np.clip(round(np.log2(len(signal) / 32)), 6, 10))
    step = max(width // 8, -(-len(signal) // _MOST_POINTS))
    starts = np.linspace(0, len(signal), -(-len(signal) // step) + 1).round().astype(int)
    seen = signal[np.isfinite(signal)]
    signal = signal - (seen.mean() if len(seen) else 0.0)
    # Scaled to 1 first, so that squares neither overflow nor vanish; reflected at the ends, so that windows reach them.
    signal = np.pad(signal / (np.fmax.reduce(np.abs(signal)) or 1.0), width // 2, mode="reflect")
    # windows: (times, width)
    windows = np.lib.stride_tricks.sliding_window_view(signal, width)[starts]
    power = np.abs(np.fft.rfft(np.nan_to_num(windows) * np.hanning(width), axis=1)) ** 2
    decibels = 10 * np.log10(np.maximum(power / (power.max() or 1.0), 10 ** (-_DYNAMIC_RANGE_DB / 10)))
    decibels[~np.isfinite(windows).all(axis=1)] = np.nan
    return decibels.T, starts.astype(np.float64), width
