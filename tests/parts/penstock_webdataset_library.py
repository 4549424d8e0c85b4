"""Reading with the webdataset library itself."""

import gc
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import webdataset as wds

__all__ = ["consumed", "read_by_the_library", "tars"]


def consumed(make: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return all that a pipeline of the library gives, quiet about the files that the library does not close."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(make())
        gc.collect()
    return found


def read_by_the_library(shards: list[Path], *stages: Any) -> list[dict[str, Any]]:
    """Return all samples as webdataset decodes them."""
    urls = [str(path) for path in shards]
    return consumed(lambda: wds.WebDataset(urls, shardshuffle=False).decode(*stages))


def tars(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if ".tar" in path.suffixes and path.suffix != ".index")
