"""What came of a case: outcomes are decided here, from what happened, by comparing values."""

import os
import pickle
import select
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.peers.adapter import Adapter, N, NotOfferedError, sample

__all__ = [
    "FAILURES",
    "Outcome",
    "ReadingError",
    "apart",
    "compare",
    "flip_each",
    "judge",
    "judge_read",
    "numbers_of",
    "outcome_of",
    "prepare",
    "shorten",
    "try_to",
]


class ReadingError(Exception):
    """What was raised in another process; its text has the type."""


FAILURES = (ReadingError, TimeoutError, ChildProcessError)
Outcome = tuple[str, str]
"""right, error, silent, hang, crash or not offered; and one line about it."""


def shorten(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if len(line.strip()) > 10]
    return f"{type(error).__name__}: {lines[-1] if lines else str(error).strip()}"[:160]


def numbers_of(values: Sequence[Any]) -> list[int]:
    return [int(np.asarray(value).ravel()[0]) // 100 for value in values]


def compare(values: Sequence[Any], expected: Sequence[int]) -> Outcome:
    """Compare samples by value: right, or silent with what is wrong."""
    if len(values) == len(expected) and all(
        np.array_equal(np.asarray(value), sample(number)) for value, number in zip(values, expected, strict=True)
    ):
        return "right", f"{len(expected)} samples"
    if len(values) != len(expected):
        return "silent", f"{len(values)} samples instead of {len(expected)}, no error"
    whole = [any(np.array_equal(np.asarray(value), sample(number)) for number in expected) for value in values]
    if all(whole):
        return "silent", f"samples in another order, repeated or lost: {numbers_of(values)}"
    return "silent", f"{whole.count(False)} samples with other values, no error"


def try_to(action: Callable[[], Any]) -> Outcome | None:
    """Run an action apart; return how it failed, None if it did not."""
    try:
        apart(lambda: bool(action()), seconds=30.0)
    except FAILURES as error:
        return outcome_of(error)
    return None


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome that `apart` raised."""
    kind = "hang" if isinstance(error, TimeoutError) else "crash" if isinstance(error, ChildProcessError) else "error"
    return kind, str(error)


def apart(action: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Return what an action returns in a process of its own, so that nothing it left behind matters to the next.

    It raises what the action raised; TimeoutError if it hangs, ChildProcessError if it dies.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        try:
            answer: Any = ("value", action())
        except NotOfferedError as error:
            answer = ("not offered", str(error))
        except BaseException as error:
            answer = ("error", shorten(error))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        in_time = select.select([pipe], [], [], seconds)[0]
        content = pipe.read() if in_time else b""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not in_time:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if not content:
        raise ChildProcessError(f"the process died: {os.waitstatus_to_exitcode(status)}")
    kind, value = pickle.loads(content)
    if kind == "not offered":
        raise NotOfferedError(value)
    if kind == "error":
        raise ReadingError(value)
    return value


def judge(action: Callable[[], Sequence[Any]], expected: Sequence[int]) -> Outcome:
    """Run an action apart, and compare the samples that it returns."""
    try:
        found = apart(action)
    except FAILURES as error:
        return outcome_of(error)
    return compare(found, expected)


def judge_read(adapter: Adapter, folder: Path, expected: Sequence[int]) -> Outcome:
    """Read everything, and compare."""
    return judge(lambda: adapter.read(folder), expected)


def flip_each(adapter: Adapter, folder: Path, places: Sequence[int], expected: Sequence[int]) -> Outcome:
    """Flip a bit at each of these places of the second shard, one at a time; return the worst outcome, with counts."""
    path = adapter.shards(folder)[1]
    whole, found = path.read_bytes(), Counter[str]()
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << (place % 8)
        path.write_bytes(content)
        found[judge_read(adapter, folder, expected)[0]] += 1
        if found["hang"] > 1:
            break
    path.write_bytes(whole)
    worst = next(outcome for outcome in ("hang", "crash", "silent", "error", "right") if found[outcome])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.most_common())
    return worst, f"of {found.total()} flipped bits: {counts}"


def prepare(adapter: Adapter, folder: Path, count: int = N, **options: Any) -> None:
    """Write samples, where the library has a format."""
    with suppress(NotOfferedError):
        apart(lambda: adapter.write(folder, range(count), **options), seconds=30.0)
