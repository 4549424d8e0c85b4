"""Save figures atomically, in a supported format."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import OptionError
from penstock.files.durable import write_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_bytes", "figure_format", "save_figure"]


def figure_format(path: Path) -> str:
    """Return the format given by the suffix of `path`; raise OptionError if no figure can be saved there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional; callers have it

    # pgf is left out: it needs a TeX installation.
    formats = sorted(form for form in FigureCanvasAgg.get_supported_filetypes() if form != "pgf")
    form = path.suffix.lower().removeprefix(".")
    if form not in formats:
        allowed = ", ".join(f".{known}" for known in formats)
        raise OptionError(f"The suffix of {path} must be one of {allowed}, got {path.suffix!r}.")
    if not path.parent.is_dir():
        raise OptionError(f"The directory {path.parent} does not exist. Create it to save {path.name} there.")
    if path.is_dir():
        raise OptionError(f"The path of a figure must be a file, got the directory {path}.")
    return form


def save_figure(figure: "Figure", path: Path, dpi: float) -> None:
    """Write a figure atomically."""
    write_aside(path, figure_bytes(figure, figure_format(path), dpi), lasting=False)


def figure_bytes(figure: "Figure", form: str, dpi: float) -> bytes:
    """Return a figure as the content of a file."""
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=dpi)
    return content.getvalue()
