"""The figure of an item: how each field is plotted, its heading and notes, and its axes."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from penstock.report.figures.items import Kind, kind_of, plot_item

RNG = np.random.default_rng(7)
NOISE = RNG.normal(size=(64, 1200))
SPIKES = RNG.poisson(0.4, (100, 96))
PICTURE = RNG.integers(0, 256, (40, 60, 3)).astype(np.uint8)


def words_of(item: Mapping[str, Any], directory: Path, title: str = "") -> list[str]:
    """Return every text in the figure of an item: matplotlib's SVG has each in a comment."""
    path = directory / "item.svg"
    plot_item(item, path, title=title)
    return [html.unescape(words.strip()) for words in re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL)]


def pixels_of(item: Mapping[str, Any], directory: Path, title: str = "") -> np.ndarray:
    """Return the drawn picture, (height, width, 4), from 0 to 1."""
    path = directory / "item.png"
    plot_item(item, path, title=title)
    return np.asarray(imread(path))


def figure_of(item: Mapping[str, Any], path: Path, *, rendered: bool = False) -> Figure:
    """Return the figure that would be written, or is: rendering is most of the time a drawing takes."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, file: Any, **options: Any) -> None:
        figures.append(figure)
        if rendered:
            save(figure, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        plot_item(item, path, title="Item 12")
    (figure,) = figures
    return figure


def texts_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.parametrize(
    ("name", "array", "kind"),
    [
        ("x", SPIKES, "raster"),
        ("x", SPIKES.astype(np.float32), "raster"),
        ("x", SPIKES > 0, "raster"),
        ("x", SPIKES.astype(np.uint8), "raster"),
        ("x", np.where(SPIKES > 2, np.nan, SPIKES), "raster"),
        ("spikes", np.zeros((1000, 2)), "raster"),
        ("spike_counts", SPIKES * 500, "raster"),
        ("x", NOISE, "traces"),
        ("x", NOISE.T, "traces"),
        ("x", NOISE[:2, :100].T, "traces"),
        ("raw", (NOISE.T * 100).astype(np.int16), "traces"),
        ("raw", (NOISE[:8].T * 100 + 900).astype(np.uint16), "traces"),
        ("velocity", NOISE[:2].T, "traces"),
        ("lfp", np.zeros((8, 300)), "traces"),
        ("x", NOISE[0], "waveform"),
        ("x", (NOISE[0] * 1000).astype(np.int16), "waveform"),
        ("x", NOISE[:1], "waveform"),
        ("x", NOISE[:1].T, "waveform"),
        ("x", NOISE[:2], "waveform"),
        ("x", NOISE[:2].T, "waveform"),
        ("x", np.zeros(1000), "waveform"),
        ("x", PICTURE[..., 0], "image"),
        ("x", PICTURE[..., 0].astype(np.uint16) * 200, "image"),
        ("x", NOISE[:60, :90], "image"),
        ("x", PICTURE, "image"),
        ("x", np.dstack([PICTURE, PICTURE[..., :1]]), "image"),
        ("x", np.moveaxis(PICTURE, 2, 0) / 255, "image"),
        ("x", PICTURE[None, ..., 0], "image"),
        ("log_mel", NOISE, "image"),
        ("mask", SPIKES > 0, "image"),
        ("x", np.zeros((20, 30, 40)), "volume"),
        ("x", np.zeros((2, 20, 30, 40)), "volume"),
        ("x", np.zeros((5, 40, 60, 3)), "volume"),
        ("x", np.zeros((4, 4, 4)), "volume"),
        ("x", NOISE[0, :999], "curve"),
        ("x", np.arange(9), "curve"),
        ("x", NOISE[:1, :50], "curve"),
        ("labels", np.zeros(5000, np.int64), "curve"),
        ("x", np.array(3.0), "values"),
        ("x", np.arange(8), "values"),
        ("x", np.eye(4), "values"),
        ("x", np.zeros((0, 500)), "values"),
        ("x", np.full((50, 50), "word"), "values"),
        ("x", np.zeros(50, "i4,f8"), "values"),
        ("x", np.zeros(50, "M8[s]"), "values"),
        ("x", np.array([None] * 50), "values"),
        ("x", NOISE[:, :100] + 1j, "image"),
        ("x", NOISE[0] + 1j, "waveform"),
        ("x", np.full((8, 300), np.nan), "traces"),
    ],
)
def test_content_decides_how_a_field_is_drawn_and_its_name_where_that_leaves_a_doubt(
    name: str, array: np.ndarray, kind: Kind
) -> None:
    assert kind_of(name, array) == kind


def sample() -> dict[str, Any]:
    seconds = np.arange(16_000) / 16_000
    return {
        "spikes": SPIKES,
        "behavior": NOISE[:2, :100].T.cumsum(axis=0),
        "lfp": NOISE.cumsum(axis=1).astype(np.float32),
        "audio": np.sin(2 * np.pi * (200 + 1500 * seconds) * seconds).astype(np.float32),
        "stimulus": PICTURE,
        "volume": NOISE[:, :900].reshape(64, 30, 30),
        "label": np.array(3),
        "transcript": "the quick brown fox " * 50,
        "wav": bytes(range(256)) * 4,
        "metadata": {"subject": "J", "bin_size_ms": 10.0, "sampling_rates": {"lfp": 1000}, "units": {"lfp": "µV"}},
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Figure, np.ndarray]:
    path = tmp_path_factory.mktemp("sample") / "item.png"
    long_name = "a name that is far too long for one line of a figure" * 3
    figure = figure_of({**sample(), long_name: np.arange(3)}, path, rendered=True)
    return figure, np.asarray(imread(path))


def test_a_figure_has_a_heading_for_every_field_and_a_table_of_the_rest(drawn: tuple[Figure, np.ndarray]) -> None:
    words = texts_in(drawn[0])
    headings = {name for name in words if name in sample()}
    assert headings == {"spikes", "behavior", "lfp", "audio", "stimulus", "volume", "label"}
    assert "Item 12" in words
    assert f"int64 · (100, 96) · 0 – {SPIKES.max()}" in words
    assert any("32 of 64 channels, evenly spaced" in line and "µV apart" in line for line in words)
    (table,) = [text for text in words if "transcript" in text]
    assert re.search(r"transcript +str, 1000 +the quick brown fox", table)
    assert "…" in table
    assert re.search(r"wav +bytes, 1024 +b", table)
    assert re.search(r"metadata\.subject +str, 1 +J", table)


def test_every_panel_has_ink_and_the_size_follows_the_content(drawn: tuple[Figure, np.ndarray], tmp_path: Path) -> None:
    whole = drawn[1]
    assert whole.shape[1] == 1200
    assert 2000 < whole.shape[0] < 4000
    ink = (whole[..., :3] < 0.9).any(axis=2).any(axis=1)
    blank_runs = np.diff(np.flatnonzero(np.concatenate([[True], ink, [True]])))
    assert blank_runs.max() < 90, "an empty stripe of more than three quarters of an inch"
    assert pixels_of({"label": np.array(3)}, tmp_path).shape[0] < 150


def test_no_text_lies_on_another(drawn: tuple[Figure, np.ndarray]) -> None:
    figure = drawn[0]
    # Tick labels are left out: those beyond the limits are not drawn, and lie anywhere.
    ticks = {label for ax in figure.findobj(Axes) for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels()}
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible()]
    assert len(boxes) > 40
    for number, (words, box) in enumerate(boxes):
        assert box.x0 >= 0, words
        assert box.x1 <= figure.bbox.x1, words
        for other, another in boxes[number + 1 :]:
            assert not box.overlaps(another), f"{words!r} lies on {other!r}"


DTYPES = [*"?bBhHiIlLefdgFDG", ">f4", ">i2", "U3", "S4", "M8[s]", "m8[ms]"]


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [((2,), DTYPES), ((30,), [*"?Leg", ">i2"]), ((24, 20), "?e"), ((1500,), "hF")],
    ids=["values", "curve", "raster", "waveform"],
)
def test_every_type_of_number_can_be_drawn(tmp_path: Path, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    item = {dtype: RNG.integers(0, 2, shape).astype(dtype) for dtype in dtypes}
    assert [word for word in words_of(item, tmp_path) if word in dtypes] == list(dtypes)


ODD = {
    "empty": np.zeros((0, 5)),
    "empty line": np.zeros(0),
    "constant line": np.full(40, 3e5),
    "constant matrix": np.full((20, 30), 2.5),
    "constant sound": np.zeros(1200, np.int16),
    "constant traces": np.full((3, 60), -1.5),
    "structured": np.zeros((3, 40), [("a", "f4", (2,)), ("b", "U9")]),
    "objects": np.array([1, "a", None, {}], dtype=object),
    "not a time": np.array(["NaT", "2020-01-01"], "M8[D]"),
    "read-only": np.broadcast_to(np.float32(1.0), (30, 40)),
    "extreme integers": np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max] * 20),
    "extreme floats": np.array([1.7e308, -1.7e308, 0.0] * 20),
    "tiny floats": np.linspace(0, 1e-310, 50),
    "a film": np.zeros((4, 16, 16, 3), np.uint8),
    "five constant axes": np.full((2, 3, 4, 5, 6), 7.0),
}


def test_odd_arrays_can_be_drawn(tmp_path: Path) -> None:
    assert [word for word in words_of(ODD, tmp_path) if word in ODD] == list(ODD)


@pytest.mark.parametrize("shape", [(30,), (1200,), (3, 60), (24, 20), (16, 16, 3), (6, 7, 5)], ids=str)
def test_what_is_not_finite_is_counted_and_leaves_a_gap(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = RNG.normal(size=shape)
    array.flat[[1, 5, 7]] = np.nan, np.inf, -np.inf
    seen = array[np.isfinite(array)]
    words = words_of({"x": array}, tmp_path)
    assert any("1 NaN left blank · 2 infinite left blank" in line for line in words)
    assert any(f"{seen.max():.4g}" in line for line in words)


def test_what_has_nothing_finite_can_be_drawn(tmp_path: Path) -> None:
    item = {str(shape): np.full(shape, np.nan) for shape in ((30,), (1200,), (3, 60), (24, 20), (6, 7, 5))}
    assert [word for word in words_of(item, tmp_path) if word in item] == list(item)


@pytest.mark.parametrize(
    "array",
    [np.zeros(30_000), np.zeros((30_000, 300), np.uint8)],
    ids=["waveform", "raster"],
)
def test_a_single_peak_among_many_samples_is_seen(tmp_path: Path, array: np.ndarray) -> None:
    array[0] = 1
    one = pixels_of({"spikes": array}, tmp_path)
    array[17_777] = 1
    two = pixels_of({"spikes": array}, tmp_path)
    # The headings are the same, so only the peak can make a difference; further down is the spectrogram.
    columns = np.flatnonzero((one != two)[:160].any(axis=(0, 2)))
    assert len(columns) > 0
    assert 0.5 < columns.mean() / 1200 < 0.65


@pytest.mark.parametrize("array", [NOISE, NOISE.T], ids=["channels first", "time first"])
def test_the_longer_axis_of_traces_is_time(tmp_path: Path, array: np.ndarray) -> None:
    figure = figure_of({"lfp": array, "lfp_rate_hz": 100}, tmp_path / "item.png")
    (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == "channel"]
    assert ax.get_xlabel() == "time (s)"
    assert ax.get_xlim() == (0, 12)
    assert [len(line.get_xdata()) for line in ax.lines if len(line.get_xdata())] == [1200] * 32


@pytest.mark.parametrize(
    "about",
    [
        {"metadata": {"sampling_rate_hz": 8000}},
        {"sample_rate": "8000"},
        {"metadata": {"rate": np.float32(8000)}},
        {"audio_rate_hz": torch.tensor(8000)},
        {"metadata": {"sampling_rates": {"audio": 8000}, "rate": 5}},
    ],
)
def test_a_known_sampling_rate_makes_seconds_and_hertz(tmp_path: Path, about: dict[str, Any]) -> None:
    axes = figure_of({"audio": NOISE[0], **about}, tmp_path / "item.png").axes
    (ax,) = [ax for ax in axes if ax.get_ylabel() == "frequency (Hz)"]
    assert ax.get_xlabel() == "time (s)"
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 0.15), (0, 4000))


@pytest.mark.parametrize("rate", [0, "fast"])
def test_without_a_usable_rate_the_axis_counts_frames(tmp_path: Path, rate: Any) -> None:
    words = texts_in(figure_of({"audio": NOISE[0], "metadata": {"rate": rate}}, tmp_path / "item.png"))
    assert {"time (frames)", "frequency (cycles/sample)"} <= set(words)


def time_labels(item: Mapping[str, Any], path: Path) -> list[str]:
    return [ax.get_xlabel() for ax in figure_of(item, path).axes if ax.get_xlabel()]


def test_a_rate_without_a_name_is_that_of_the_longest_field(tmp_path: Path) -> None:
    item = {"x": NOISE[:3, :300], "audio": NOISE[0], "metadata": {"sample_rate": 8000}}
    assert time_labels(item, tmp_path / "item.png") == ["time (frames)", "time (s)"]


def test_a_bin_size_is_that_of_the_counts_and_of_what_is_as_long(tmp_path: Path) -> None:
    fields = {"spikes": SPIKES, "velocity": NOISE[:2, :100].T, "lfp": NOISE}
    item = {**fields, "metadata": {"bin_size_ms": 10}}
    assert time_labels(item, tmp_path / "item.png") == ["time (s)", "time (s)", "time (frames)"]
    assert time_labels(fields, tmp_path / "item.png") == ["time (bins)", "time (frames)", "time (frames)"]


def test_tensors_are_drawn_like_arrays(tmp_path: Path) -> None:
    item = {
        "half": torch.randn(4, 100, dtype=torch.bfloat16, requires_grad=True),
        "sparse": torch.eye(30).to_sparse(),
        "conjugate": torch.randn(30, dtype=torch.complex64).conj(),
        "label": torch.tensor(3),
    }
    words = words_of(item, tmp_path)
    assert [word for word in words if word in item] == list(item)
    assert any(line.startswith("bfloat16 · (4, 100)") for line in words)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_anything_else_is_listed_with_its_size(tmp_path: Path) -> None:
    knot: dict[str, Any] = {}
    knot["itself"] = knot
    item: dict[Any, Any] = {
        "text": "a\n\tb\x00 日本 $\\frac{ & < -",
        "nothing": None,
        "ragged": [[1], [2, 3]],
        "names": ["go", "stop"],
        "knot": knot,
        "nested": {"x": np.ones((3, 4)), "t": torch.ones(2)},
        "unspeakable": Unspeakable(),
        "huge": 10**400,
        "empty": "",
        "void": np.zeros(1, "i4,f4")[0],
        3: 1.5,
        "long": "x" * 100_000,
        "metadata": {5: None, "rows": list(range(1000))},
    }
    text = "\n".join(words_of(item, tmp_path, "$\\bad{"))
    for line in (
        r"text +str, \d+ +a b□ □□",
        "names +list, 2",
        "ragged +list, 2",
        "long +str, 100000 +x+",
        "3 +float +1.5",
    ):
        assert re.search(line, text), line
    assert "float64 (3, 4)" in text


def test_lists_of_numbers_are_arrays(tmp_path: Path) -> None:
    assert "int64 · (20,) · 0 – 19" in words_of({"x": list(range(20))}, tmp_path)


def test_an_item_without_fields_says_so(tmp_path: Path) -> None:
    assert "This item has no fields." in words_of({}, tmp_path)


def test_fields_beyond_the_room_of_a_figure_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.report.figures.items._MOST_PANELS", 2)
    item = {f"field {number}": np.arange(3) for number in range(4)}
    text = "\n".join(texts_in(figure_of(item, tmp_path / "item.png")))
    assert re.search(r"field 2 \(not plotted\) +ndarray +int64 \(3,\)\nfield 3", text)
