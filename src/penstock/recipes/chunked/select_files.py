"""The audio files of a folder in natural order, and a part of them."""

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.source.audio.file import find_audio_files

__all__ = ["count_files_below", "is_ratio", "select_files", "sort_files"]

_RATIO_STEPS = 1_000_000  # ratios count as decimals: 0.29 of 100 files is 29


def sort_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the audio files of a folder in natural order."""
    folder = Path(path)
    found = find_audio_files(folder)
    if not found:
        raise SourceError(f"No wav, flac, ogg or mp3 file in {folder}. Give the folder of the audio files.")
    return sorted(found, key=lambda file: _natural(file.relative_to(folder)))


def _natural(path: Path) -> tuple[list[list[str | int]], str]:
    """Return a sort key that compares numbers in names by value, and names that are then equal by their characters."""
    parts: list[list[str | int]] = []
    for part in path.parts:
        words = re.split(r"(\d+)", part)  # text and numbers alternate, so that like is compared with like
        parts.append([int(word) if place % 2 else word for place, word in enumerate(words)])
    return parts, str(path)


def select_files(files: list[Path], ratio_min: float, ratio_max: float, path: object) -> list[Path]:
    """Return the files from one ratio of their number to another; raise OptionError if these are none."""
    if not (is_ratio(ratio_min) and is_ratio(ratio_max) and ratio_min < ratio_max):
        raise OptionError(
            f"Ratios must be 0 <= ratio_min < ratio_max <= 1, got ratio_min={ratio_min!r}, ratio_max={ratio_max!r}."
        )
    selected = files[count_files_below(ratio_min, len(files)) : count_files_below(ratio_max, len(files))]
    if not selected:
        raise OptionError(
            f"ratio_min and ratio_max must select at least one of the {len(files)} files in {path}, got {ratio_min} "
            f"and {ratio_max}. Use ratios that are {1 / len(files):.4g} or more apart."
        )
    return selected


def is_ratio(ratio: Any) -> bool:
    """Return whether `ratio` is a number from 0 to 1."""
    return isinstance(ratio, int | float | np.number) and not isinstance(ratio, bool) and bool(0 <= ratio <= 1)


def count_files_below(ratio: float, n_files: int) -> int:
    """Return the number of files below a ratio."""
    return int(Fraction(float(ratio)).limit_denominator(_RATIO_STEPS) * n_files)
