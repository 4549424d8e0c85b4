"""Pictures: items as images, traces, curves and text, and charts of numbers; as files, or as SVG inside a page.

matplotlib draws all of them. Arrays are first reduced to about as many points as there are pixels: by minimum and
maximum where peaks must remain, by the mean for images.
"""

import io
import re
import reprlib
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError
from penstock.files.figures import figure_format, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "Chart",
    "Kind",
    "add_axes",
    "draw_chart",
    "draw_item",
    "format_number",
    "kind_of",
    "make_figure",
    "plot_item",
    "to_svg",
]

Floats = NDArray[np.float64]
Kind = Literal["image", "traces", "curve", "text"]

# Okabe and Ito's, which people with any colour vision can tell apart, darkened until they stand out from white.
COLOURS = ("#0072b2", "#c04f00", "#00785a", "#a03c78", "#7a6200", "#555e68")
_GREY = "#4d5763"
_GAP = "#9aa4af40"
_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (1, 3)))
_HATCHES = ("", "//", "..", "--", "||", "xx")
_LARGEST = 1e290  # beyond this, sums and differences overflow
_MOST_POINTS = 1000  # along an axis
_MOST_TRACES, _MOST_PANELS, _MOST_LINES = 32, 24, 48
_TINY, _TINY_MATRIX = 8, 16  # so few values are easier to read as numbers than as a plot
_MOST_COUNTS, _MOST_COUNTS_IN_BYTES = 255, 31  # events in a bin; an image in bytes is rarely as dark as that
_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"  # come with matplotlib: a file looks the same on every machine
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = 24
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 400
_RATE_KEYS = ("sampling_rate_hz", "sample_rate_hz", "rate_hz", "sampling_rate", "sample_rate", "rate", "fs")
# If the content is ambiguous, the name decides.
_IMAGES = ("image", "img", "mask", "label", "spectro", "mel", "picture", "photo", "frame", "map")
_TRACES = ("lfp", "eeg", "ecog", "emg", "meg", "behav", "position", "velocity", "kinematic", "cursor", "pose")
_COUNTS = ("spike", "count", "raster")


def make_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in pixels; raise MissingDependency without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "Plotting") from error
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def to_svg(figure: "Figure", ident: str, colours: Mapping[str, str]) -> str:
    """Return a figure as an element of a page, whose texts are texts, in the colours of the page.

    Parameters
    ----------
    ident
        Unique in the page: ids inside derive from it.
    colours
        What stands in the page for a colour of the figure, such as `{"#000000": "currentColor"}`.
    """
    from matplotlib import rc_context  # noqa: PLC0415  # optional

    content = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": ident}):
        figure.savefig(content, format="svg", transparent=True, dpi=144, metadata={"Date": None})
    text = content.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # named alike in every figure, and referred to by none
    text = re.sub(r"font: (\d[\d.]*)px[^;\"]*", r"font-size: \1px; font-family: inherit", text)
    text = re.sub(r'(<text [^>]*style=")(?![^"]*fill:)', r"\1fill: #000000; ", text)
    text = re.sub(r'<svg .*?viewBox="([^"]*)".*?>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1, flags=re.S)
    for colour, shown in colours.items():
        text = text.replace(colour, shown)
    return text


# -- charts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """Numbers over numbers, by name: what a chart shows, and its table."""

    kind: Literal["lines", "points", "stack"]
    """`stack`: areas on each other, whose x are edges."""

    x: str
    y: str
    series: Mapping[str, tuple[Floats, Floats]]
    low: float | None = 0.0
    """Where y begins; None: as the numbers suggest."""

    high: float | None = None
    borders: Sequence[float] = field(default=())
    """Heights of thin horizontal lines."""


def draw_chart(chart: Chart, width: float, height: float) -> "Figure":
    """Return a chart as a figure, of a size in pixels. Colour is never the only difference between its parts."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  # optional

    figure = make_figure(width, height)
    ax = add_axes(figure, figure.add_gridspec(1, 1)[0], chart.x, chart.y)
    below: Any = 0.0
    for number, (name, (x, y)) in enumerate(chart.series.items()):
        style: dict[str, Any] = {"color": COLOURS[number % 6], "label": name}
        match chart.kind:
            case "lines":
                marker = "os^D"[number % 4] if len(x) <= 48 else ""
                ax.plot(x, y, linestyle=_DASHES[number % 6], marker=marker, markersize=4, linewidth=1.8, **style)
            case "points":
                ax.plot(x, y, linestyle="", marker="o", markersize=2.5 if len(x) > 600 else 4, **style)
            case "stack":
                hatch: Any = {"hatch": _HATCHES[number % 6], "edgecolor": "#ffffff", "linewidth": 0.4}
                ax.stairs(below + y, x, baseline=below, fill=True, **hatch, **style)
                below = below + y
    for border in chart.borders:
        ax.axhline(border, color=_GREY, linewidth=0.6, linestyle=":", alpha=0.7)
    ax.margins(x=0.01)
    ax.set_ylim(chart.low, chart.high)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    most = max((float(np.abs(y).max(initial=0)) for _, y in chart.series.values()), default=0.0)
    ax.ticklabel_format(useOffset=False, style="plain" if 1e-3 <= most < 1e7 else "sci")
    if len(chart.series) > 1:
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=11, columnspacing=1)
    return figure


def add_axes(figure: "Figure", cell: Any, xlabel: str = "", ylabel: str = "") -> "Axes":
    """Return axes in a cell of a grid, without frame."""
    ax = figure.add_subplot(cell)
    ax.set_facecolor("none")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_GREY)
    ax.tick_params(axis="x", pad=8)  # away from the lowest label of the other axis
    ax.tick_params(labelsize=11, labelfontfamily=_SANS, color=_GREY, labelcolor=_GREY)
    ax.set_xlabel(xlabel, size=12, family=_SANS, parse_math=False)
    ax.set_ylabel(ylabel, size=12, family=_SANS, parse_math=False)
    return ax


# -- items -------------------------------------------------------------------------------------------------------------


def plot_item(item: Mapping[str, Any], path: Path, *, title: str = "") -> None:
    """Plot one item into an image file.

    Each array gets a panel that suits its content (see `kind_of`), in the order of the item; everything else is text.
    NaN and infinity are gaps, and counted. Long arrays are reduced to the pixels of the figure; peaks remain.

    Parameters
    ----------
    item
        Values by field name: arrays, tensors, numbers, strings, bytes, lists, mappings. Sampling rates are looked up in
        the field "metadata" and in the item itself: `"<field>_rate_hz"`, `"sampling_rates"[field]`, a
        `"sampling_rate_hz"` or `"sample_rate"` of the longest field. If a rate is unknown, the axis counts frames.
    path
        The file to write, atomically. The suffix determines the format: .png, .pdf, .svg and others.
    title
        A line above the panels.

    Raises
    ------
    OptionError
        The suffix is not a format, or the directory does not exist.
    MissingDependency
        matplotlib is not installed.
    WriteError
        The file could not be written.
    """
    if not isinstance(item, Mapping):
        raise OptionError(f"item must map field names to values, such as {{'x': array}}, got {type(item).__name__}.")
    make_figure(1, 1)
    figure_format(Path(path))  # before all the work
    save_figure(draw_item(item, 880, title), Path(path), 144)


def kind_of(name: str, array: NDArray[Any]) -> Kind:
    """Return how to plot a field, by its content; if that is ambiguous, by its name.

    Examples
    --------
    >>> kind_of("spikes", np.zeros((100, 96))), kind_of("x", np.random.default_rng(0).normal(size=(64, 1000)))
    ('image', 'traces')
    >>> kind_of("audio", np.zeros(16_000, np.int16)), kind_of("y", np.zeros((64, 64, 3), np.uint8))
    ('curve', 'image')
    """
    if array.dtype.kind not in "biufc" or array.size <= (_TINY if array.ndim < 2 else _TINY_MATRIX):
        return "text"
    if array.ndim == 1 or (array.ndim == 2 and min(array.shape) == 1):
        return "curve"
    if array.ndim > 2 or any(part in name.lower() for part in _IMAGES):
        return "image"
    if any(part in name.lower() for part in _TRACES):
        return "traces"
    short, long = sorted(array.shape)
    in_bytes = array.dtype in (np.uint8, np.uint16)
    is_long = long >= 16 and long >= (16 if in_bytes else 4) * short
    return "traces" if is_long and not _are_counts(name, array) else "image"


def _are_counts(name: str, array: NDArray[Any]) -> bool:
    """Return whether a matrix has numbers of events, such as spikes: (time, units)."""
    named = any(part in name.lower() for part in _COUNTS)
    most = np.inf if named else _MOST_COUNTS_IN_BYTES if array.dtype in (np.uint8, np.uint16) else _MOST_COUNTS
    if array.ndim != 2 or any(part in name.lower() for part in _IMAGES):
        return False
    seen = _mask_gaps(array)
    seen = seen[np.isfinite(seen)]
    return bool(seen.size and seen.min() >= 0 and seen.max() <= most and (seen == np.floor(seen)).all())


@dataclass(frozen=True, slots=True)
class _Panel:
    name: str
    words: list[str]
    """Type, shape and range, and what is not shown as it is."""

    kind: Kind
    array: NDArray[Any]
    rate_hz: float | None

    @property
    def height(self) -> float:
        """The height of the panel in pixels, with its labels."""
        if self.kind == "traces":
            return float(np.clip(80 + 9 * min(self.array.shape), 120, 260))
        return 210 if self.kind == "image" else 130


def draw_item(item: Mapping[str, Any], width: float, title: str = "") -> "Figure":
    """Return the figure of an item, so many pixels wide: a panel for each array, then everything else as text."""
    panels, texts = _arrange(item)
    letters = int(width / 7.4)
    lines = [line for name, value in texts for line in _describe(name, value, letters)][:_MOST_LINES]
    lines += ["…"] if len(lines) == _MOST_LINES else []
    if not panels and not lines:
        lines = ["This item has no fields."]
    heights = [panel.height + 60 for panel in panels] + ([15 * len(lines) + 40] if lines else [])
    figure = make_figure(width, sum(heights) + (30 if title else 0))
    engine: Any = figure.get_layout_engine()
    # Room between the panels, in inches, and for the title above them.
    engine.set(h_pad=0.12, rect=(0, 0, 1, 1 - 30 / (sum(heights) + 30) if title else 1))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for row, panel in enumerate(panels):
        ax = add_axes(figure, grid[row])
        words = [*panel.words, *_DRAW[panel.kind](ax, panel)]
        facts = textwrap.shorten(_replace_missing_glyphs(" · ".join(words)), letters, placeholder="…")
        name = _replace_missing_glyphs(panel.name)[:40]
        ax.set_title(f"{name}\n{facts}", size=12, loc="left", family=_SANS, parse_math=False)
    if lines:
        ax = figure.add_subplot(grid[len(panels)])
        ax.set_axis_off()
        text = "\n".join(map(_replace_missing_glyphs, lines))
        shown = ax.text(0, 1, text, va="top", family=_MONO, size=11, parse_math=False, linespacing=1.3)
        shown.set_in_layout(False)  # a long line must not push the panels aside
    if title:
        short = textwrap.shorten(_replace_missing_glyphs(title), 80, placeholder="…")
        figure.suptitle(short, x=0.01, ha="left", size=14, weight="bold", family=_SANS, parse_math=False)
    return figure


def _arrange(item: Mapping[str, Any]) -> tuple[list[_Panel], list[tuple[str, Any]]]:
    """Return the panels, and the names and values that are text."""
    arrays = {str(name): array for name, value in item.items() if (array := _as_array(value)) is not None}
    kinds = {name: kind_of(name, array) for name, array in arrays.items()}
    plotted = [name for name in arrays if kinds[name] != "text"][:_MOST_PANELS]
    longest = max((max(arrays[name].shape) for name in plotted), default=0)
    panels = []
    for name in plotted:
        array, real = arrays[name], _to_real(arrays[name])
        finite = np.isfinite(real)
        words = [f"{array.dtype} {array.shape}"]
        if finite.any():
            low, high = (format_number(part) for part in (real[finite].min(), real[finite].max()))
            words.append(f"{low} – {high}" if low != high else f"constant {low}")
        words += ["magnitude"] * (array.dtype.kind == "c")
        left = int(np.isnan(_mask_gaps(real)).sum())
        words += [f"{left:,} not finite, left blank"] if left else []
        rate = _find_rate(item, name, is_longest=max(array.shape) == longest)
        panels.append(_Panel(name, words, kinds[name], real, rate))
    texts = [(str(name), value) for name, value in item.items() if str(name) not in plotted]
    return panels, texts


def _as_array(value: Any) -> NDArray[Any] | None:
    """Return a tensor, array or list of numbers as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if hasattr(value, "detach"):
        tensor = value.detach().cpu().to_dense().resolve_conj().resolve_neg()
        try:
            return np.asarray(tensor.numpy())
        except TypeError:  # numpy has no bfloat16 and no shorter floats
            return np.asarray(tensor.float().numpy())
    if isinstance(value, list | tuple) and value:
        with suppress(ValueError, TypeError, RuntimeError):
            array = np.asarray(value)
            return array if array.dtype.kind in "biufc" else None
    return None


def _to_real(array: NDArray[Any]) -> NDArray[Any]:
    """Return the magnitude of complex numbers, and booleans as 0 and 1."""
    if array.dtype.kind == "c":
        return np.asarray(np.abs(array))
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def _find_rate(item: Mapping[str, Any], name: str, *, is_longest: bool) -> float | None:
    """Return the frames per second of a field, if the item has them; one without a name is of the longest field."""
    keys = [f"{name}_{key}" for key in _RATE_KEYS] + [*_RATE_KEYS] * is_longest
    for place in (item.get("metadata"), item):
        if isinstance(place, Mapping):
            rates = place.get("sampling_rates")
            found = [rates.get(name)] if isinstance(rates, Mapping) else []
            for value in [*found, *(place[key] for key in keys if key in place)]:
                with suppress(TypeError, ValueError, RuntimeError):
                    if 0 < float(value) < np.inf:
                        return float(value)
    return None


def _describe(name: str, value: Any, letters: int, depth: int = 0) -> list[str]:
    """Return a value as a few lines of text."""
    name = name if len(name) <= 40 else f"{name[:39]}…"
    if isinstance(value, Mapping) and value and depth < 3:
        return [line for key, entry in value.items() for line in _describe(f"{name}.{key}", entry, letters, depth + 1)]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = _as_array(value)
        is_shown = array is not None and 0 < array.size <= 64 and not array.dtype.hasobject
        content = np.array2string(array, precision=4) if is_shown and array is not None else ""
        text = f"{value.dtype} {tuple(value.shape)} {content}" if len(value.shape) else f"{value.dtype} {value}"
    elif isinstance(value, bytes):
        text = f"{len(value):,} bytes {value[:60]!r}"
    else:
        text = value[:2000] if isinstance(value, str) else _REPR.repr(value)
    width = max(20, letters - len(name) - 2)
    wrapped = textwrap.wrap(" ".join(text.split()), width, max_lines=3, placeholder="…") or ["(empty)"]
    return [f"{name if number == 0 else '':<{len(name)}}  {line}" for number, line in enumerate(wrapped)]


def format_number(value: Any) -> str:
    """Return a number as on an axis: integers in full, others with four digits.

    Examples
    --------
    >>> format_number(np.int16(-300)), format_number(3.14159)
    ('−300', '3.142')
    """
    text = f"{value:.4g}" if isinstance(value, float | np.floating) else str(int(value))
    return text.replace("-", "−")


def _replace_missing_glyphs(text: str) -> str:
    """Return `text` with □ for characters that the fonts lack, so that matplotlib does not warn."""
    from matplotlib.font_manager import findfont, get_font  # noqa: PLC0415  # optional

    if text.isascii() and text.isprintable():
        return text
    known = set.intersection(*(set(get_font(findfont(name)).get_charmap()) for name in (_SANS, _MONO)))
    return "".join(letter if ord(letter) in known and letter.isprintable() else "□" for letter in text)


# -- the kinds ---------------------------------------------------------------------------------------------------------


def _draw_curve(ax: "Axes", panel: _Panel) -> list[str]:
    x, y = _envelope(_mask_gaps(panel.array.reshape(-1)))
    _plot_line(ax, x / (panel.rate_hz or 1.0), y, COLOURS[0], 1.0)
    ax.set_xlabel("index" if panel.rate_hz is None else "time (s)", size=12)
    return []


def _draw_traces(ax: "Axes", panel: _Panel) -> list[str]:
    """Plot channels below each other, the first on top; the longer axis is time."""
    array = panel.array if panel.array.shape[0] >= panel.array.shape[1] else panel.array.T
    n_channels = array.shape[1]
    chosen = np.unique(np.linspace(0, n_channels - 1, min(n_channels, _MOST_TRACES)).round().astype(int))
    lines = [_mask_gaps(array[:, channel]) for channel in chosen]
    spreads = np.array([_spread(line) for line in lines])
    some = spreads[spreads > 0] if (spreads > 0).any() else np.ones(1)
    # Channels such as position and speed have separate scales; electrodes share one.
    is_alone = len(chosen) <= 8 and some.max() > 5 * some.min()
    steps = np.where(spreads > 0, spreads, 1.0) if is_alone else np.full(len(chosen), float(some.max()))
    for row, (line, step) in enumerate(zip(lines, steps, strict=True)):
        x, y = _envelope(line)
        middle = np.nan_to_num(np.nanmedian(line)) if np.isfinite(line).any() else 0.0
        colour = COLOURS[row % 6] if len(chosen) <= 6 else COLOURS[0]
        _plot_line(ax, x / (panel.rate_hz or 1.0), (y - middle) / step - row, colour, 0.8)
    labelled = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), 6)).round().astype(int))
    ax.set_yticks(-labelled, [str(chosen[row]) for row in labelled])
    ax.set_xlabel("time (frames)" if panel.rate_hz is None else "time (s)", size=12)
    ax.set_ylabel("channel", size=12)
    notes = [f"{len(chosen)} of {n_channels} channels, evenly spaced"] if len(chosen) < n_channels else []
    return [*notes, "each channel has its own scale" if is_alone else f"{format_number(float(steps[0]))} apart"]


def _draw_image(ax: "Axes", panel: _Panel) -> list[str]:
    """Plot a matrix, counts (time to the right), an image in colour, or the middle of what has more axes."""
    array, notes = panel.array, list[str]()
    while array.ndim > 3 or (array.ndim == 3 and not _is_picture(array.shape)):
        notes.append(f"index {len(array) // 2} of the first axis" if not notes else f"then {len(array) // 2}")
        array = array[len(array) // 2]
    if array.ndim < 2:
        array = array.reshape(1, -1)
    if _are_counts(panel.name, array):
        counts = _mask_gaps(_reduce(np.fmax, _reduce(np.fmax, array, 0), 1))
        extent = (0, len(array) / (panel.rate_hz or 1.0), -0.5, array.shape[1] - 0.5)
        shown = ax.imshow(counts.T, aspect="auto", origin="lower", extent=extent, cmap="viridis", interpolation="none")
        ax.set_xlabel("time (bins)" if panel.rate_hz is None else "time (s)", size=12)
        ax.set_ylabel("unit", size=12)
        notes += ["highest count in each pixel"] * (counts.size < array.size)
    else:
        if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
            array = np.moveaxis(array, 0, 2)
        pixels = _pool(array)
        low, high = _limits(pixels)
        square = max(array.shape[:2]) <= 3 * min(array.shape[:2])  # unless the image would be a thin line
        if array.ndim == 3 and array.shape[2] > 1:
            low, high = (
                (0.0, 255.0) if array.dtype == np.uint8 else (0.0, 1.0) if 0 <= low <= high <= 1 else (low, high)
            )
            pixels = np.clip((np.nan_to_num(pixels) - low) / ((high - low) or 1.0), 0, 1)
        shown = ax.imshow(
            pixels.squeeze(),
            aspect="equal" if square else "auto",
            cmap="gray" if array.dtype.kind == "u" else "viridis",
            vmin=low,
            vmax=high,
            extent=(0, array.shape[1], array.shape[0], 0),
            interpolation="none",
        )
        ax.set_anchor("W")
    ax.set_facecolor(_GAP)
    ax.locator_params(nbins=6)
    values = shown.get_array()
    if values is not None and values.ndim == 2:
        bar = ax.figure.colorbar(shown, cax=ax.inset_axes((1.03, 0, 0.03, 1)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=10, color=_GREY, labelcolor=_GREY)
        bar.ax.locator_params(nbins=4)
    return notes


_DRAW = {"image": _draw_image, "traces": _draw_traces, "curve": _draw_curve}


def _is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether three axes are those of an image: colours last, or first as in torch."""
    last = shape[2] in (1, 3, 4) and min(shape[:2]) >= 8
    return len(shape) == 3 and (last or (shape[0] in (1, 3) and min(shape[1:]) >= 8))


def _plot_line(ax: "Axes", x: Floats, y: Floats, colour: str, width: float) -> None:
    ax.plot(x, y, color=colour, linewidth=width, rasterized=len(x) > 200)
    # A point between two gaps has no line that would show it.
    seen = np.pad(np.isfinite(y), 1)
    lonely = seen[1:-1] & ~seen[:-2] & ~seen[2:]
    ax.plot(x[lonely], y[lonely], color=colour, linestyle="", marker=".", markersize=2, rasterized=True)
    ax.margins(x=0.005)


def _mask_gaps(array: NDArray[Any]) -> Floats:
    """Return numbers that a figure can scale: NaN for values that are infinite or too large."""
    with np.errstate(over="ignore"):  # of long doubles
        numbers = array.astype(np.float64)
    numbers[~(np.abs(numbers) <= _LARGEST)] = np.nan
    return numbers


def _reduce(rule: np.ufunc, array: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return at most `_MOST_POINTS` values along an axis, each computed by `rule` from a stretch of the array."""
    n = array.shape[axis]
    if n <= _MOST_POINTS:
        return array
    return np.asarray(rule.reduceat(array, np.arange(_MOST_POINTS) * n // _MOST_POINTS, axis=axis))


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
    edges = np.arange(_MOST_POINTS) * len(line) // _MOST_POINTS
    extremes = np.stack([np.fmin.reduceat(line, edges), np.fmax.reduceat(line, edges)], axis=1)
    return np.repeat(edges.astype(np.float64), 2), extremes.reshape(-1)


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
