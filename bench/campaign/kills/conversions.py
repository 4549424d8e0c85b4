"""Conversions that are killed: in one process, with worker processes."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_convert_parts import read, tapes

from bench.campaign.kills.resumable import Work, kill_and_resume
from bench.campaign.trials import Kind
from penstock.convert.convert import convert
from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import SourceError
from penstock.shard.outputs.write_options import WriteOptions

__all__ = ["CONVERSIONS"]

_NAMES = ("anna_1", "bert_1", "anna_2", "carl_1")


def _options(rng: random.Random) -> ConvertOptions:
    parts = (("train", 0.5), ("val", 0.5))
    split = rng.choice((Split(), Split(), Split(parts, "time"), Split(parts, "subject")))
    writing = WriteOptions(rng.randint(2, 5), compression=rng.choice(("none", "none", "gz")))
    return ConvertOptions(writing, split)


def _kill_a_conversion(make_engine: Callable[[], Engine], **more: Any) -> Callable[[random.Random, Path, int], int]:
    def kill(rng: random.Random, folder: Path, number: int) -> int:
        inputs = tapes(folder / "in", [rng.randint(4, 9) for _ in _NAMES], _NAMES)
        options = _options(rng)

        def run(place: Path) -> None:
            warnings.simplefilter("ignore")
            convert(inputs, place, options, engine=make_engine(), existing="resume")

        def read_all(place: Path) -> Any:
            found = [_read_or_none(place / name) for name in options.split.names]
            return None if None in found else found

        return kill_and_resume(Work(run, read_all, **more), rng, folder)

    return kill


def _read_or_none(folder: Path) -> Any:
    try:
        return read(folder)
    except SourceError:
        return None


CONVERSIONS = [
    Kind("conversion", "kill -9 of a conversion in one process", (1, 2), _kill_a_conversion(LocalEngine)),
    Kind(
        "conversion-processes",
        "kill -9 of a conversion with two workers, or of a worker",
        (1, 2),
        _kill_a_conversion(lambda: LocalEngine(2)),
    ),
]
