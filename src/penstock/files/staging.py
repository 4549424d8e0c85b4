"""Staging folders: data is written into a folder of its own, and appears at its place when it is complete."""

import shutil
from pathlib import Path

__all__ = ["remove_staging"]


def remove_staging(staging: Path, aside: Path) -> None:
    """Remove a staging folder. It is renamed to `aside` first, so that half of it is never taken for all of it."""
    shutil.rmtree(aside, ignore_errors=True)
    staging.replace(aside)
    shutil.rmtree(aside)
