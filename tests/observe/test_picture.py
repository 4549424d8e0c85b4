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

from penstock.observe.picture import Chart, Kind, draw_chart, kind_of, plot_item, to_svg

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
        ("x", SPIKES, "image"),
        ("x", SPIKES.astype(np.float32), "image"),
        ("x", SPIKES > 0, "image"),
        ("x", SPIKES.astype(np.uint8), "image"),
        ("x", np.where(SPIKES > 2, np.nan, SPIKES), "image"),
        ("spikes", np.zeros((1000, 2)), "image"),
        ("spike_counts", SPIKES * 500, "image"),
        ("x", NOISE, "traces"),
        ("x", NOISE.T, "traces"),
        ("x", NOISE[:2, :100].T, "traces"),
        ("raw", (NOISE.T * 100).astype(np.int16), "traces"),
        ("raw", (NOISE[:8].T * 100 + 900).astype(np.uint16), "traces"),
        ("velocity", NOISE[:2].T, "traces"),
        ("lfp", np.zeros((8, 300)), "traces"),
        ("x", NOISE[0], "curve"),
        ("x", (NOISE[0] * 1000).astype(np.int16), "curve"),
        ("x", NOISE[:1], "curve"),
        ("x", NOISE[:1].T, "curve"),
        ("x", NOISE[:2], "traces"),
        ("x", NOISE[:2].T, "traces"),
        ("x", np.zeros(1000), "curve"),
        ("x", PICTURE[..., 0], "image"),
        ("x", PICTURE[..., 0].astype(np.uint16) * 200, "image"),
        ("x", NOISE[:60, :90], "image"),
        ("x", PICTURE, "image"),
        ("x", np.dstack([PICTURE, PICTURE[..., :1]]), "image"),
        ("x", np.moveaxis(PICTURE, 2, 0) / 255, "image"),
        ("x", PICTURE[None, ..., 0], "image"),
        ("log_mel", NOISE, "image"),
        ("mask", SPIKES > 0, "image"),
        ("x", np.zeros((20, 30, 40)), "image"),
        ("x", np.zeros((2, 20, 30, 40)), "image"),
        ("x", np.zeros((5, 40, 60, 3)), "image"),
        ("x", np.zeros((4, 4, 4)), "image"),
        ("x", NOISE[0, :999], "curve"),
        ("x", np.arange(9), "curve"),
        ("x", NOISE[:1, :50], "curve"),
        ("labels", np.zeros(5000, np.int64), "curve"),
        ("x", np.array(3.0), "text"),
        ("x", np.arange(8), "text"),
        ("x", np.eye(4), "text"),
        ("x", np.zeros((0, 500)), "text"),
        ("x", np.full((50, 50), "word"), "text"),
        ("x", np.zeros(50, "i4,f8"), "text"),
        ("x", np.zeros(50, "M8[s]"), "text"),
        ("x", np.array([None] * 50), "text"),
        ("x", NOISE[:, :100] + 1j, "image"),
        ("x", NOISE[0] + 1j, "curve"),
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


def test_a_figure_has_a_heading_for_every_field_and_the_rest_as_text(drawn: tuple[Figure, np.ndarray]) -> None:
    words = texts_in(drawn[0])
    headings = {line.partition("\n")[0] for line in words if "\n" in line}
    assert headings >= {"spikes", "behavior", "lfp", "audio", "stimulus", "volume"}
    assert "Item 12" in words
    assert any(line.startswith(f"spikes\nint64 (100, 96) · 0 – {SPIKES.max()}") for line in words)
    assert any("32 of 64 channels, evenly spaced" in line for line in words)
    (text,) = [text for text in words if "transcript" in text]
    for line in (
        r"transcript +the quick brown fox",
        r"wav +1,024 bytes b'",
        r"metadata\.subject +'?J",
        r"label +int64 3",
    ):
        assert re.search(line, text), line
    assert "…" in text


def test_no_text_lies_on_another(drawn: tuple[Figure, np.ndarray]) -> None:
    figure = drawn[0]
    figure.draw_without_rendering()  # at the resolution that it has now, which is not that of the file
    # Tick labels are left out: those beyond the limits are not drawn, and lie anywhere.
    ticks = {label for ax in figure.findobj(Axes) for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels()}
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible()]
    assert len(boxes) > 12
    for number, (words, box) in enumerate(boxes):
        assert box.x0 >= 0, words
        assert box.x1 <= figure.bbox.x1, words
        for other, another in boxes[number + 1 :]:
            assert not box.overlaps(another), f"{words!r} lies on {other!r}"


DTYPES = [*"?bBhHiIlLefdgFDG", ">f4", ">i2", "U3", "S4", "M8[s]", "m8[ms]"]


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [((2,), DTYPES), ((30,), [*"?Leg", ">i2"]), ((24, 20), "?e"), ((1500,), "hF")],
    ids=["text", "curve", "counts", "long"],
)
def test_every_type_of_number_can_be_drawn(tmp_path: Path, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    item = {f"is {dtype}": RNG.integers(0, 2, shape).astype(dtype) for dtype in dtypes}
    words = "\n".join(words_of(item, tmp_path))
    assert [name for name in item if name not in words] == []


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
    words = "\n".join(words_of(ODD, tmp_path))
    assert [name for name in ODD if name not in words] == []


@pytest.mark.parametrize("shape", [(30,), (1200,), (3, 60), (24, 20), (16, 16, 3), (6, 7, 5)], ids=str)
def test_what_is_not_finite_is_counted_and_leaves_a_gap(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = RNG.normal(size=shape)
    array.flat[[1, 5, 7]] = np.nan, np.inf, -np.inf
    seen = array[np.isfinite(array)]
    words = words_of({"x": array}, tmp_path)
    assert any("3 not finite, left blank" in line for line in words)
    assert any(f"{seen.max():.4g}" in line for line in words)


def test_what_has_nothing_finite_can_be_drawn(tmp_path: Path) -> None:
    item = {f"of {shape}": np.full(shape, np.nan) for shape in ((30,), (1200,), (3, 60), (24, 20), (6, 7, 5))}
    words = "\n".join(words_of(item, tmp_path))
    assert [name for name in item if name not in words] == []


@pytest.mark.parametrize("array", [np.zeros(30_000), np.zeros((30_000, 300), np.uint8)], ids=["curve", "counts"])
def test_a_single_peak_among_many_samples_is_seen(tmp_path: Path, array: np.ndarray) -> None:
    array[0] = 1
    one = pixels_of({"spikes": array}, tmp_path)
    array[17_777] = 1
    two = pixels_of({"spikes": array}, tmp_path)
    # The headings are the same, so only the peak can make a difference.
    columns = np.flatnonzero((one != two).any(axis=(0, 2)))
    assert len(columns) > 0
    assert 0.45 < columns.mean() / one.shape[1] < 0.7


@pytest.mark.parametrize("array", [NOISE, NOISE.T], ids=["channels first", "time first"])
@pytest.mark.parametrize("about", [{"lfp_rate_hz": 100}, {"metadata": {"sampling_rates": {"lfp": 100}, "rate": 5}}])
def test_the_longer_axis_of_traces_is_time(tmp_path: Path, array: np.ndarray, about: dict[str, Any]) -> None:
    figure = figure_of({"lfp": array, **about}, tmp_path / "item.png")
    (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == "channel"]
    assert ax.get_xlabel() == "time (s)"
    assert max(line.get_xdata().max() for line in ax.lines if len(line.get_xdata())) == pytest.approx(11.99)
    assert [len(line.get_xdata()) for line in ax.lines if len(line.get_xdata())] == [1200] * 32


def time_labels(item: Mapping[str, Any], path: Path) -> list[str]:
    return [ax.get_xlabel() for ax in figure_of(item, path).axes if ax.get_xlabel()]


def test_a_rate_without_a_name_is_that_of_the_longest_field(tmp_path: Path) -> None:
    item = {"x": NOISE[:3, :300], "audio": NOISE[0], "metadata": {"sample_rate": "8000"}}
    assert time_labels(item, tmp_path / "item.png") == ["time (frames)", "time (s)"]
    for rate in (0, "fast"):
        assert time_labels({**item, "metadata": {"rate": rate}}, tmp_path / "item.png") == ["time (frames)", "index"]


def test_tensors_are_drawn_like_arrays(tmp_path: Path) -> None:
    item = {
        "half": torch.randn(4, 100, dtype=torch.bfloat16, requires_grad=True),
        "sparse": torch.eye(30).to_sparse(),
        "conjugate": torch.randn(30, dtype=torch.complex64).conj(),
        "label": torch.tensor(3),
    }
    words = "\n".join(words_of(item, tmp_path))
    assert [name for name in item if name not in words] == []
    assert "(4, 100)" in words


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
        r"text +a b□ □□",
        "names +'?\\[?'go'",
        r"ragged +\[\[1\]",
        "long +x+",
        "3 +1.5",
        "unspeakable +<Unspeakable",
    ):
        assert re.search(line, text), line
    assert "float64 (3, 4)" in text


def test_an_item_without_fields_says_so(tmp_path: Path) -> None:
    assert "This item has no fields." in words_of({}, tmp_path)


def test_a_chart_in_a_page_takes_its_colours_from_it_and_shares_no_id() -> None:
    x = np.arange(20.0)
    pages = []
    for kind in ("lines", "points", "stack"):
        edges = np.arange(21.0) if kind == "stack" else x
        chart = Chart(kind, "time (s)", "<b>", {"one & two": (edges, x), "other": (edges, x)}, borders=(3.0,))
        pages.append(to_svg(draw_chart(chart, 430, 250), f"of-{kind}", {"#000000": "var(--text)"}))
    for text in pages:
        assert "one &amp; two" in text
        assert "&lt;b&gt;" in text
        assert "var(--text)" in text
        assert "<!--" not in text
        assert "xml" not in text.partition("viewBox")[0]
    idents = [ident for text in pages for ident in re.findall(r'\bid="([^"]+)"', text)]
    assert len(set(idents)) == len(idents)
