"""Charts: values are where the axes say that they are."""

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from penstock.report.page.html import Html
from penstock.report.page.svg import Axis, Bars, Chart, Line, Points, Stack, legend, round_ticks, tick_labels


def with_class(svg: Html, name: str, class_: str) -> list[dict[str, str]]:
    return [entry.attrib for entry in ET.fromstring(svg).iter(name) if class_ in entry.get("class", "").split()]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 97), (-3, 5), (1e-9, 3e-9), (0, 4e9), (5, 5), (0.12, 0.3)])
@pytest.mark.parametrize("most", [2, 5, 9])
def test_ticks_are_round_within_the_axis_and_few(low: float, high: float, most: int) -> None:
    ticks = round_ticks(low, high, most)
    assert 1 <= len(ticks) <= most + 2
    assert all(low - 1e-6 * abs(high) <= tick <= high * (1 + 1e-6) for tick in ticks)
    assert len(set(tick_labels(ticks))) == len(ticks)


def test_values_are_drawn_at_their_place() -> None:
    x, y = np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 2.0])
    chart = Chart("t", "f", Axis("x", 0, 10), Axis("y", 0, 2), (Points("p", x, y), Line("l", x, y)), (1.0,))
    svg = chart.svg("c", 400, 200)
    (dots,) = with_class(svg, "path", "dots")
    across = [float(place) for place in re.findall(r"M([\d.]+) ", dots["d"])]
    down = [float(place) for place in re.findall(r"M[\d.]+ ([\d.]+)h0", dots["d"])]
    grid = with_class(svg, "line", "grid")
    assert across == pytest.approx([float(grid[0]["x1"]), sum(across) / 3, float(grid[0]["x2"])])
    assert [down[0], down[-1]] == pytest.approx([float(grid[0]["y1"]), float(grid[-1]["y1"])])
    (border,) = with_class(svg, "line", "border")
    assert float(border["y1"]) == pytest.approx(down[1], abs=0.1)
    (line,) = with_class(svg, "path", "line")
    assert line["d"].startswith(f"M{across[0]} {down[0]}L{across[1]} {down[1]}L")


def test_areas_lie_on_top_of_each_other() -> None:
    edges, heights = np.array([0.0, 1.0, 2.0]), (np.array([1.0, 2.0]), np.array([3.0, 0.0]))
    chart = Chart("t", "f", Axis("x", 0, 2), Axis("y", 0, 4), (Stack(("a", "b"), edges, heights),))
    lower, upper = (
        [float(place) for place in re.findall(r"[ML][\d.]+ ([\d.]+)", area["d"])]
        for area in with_class(chart.svg("c", 400, 200), "path", "area")
    )
    assert upper[4:] == lower[:4][::-1], "the second begins where the first one ends"
    assert upper[2:4] == lower[2:4], "and has no height where it is nothing"
    assert lower[0] - upper[0] == pytest.approx(3 * (lower[-1] - lower[0]), abs=0.3)


def test_bars_have_the_lengths_of_their_values() -> None:
    chart = Chart("t", "f", Axis("", 0, 1), Axis("", 0, 1), (Bars(("a" * 200, "b"), ("4", "1"), (4.0, 1.0)),))
    svg = chart.svg("c", 400, 200)
    assert [float(bar["width"]) for bar in with_class(svg, "rect", "bar")] == [400, 100]
    first = next(text.text for text in ET.fromstring(svg).iter("text"))
    assert first is not None
    assert first.endswith("…"), "a name that would not fit is cut, and says so"


def test_series_differ_by_more_than_their_colours() -> None:
    x = np.arange(100.0)
    lines = tuple(Line(str(number), x, x) for number in range(6))
    svg = Chart("t", "f", Axis("x", 0, 99), Axis("y", 0, 99), lines).svg("c", 400, 200)
    assert len({line.get("stroke-dasharray") for line in with_class(svg, "path", "line")}) == 6
    areas = ET.fromstring(legend([str(number) for number in range(6)], "c", areas=True))
    assert len({entry.get("d") for entry in areas.iter("path")}) == 6


@pytest.mark.parametrize("count", [0, 1])
def test_a_chart_of_nothing_or_of_one_value_is_a_chart(count: int) -> None:
    x = np.zeros(count)
    edges = np.array([0.0, 1.0])
    for part in (Line("l", x, x), Points("p", x, x), Stack(("a",), edges, (np.zeros(1),))):
        svg = Chart("t", "f", Axis("x", 0, 0), Axis("y", 0, 0), (part,)).svg("c", 300, 200)
        assert "nan" not in svg
        ET.fromstring(svg)
