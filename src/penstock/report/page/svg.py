"""Charts as SVG: axes with round ticks, lines, points, bars and stacked areas. Pure: numbers in, markup out.

Colours are CSS classes (`s0` to `s5`) that the page defines, for light and dark. Colour is never the only difference:
lines also differ in dashes and markers, areas in hatching.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.observe.durations import Floats
from penstock.report.page.html import Html, join, tag

__all__ = ["Axis", "Bars", "Chart", "Line", "Points", "Stack", "legend", "round_ticks", "tick_labels"]

_STYLES = 6
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "1 4")
_MARKED = 48  # a line with at most this many points has markers
_FEW = 600  # at most this many points are drawn larger
_LETTER = 6.7  # typical width in pixels of a letter at 12 pixels
_TOP, _BOTTOM, _RIGHT = 28, 46, 14
_ROW = 40  # pixels of a bar with its label


class Axis(NamedTuple):
    """Label with unit, and range of an axis."""

    label: str
    low: float
    high: float


class Line(NamedTuple):
    """Connected values, in ascending x."""

    name: str
    x: Floats
    y: Floats


class Points(NamedTuple):
    """Separate values."""

    name: str
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacked areas, the first one at the bottom: each has a height between any two edges."""

    names: tuple[str, ...]
    edges: Floats
    heights: tuple[Floats, ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, each with its label above it."""

    names: tuple[str, ...]
    words: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be plotted at any size.

    Parameters
    ----------
    title, finding
        What it is and what it shows, one sentence each; also for screen readers.
    borders
        Heights of thin horizontal lines.
    """

    title: str
    finding: str
    x: Axis
    y: Axis
    content: tuple[Line | Points | Stack | Bars, ...]
    borders: tuple[float, ...] = ()

    def svg(self, ident: str, width: int, height: int, class_: str = "") -> Html:
        """Return the chart at a size in pixels; `ident` is unique in the page."""
        bars = [part for part in self.content if isinstance(part, Bars)]
        if bars:
            height = _ROW * len(bars[0].values) + 6
        inside = _bars(bars[0], width) if bars else self._plot(ident, width, height)
        return tag(
            "svg",
            tag("title", self.title, id=f"{ident}-t"),
            tag("desc", self.finding, id=f"{ident}-d"),
            inside,
            class_=f"chart {class_}".strip(),
            role="img",
            aria_labelledby=f"{ident}-t {ident}-d",
            viewBox=f"0 0 {width} {height}",
        )

    def _plot(self, ident: str, width: int, height: int) -> Html:
        y_ticks = round_ticks(self.y.low, self.y.high, max(2, (height - _TOP - _BOTTOM) // 40))
        y_words = tick_labels(y_ticks)
        left = round(max(map(len, y_words), default=1) * _LETTER) + 12
        x_ticks = round_ticks(self.x.low, self.x.high, max(2, (width - left - _RIGHT) // 80))
        across = (left, width - _RIGHT)
        down = (height - _BOTTOM, _TOP)
        scale = _Scale(self.x, self.y, across, down)
        parts: list[Html] = []
        for value, words in zip(y_ticks, y_words, strict=True):
            at = scale.y(value)
            parts.append(tag("line", class_="grid", x1=left, x2=across[1], y1=at, y2=at))
            parts.append(tag("text", words, x=left - 7, y=at + 4, text_anchor="end"))
        for value, words in zip(x_ticks, tick_labels(x_ticks), strict=True):
            at = scale.x(value)
            half = len(words) * _LETTER / 2
            parts.append(tag("line", class_="axis", x1=at, x2=at, y1=down[0], y2=down[0] + 4))
            # At an edge, labels are moved inwards rather than cut off.
            parts.append(
                tag("text", words, x=min(max(at, half), width - half - 1), y=down[0] + 17, text_anchor="middle")
            )
        heights = [scale.y(border) for border in self.borders]
        parts += [tag("line", class_="border", x1=left, x2=across[1], y1=at, y2=at) for at in heights]
        number = 0
        for part in self.content:
            parts.append(_plot_part(part, scale, number, ident))
            number += len(part.names) if isinstance(part, Stack) else 1
        parts.append(tag("line", class_="axis", x1=left, x2=across[1], y1=down[0], y2=down[0]))
        parts.append(tag("text", self.y.label, x=0, y=13, class_="label"))
        parts.append(tag("text", self.x.label, x=across[1], y=height - 8, text_anchor="end", class_="label"))
        return join(*parts)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to pixels."""

    x_axis: Axis
    y_axis: Axis
    across: tuple[float, float]
    down: tuple[float, float]

    def x(self, value: float) -> float:
        return _to_pixels(value, self.x_axis, self.across)

    def y(self, value: float) -> float:
        return _to_pixels(value, self.y_axis, self.down)


def _to_pixels(value: float, axis: Axis, pixels: tuple[float, float]) -> float:
    share = (value - axis.low) / max(axis.high - axis.low, 1e-300)
    return pixels[0] + min(max(share, 0.0), 1.0) * (pixels[1] - pixels[0])


def _plot_part(part: Line | Points | Stack | Bars, scale: _Scale, number: int, ident: str) -> Html:
    if isinstance(part, Line):
        return _line(part, scale, number)
    if isinstance(part, Points):
        # Zero-length strokes with round ends: one element for thousands of points.
        dots = "".join(f"M{scale.x(x):.1f} {scale.y(y):.1f}h0" for x, y in zip(part.x, part.y, strict=True))
        few = " few" if len(part.x) <= _FEW else ""
        return tag("path", class_=f"dots{few} s{number % _STYLES}", d=dots)
    assert isinstance(part, Stack), "bars have no axes"
    return _stack(part, scale, number, ident)


def _line(line: Line, scale: _Scale, number: int) -> Html:
    style = number % _STYLES
    at = [(scale.x(x), scale.y(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = "".join(f"{'L' if count else 'M'}{x:.1f} {y:.1f}" for count, (x, y) in enumerate(at))
    curve = tag("path", class_=f"line s{style}", d=path, stroke_dasharray=_DASHES[style] or None)
    if len(at) > _MARKED:
        return curve
    return join(curve, tag("path", class_=f"mark s{style}", d="".join(_marker(style, x, y) for x, y in at)))


def _marker(style: int, x: float, y: float) -> str:
    """Return a circle, square, triangle or diamond, as a piece of a path."""
    shapes = (
        "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
        "m-2.7 -2.7h5.4v5.4h-5.4z",
        "m0 -3.6l3.4 6h-6.8z",
        "m0 -3.7l3.7 3.7l-3.7 3.7l-3.7 -3.7z",
    )
    return f"M{x:.1f} {y:.1f}{shapes[style % len(shapes)]}"


def _stack(stack: Stack, scale: _Scale, number: int, ident: str) -> Html:
    parts = [_hatch_patterns(ident, number, len(stack.names))]
    below = np.zeros(len(stack.edges) - 1)
    for count, heights in enumerate(stack.heights):
        above, style = below + heights, (number + count) % _STYLES
        upper = _steps(stack.edges, above, scale)
        lower = _steps(stack.edges, below, scale)[::-1]
        outline = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *lower]) + "Z"
        parts.append(tag("path", class_=f"area s{style}", d=outline))
        parts.append(tag("path", class_="hatch", d=outline, fill=f"url(#{ident}-h{style})"))
        below = above
    return join(*parts)


def _steps(edges: Floats, heights: Floats, scale: _Scale) -> list[tuple[float, float]]:
    return [
        (scale.x(edge), scale.y(height))
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True)
        for edge in (left, right)
    ]


def _hatch_patterns(ident: str, first: int, count: int) -> Html:
    """Return the patterns that distinguish areas without colour."""
    lines = ("", "M0 8L8 0", "M4 3.5h.01", "M0 4H8", "M4 0V8", "M0 0L8 8M0 8L8 0")
    return tag(
        "defs",
        *(
            tag(
                "pattern",
                tag("path", d=lines[style] or "M0 0", class_="pattern", stroke_linecap="round"),
                id=f"{ident}-h{style}",
                width=8,
                height=8,
                patternUnits="userSpaceOnUse",
            )
            for style in sorted({(first + number) % _STYLES for number in range(count)})
        ),
    )


def _bars(bars: Bars, width: int) -> Html:
    most = max(bars.values, default=0) or 1
    parts: list[Html] = []
    for row, (name, words, value) in enumerate(zip(bars.names, bars.words, bars.values, strict=True)):
        top = row * _ROW
        room = max(4, int((width - len(words) * _LETTER - 24) / _LETTER))
        parts.append(tag("text", name if len(name) <= room else f"{name[: room - 1]}…", x=0, y=top + 15))
        parts.append(tag("text", words, x=width, y=top + 15, text_anchor="end"))
        parts.append(tag("rect", class_="track", x=0, y=top + 21, width=width, height=9, rx=2))
        parts.append(
            tag("rect", class_="bar s0", x=0, y=top + 21, width=max(1.5, width * value / most), height=9, rx=2)
        )
    return join(*parts)


def legend(names: Sequence[str], ident: str, *, areas: bool = False) -> Html:
    """Return the legend of the chart with `ident`."""
    entries = []
    for number, name in enumerate(names):
        style = number % _STYLES
        if areas:
            # Its own patterns: those of a chart that is hidden at this width would not be painted.
            sample = join(
                _hatch_patterns(f"{ident}-l", number, 1),
                tag("rect", class_=f"area s{style}", x=0, y=0, width=22, height=12),
                tag("rect", class_="hatch", x=0, y=0, width=22, height=12, fill=f"url(#{ident}-l-h{style})"),
            )
        else:
            line = tag("path", class_=f"line s{style}", d="M0 6H22", stroke_dasharray=_DASHES[style] or None)
            sample = join(line, tag("path", class_=f"mark s{style}", d=_marker(style, 11, 6)))
        shown = tag("svg", sample, width=22, height=12, viewBox="0 0 22 12", aria_hidden="true")
        entries.append(tag("li", shown, tag("span", name)))
    return tag("ul", *entries, class_="legend")


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between `low` and `high`: at least one, at most about `most`.

    Examples
    --------
    >>> round_ticks(0, 97, 6), round_ticks(0.12, 0.31, 4)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.15, 0.2, 0.25, 0.3])
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Integer multiples, rounded, so that 3 x 0.1 is 0.3.
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)] or [low]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the labels of ticks, with just enough digits to tell them apart.

    Examples
    --------
    >>> tick_labels([0.0, 0.05, 0.1]), tick_labels([-2000.0, 0.0]), tick_labels([0.0, 5e6])
    (['0.00', '0.05', '0.10'], ['−2,000', '0'], ['0M', '5M'])
    """
    step = min(np.diff(ticks), default=abs(ticks[0]) or 1.0) if len(ticks) else 1.0
    if step < 1e-4:
        return [f"{tick:.1e}".replace("-", "−") for tick in ticks]
    unit, suffix = (1e6, "M") if step >= 1e6 else (1.0, "")
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [f"{tick / unit:,.{digits}f}{suffix}".replace("-", "−") for tick in ticks]
