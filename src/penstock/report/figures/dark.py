"""Turns a figure that was plotted on white into one on a dark ground. Colours that stand for data stay as they are."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["darken"]

_GREY = 0.06  # colours whose parts differ by less are shades of grey: text, axes, grounds
_INVERTED = {"Greys": "Greys_r"}  # maps whose lowest value is the ground


def darken(figure: "Figure", *, ground: str, text: str) -> None:
    """Recolour a figure: white becomes `ground`, black becomes `text`, and shades of grey lie in between."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415  # optional
    from matplotlib.colors import to_rgb, to_rgba  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    dark, light = np.array(to_rgb(ground)), np.array(to_rgb(text))

    def recolour(colour: Any) -> Any:
        red, green, blue, alpha = to_rgba(colour)
        if max(red, green, blue) - min(red, green, blue) > _GREY:
            return colour
        return (*(light + (dark - light) * red), alpha)

    figure.draw_without_rendering()  # ticks and their labels are made when a figure is drawn
    for part in figure.findobj():
        if isinstance(part, Text):
            part.set_color(recolour(part.get_color()))
        elif isinstance(part, Line2D):
            part.set_color(recolour(part.get_color()))
            part.set_markerfacecolor(recolour(part.get_markerfacecolor()))
            part.set_markeredgecolor(recolour(part.get_markeredgecolor()))
        elif isinstance(part, Patch):
            part.set_facecolor(recolour(part.get_facecolor()))
            part.set_edgecolor(recolour(part.get_edgecolor()))
        elif isinstance(part, ScalarMappable) and part.get_cmap().name in _INVERTED:
            part.set_cmap(_INVERTED[part.get_cmap().name])
