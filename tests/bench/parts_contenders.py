"""Contenders for tests of how is measured: they import nothing, so that their processes start at once."""

import os
import time
from pathlib import Path

__all__ = ["fail", "give", "sleep", "use_processor"]


def give(figure: float) -> float:
    """Return a figure."""
    return figure


def fail() -> float:
    """Fail as a peer may."""
    raise IndexError("none left")


def sleep(path: str) -> float:
    """Write the number of this process, and never end."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(3600)
    return 0.0


def use_processor(seconds: float) -> float:
    """Use a processor."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds
