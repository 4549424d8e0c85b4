"""Figures as files: of a format that is known, whole or not at all."""

import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import OptionError, WriteError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["checked_format", "save_figure"]


def checked_format(path: Path) -> str:
    """Return the format that the suffix of `path` says, or say why no figure can be written there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional; who draws has it

    # pgf is left out: it needs a TeX installation.
    formats = sorted(form for form in FigureCanvasAgg.get_supported_filetypes() if form != "pgf")
    form = path.suffix.lower().removeprefix(".")
    if form not in formats:
        allowed = ", ".join(f".{known}" for known in formats)
        raise OptionError(f"Cannot draw {path}: {path.suffix or 'no suffix'} is no known format; use one of {allowed}.")
    if not path.parent.is_dir():
        raise OptionError(f"Cannot draw {path}: there is no directory {path.parent}; make it first.")
    if path.is_dir():
        raise OptionError(f"Cannot draw {path}: it is a directory; name a file.")
    return form


def save_figure(figure: "Figure", path: Path, dpi: float) -> None:
    """Write a figure aside, then rename it."""
    form = checked_format(path)
    aside = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        figure.savefig(aside, format=form, dpi=dpi)
        aside.replace(path)
    except OSError as error:
        raise WriteError(f"Could not write {path}: {error}") from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
