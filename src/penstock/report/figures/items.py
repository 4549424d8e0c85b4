"""Plots one item of a dataset: chooses a panel for each field, and composes the figure."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError
from penstock.files.figures import figure_bytes, figure_format, save_figure
from penstock.observe.text import GREY, SANS, array_lines, format_number, replace_missing_glyphs, shorten, table_lines
from penstock.report.figures import panels
from penstock.report.figures.dark import darken
from penstock.report.figures.panels import FieldView

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

__all__ = ["Kind", "kind_of", "plot_item", "plot_light_and_dark"]

Kind = Literal["raster", "traces", "waveform", "image", "volume", "curve", "values"]

# If the content is ambiguous, the name decides: parts of names, and the kind they suggest.
_HINTS: dict[str, tuple[str, ...]] = {
    "image": ("image", "img", "mask", "label", "spectro", "mel", "picture", "photo", "frame", "map"),
    "traces": ("lfp", "eeg", "ecog", "emg", "meg", "behav", "position", "velocity", "kinematic", "cursor", "pose"),
    "raster": ("spike", "count", "raster"),
}
_LONG = 1000  # frames from which a spectrogram is useful
_TINY, _TINY_MATRIX = 8, 16  # so few values are easier to read as numbers than as a plot
_MOST_COUNTS, _MOST_COUNTS_IN_BYTES = 255, 31  # events in a bin; an image in bytes is rarely as dark as that
_MOST_PANELS = 24
_WIDTH_INCHES, _DPI = 10.0, 120
_NARROW_INCHES, _NARROW_DPI = 4.4, 160
_LINE_INCHES = 0.17  # height of a line of small text
_RATE_KEYS = ("sampling_rate_hz", "sample_rate_hz", "rate_hz", "sampling_rate", "sample_rate", "rate", "fs")
_BIN_KEYS = ("bin_size_ms", "bin_width_ms", "bin_ms")

_PLOT: dict[Kind, Callable[["Figure", list["SubplotSpec"], FieldView], list[str]]] = {
    "raster": panels.plot_raster,
    "traces": panels.plot_traces,
    "waveform": panels.plot_waveform,
    "image": panels.plot_image,
    "volume": panels.plot_volume,
    "curve": panels.plot_curve,
    "values": panels.plot_values,
}


def plot_item(item: Mapping[str, Any], path: Path, *, title: str = "") -> None:
    """Plot one item into an image file.

    Each array gets a panel that suits its content (see `kind_of`), in the order of the item; everything else is listed
    below. NaN and infinity are gaps, and counted. Long arrays are reduced to the pixels of the figure; peaks remain.

    Parameters
    ----------
    item
        Values by field name: arrays, tensors, numbers, strings, bytes, lists, mappings. Sampling rates and units are
        looked up in the field "metadata" and in the item itself: `"<field>_rate_hz"`, `"sampling_rates"[field]`,
        `"<field>_unit"`, `"units"[field]`, a `"sampling_rate_hz"` or `"sample_rate"` of the longest field, a
        `"bin_size_ms"` of the counts. If a rate is unknown, the axis counts frames.
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
    path = Path(path)
    _import_figure()
    figure_format(path)  # before all the work
    save_figure(_compose(item, title, _WIDTH_INCHES, _DPI), path, _DPI)


def plot_light_and_dark(item: Mapping[str, Any], *, is_narrow: bool, ground: str, text: str) -> tuple[bytes, bytes]:
    """Return two PNG files of one item: black on white, and `text` on a dark `ground`.

    Parameters
    ----------
    is_narrow
        For a window as narrow as a phone, with text that is readable there.
    """
    width, dpi = (_NARROW_INCHES, _NARROW_DPI) if is_narrow else (_WIDTH_INCHES, _DPI)
    figure = _compose(item, "", width, dpi)
    light = figure_bytes(figure, "png", dpi)
    figure.set_layout_engine("none")  # which takes most of the time, and would find the same places again
    darken(figure, ground=ground, text=text)
    return light, figure_bytes(figure, "png", dpi)


def _import_figure() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # optional
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "Plotting an item") from error
    return Figure


def kind_of(name: str, array: NDArray[Any]) -> Kind:
    """Return how to plot a field, by its content; if that is ambiguous, by its name.

    Parameters
    ----------
    name
        Name of the field. "mel" and "mask" suggest an image, "lfp" and "velocity" traces, "spikes" counts.
    array
        An array of any dtype and shape. Complex numbers count as their magnitude.

    Examples
    --------
    >>> kind_of("spikes", np.zeros((100, 96))), kind_of("x", np.random.default_rng(0).normal(size=(64, 1000)))
    ('raster', 'traces')
    >>> kind_of("audio", np.zeros(16_000, np.int16)), kind_of("y", np.zeros((64, 64, 3), np.uint8))
    ('waveform', 'image')
    """
    if array.dtype.kind not in "biufc" or array.size <= (_TINY if array.ndim < 2 else _TINY_MATRIX):
        return "values"
    if array.ndim == 2 and min(array.shape) == 1:
        array = array.reshape(-1)
    if array.ndim == 1:
        return "waveform" if len(array) >= _LONG and _may_be_sound(array.dtype) else "curve"
    if array.ndim == 2:
        return _kind_of_matrix(name, array)
    return "image" if panels.is_picture(array.shape) else "volume"


def _kind_of_matrix(name: str, array: NDArray[Any]) -> Kind:
    hint = next((kind for kind, parts in _HINTS.items() if any(part in name.lower() for part in parts)), "")
    short, long = sorted(array.shape)
    in_bytes = array.dtype in (np.uint8, np.uint16)
    if short <= 2 and long >= _LONG and not hint and _may_be_sound(array.dtype):
        return "waveform"
    if hint not in ("image", "traces"):
        most = np.inf if hint == "raster" else _MOST_COUNTS_IN_BYTES if in_bytes else _MOST_COUNTS
        if _are_counts(array, most):
            return "raster"
    if hint == "image":
        return "image"
    if hint == "traces" or (long >= 16 and long >= (16 if in_bytes else 4) * short):
        return "traces"
    return "image"


def _may_be_sound(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype in (np.int16, np.int32)


def _are_counts(array: NDArray[Any], most: float) -> bool:
    numbers = _to_real(array)
    seen = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
    if not seen.size:
        return False
    return bool(seen.min() >= 0 and seen.max() <= most and (seen.dtype.kind != "f" or (seen == np.floor(seen)).all()))


@dataclass(frozen=True, slots=True)
class _Panel:
    """A field, and how to plot it."""

    name: str
    facts: str
    notes: tuple[str, ...]
    kind: Kind
    view: FieldView

    def heights(self, letters: int) -> tuple[float, ...]:
        """Return the heights of the cells in inches, including labels; `letters` fit into a line."""
        shape = self.view.array.shape
        match self.kind:
            case "raster":
                return (float(np.clip(0.9 + shape[1] * 0.02, 1.5, 2.9)),)
            case "traces":
                return (float(np.clip(0.8 + min(shape) * 0.1, 1.5, 3.6)),)
            case "waveform":
                return 1.0, 1.8
            case "image" | "volume":
                return (2.9,)
            case "curve":
                return (1.6,)
        return (_LINE_INCHES * len(array_lines(self.view.array, letters)) + 0.1,)


def _compose(item: Mapping[str, Any], title: str, width: float, dpi: float) -> "Figure":
    """Return the figure: a heading and a body for each panel, then a table of the fields that are not arrays."""
    figure_class = _import_figure()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
    figure: Figure = figure_class(figsize=(width, 1), dpi=dpi, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    plotted, listed = _arrange_panels(item)
    letters = panels.line_letters(figure)
    lines = table_lines(listed, letters)
    if not plotted and not lines:
        lines = ["This item has no fields."]
    heights = [height for panel in plotted for height in (0.36, *panel.heights(letters))]
    if lines:
        heights += [0.36, _LINE_INCHES * len(lines) + 0.1]
    grid = figure.add_gridspec(len(heights), 1)
    row = 0
    for panel in plotted:
        cells = [grid[row + 1 + number, 0] for number in range(len(panel.heights(letters)))]
        notes = [*panel.notes, *_PLOT[panel.kind](figure, cells, panel.view)]
        facts = panel.facts
        if figure.get_figwidth() < _WIDTH_INCHES:  # no room beside the name
            facts, notes = "", [panel.facts, *notes]
        heights[row] += 0.17 if notes else 0.0
        _write_heading(figure, grid[row, 0], panel.name, facts, shorten(" · ".join(notes), letters + 20))
        row += 1 + len(cells)
    if lines:
        _write_heading(figure, grid[row, 0], "other fields" if plotted else "fields", "", "")
        panels.write_lines(figure, grid[row + 1, 0], lines)
    if title:
        figure.suptitle(
            shorten(replace_missing_glyphs(title), 80),
            x=0.012,
            ha="left",
            size=12,
            weight="bold",
            family=SANS,
            parse_math=False,
        )
    grid.set_height_ratios(heights)
    figure.set_figheight(sum(heights) + 0.08 * len(heights) + (0.45 if title else 0.1))
    return figure


def _write_heading(figure: "Figure", cell: "SubplotSpec", name: str, facts: str, notes: str) -> None:
    """Write name and facts on one line, and the notes below it, close to the panel underneath."""
    ax = figure.add_subplot(cell)
    ax.set_axis_off()
    plain: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "family": SANS, "parse_math": False}
    grey: dict[str, Any] = {"color": GREY, **plain}
    bold = ax.annotate(
        shorten(replace_missing_glyphs(name), 40) or "(unnamed)",
        xy=(0, 0),
        xycoords="axes fraction",
        xytext=(0, 12 if notes else 0),
        size=10,
        weight="bold",
        **plain,
    )
    beside = ax.annotate(
        shorten(replace_missing_glyphs(facts), 84), xy=(1, 0), xycoords=bold, xytext=(10, 0.4), size=8.5, **grey
    )
    below = ax.annotate(
        shorten(replace_missing_glyphs(notes), 140), xy=(0, 0), xycoords="axes fraction", xytext=(0, 0), size=8, **grey
    )
    for text in (bold, beside, below):
        text.set_in_layout(False)


def _arrange_panels(item: Mapping[str, Any]) -> tuple[list[_Panel], list[tuple[str, Any]]]:
    """Return the panels, and the names and values that are listed instead."""
    arrays: dict[str, NDArray[Any]] = {}
    given: dict[str, Any] = {}
    listed: list[tuple[str, Any]] = []
    about: list[tuple[str, Any]] = []
    for name, value in item.items():
        array = _as_array(value)
        if name == "metadata" and isinstance(value, Mapping):
            about = [(f"metadata.{key}", entry) for key, entry in value.items()]
        elif array is None:
            listed.append((str(name), value))
        elif len(arrays) == _MOST_PANELS:
            listed.append((f"{name} (not plotted)", value))
        else:
            arrays[str(name)], given[str(name)] = array, value
    kinds = {name: kind_of(name, array) for name, array in arrays.items()}
    lengths = {name: _n_times(kinds[name], array) for name, array in arrays.items()}
    found: list[_Panel] = []
    for name, array in arrays.items():
        binned = lengths[name] in {lengths[other] for other, kind in kinds.items() if kind == "raster"}
        rate = _find_rate(item, name, longest=lengths[name] == max(lengths.values()), binned=binned)
        unit = _look_up(item, (f"{name}_unit", f"{name}_units"), ("units", name))
        facts, notes = _describe_array(array, given[name])
        view = FieldView(
            array if kinds[name] == "values" else _to_real(array),
            rate,
            replace_missing_glyphs(unit)[:16] if isinstance(unit, str) else "",
        )
        found.append(_Panel(name, facts, notes, kinds[name], view))
    return found, listed + about


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


def _describe_array(array: NDArray[Any], value: Any) -> tuple[str, tuple[str, ...]]:
    """Return dtype, shape and range in words, and notes about values left blank."""
    words = [str(getattr(value, "dtype", array.dtype)).removeprefix("torch."), str(array.shape)]
    notes: list[str] = []
    if array.dtype.kind in "biufc":
        numbers = _to_real(array)
        finite = np.isfinite(numbers)
        seen = numbers if finite.all() else numbers[finite]
        if seen.size and array.size > 1:
            low, high = format_number(seen.min()), format_number(seen.max())
            words.append(f"{low} – {high}" if seen.min() < seen.max() else f"constant {low}")
        if array.dtype.kind == "c":
            notes.append("magnitude")
        n_nan = int(np.isnan(numbers).sum()) if numbers.dtype.kind == "f" else 0
        n_infinite = numbers.size - int(finite.sum()) - n_nan
        wide = seen.dtype.kind == "f" and seen.dtype.itemsize >= 8
        n_huge = int((np.abs(seen) > panels.LARGEST).sum()) if wide else 0
        blank = {"NaN": n_nan, "infinite": n_infinite, f"beyond {panels.LARGEST:g}": n_huge}
        notes += [f"{count} {word} left blank" for word, count in blank.items() if count]
    return " · ".join(words), tuple(notes)


def _n_times(kind: Kind, array: NDArray[Any]) -> int:
    """Return the number of frames along time; 0 without a time axis."""
    if kind == "raster":
        return len(array)
    return max(array.shape) if kind in ("traces", "waveform", "curve") else 0


def _find_rate(item: Mapping[str, Any], name: str, *, longest: bool, binned: bool) -> float | None:
    """Return the frames per second of a field, if the item has them."""
    own = _look_up(item, [f"{name}_{key}" for key in _RATE_KEYS], ("sampling_rates", name))
    if (rate := _to_positive(own)) is not None:
        return rate
    # A rate without a field name is that of the recording; shorter fields have other rates.
    if longest and (rate := _to_positive(_look_up(item, _RATE_KEYS))) is not None:
        return rate
    bin_ms = _to_positive(_look_up(item, _BIN_KEYS)) if binned else None
    return None if bin_ms is None else 1000 / bin_ms


def _look_up(item: Mapping[str, Any], keys: Sequence[str], nested: tuple[str, str] | None = None) -> Any:
    """Return the first of `keys`, or the `nested` one, found in the metadata or else in the item itself."""
    for place in (item.get("metadata"), item):
        if isinstance(place, Mapping):
            for key in keys:
                if key in place:
                    return place[key]
            if nested and isinstance(place.get(nested[0]), Mapping) and nested[1] in place[nested[0]]:
                return place[nested[0]][nested[1]]
    return None


def _to_positive(value: Any) -> float | None:
    with suppress(TypeError, ValueError, RuntimeError):
        number = float(value)
        return number if 0 < number < np.inf else None
    return None
