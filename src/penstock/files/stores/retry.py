"""Repeat requests that fail, within a deadline."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.core.errors import PenstockError, ReadError, WriteError
from penstock.core.text import count
from penstock.files.stores.counts import TransferCounts
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError, RequestError
from penstock.files.stores.options import StoreOptions

__all__ = ["repeat", "stall_seconds"]

_T = TypeVar("_T")
_FIRST_SECONDS, _FIRST_SLOW_SECONDS, _LONGEST_SECONDS = 0.1, 1.0, 10.0
"""Pause after the first failure, after the first "slow down", and the longest one."""

_RANDOM = random.SystemRandom()  # forked children would draw the same pauses from a generator with a state


def stall_seconds(options: StoreOptions) -> float:
    """Return how long a server may be silent within a request: short enough for several attempts."""
    return min(30.0, options.deadline_seconds / 4)


def repeat(
    attempt: Callable[[float], _T],
    what: str,
    options: StoreOptions,
    counts: TransferCounts,
    *,
    renew: Callable[[], bool] = lambda: False,
) -> _T:
    """Return what `attempt` does; repeat it if it fails in a way that may pass.

    No attempt begins so late that a stalled one would end after the deadline.

    Parameters
    ----------
    attempt
        Given the seconds that are left; raises RequestError.
    what
        Begins the message of an error: "Could not read bytes 0–99 of s3://bucket/x".
    renew
        Gets new credentials; returns False if there is nobody to ask.
    """
    begin = time.monotonic()
    last_begin = options.deadline_seconds - stall_seconds(options)
    n_attempts = 0
    while True:
        attempt_begin = time.monotonic()
        try:
            return attempt(options.deadline_seconds - (attempt_begin - begin))
        except RequestError as caught:
            error = caught
        finally:
            n_attempts += 1
            retries = int(n_attempts > 1)
            counts.add(requests=1, retries=retries, seconds=time.monotonic() - attempt_begin)
        if error.failure == "expired" and not renew():
            raise _final_error(what, error) from error
        if error.failure in ("missing", "replaced", "refused"):
            raise _final_error(what, error) from error
        seconds = time.monotonic() - begin
        pause = _pause_seconds(n_attempts, error, options)
        if n_attempts > options.retries or seconds + pause > last_begin:
            raise _last_error(what, error, n_attempts, seconds) from error
        time.sleep(pause)


def _pause_seconds(n_attempts: int, error: RequestError, options: StoreOptions) -> float:
    """Return how long to wait: twice as long after each failure, and not the same for all who failed together."""
    first = _FIRST_SLOW_SECONDS if error.failure == "slow" else _FIRST_SECONDS
    longest = min(_LONGEST_SECONDS, options.deadline_seconds / 8)
    return min(longest, first * 2.0 ** (n_attempts - 1)) * _RANDOM.uniform(0.5, 1.0)


def _error_type(what: str) -> type[PenstockError]:
    return WriteError if what.startswith("Could not write") else ReadError


def _last_error(what: str, error: RequestError, n_attempts: int, seconds: float) -> PenstockError:
    tries = f"{count(n_attempts, 'attempt')} in {seconds:.1f} s"
    return _error_type(what)(f"{what}: {tries}, the last one failed: {error.reason}.")


def _final_error(what: str, error: RequestError) -> PenstockError:
    """Return the error for a request that would fail again."""
    message = f"{what}: {error.reason}."
    if error.failure == "missing":
        return MissingObjectError(message)
    if error.failure == "replaced":
        return ReplacedObjectError(message)
    if error.failure == "expired":
        message += (
            " Renew them where they come from and start again, or pass StoreOptions(credentials=...), a function that "
            "returns valid ones and is called again when they expire."
        )
    return _error_type(what)(message)
