"""Train several folds at once, each in a process of its own; results are those of one after the other."""

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, WorkerError

__all__ = ["run_folds"]

_pickled: bytes = b""  # what a process that trains folds was given


def run_folds(calls: Sequence[Callable[[], Any]], n_jobs: int) -> list[Any]:
    """Return what each call returns, in order; with `n_jobs` > 1, they run in that many processes.

    1. A fold fails: its error is raised, that of the first one if several fail; folds that have not begun never begin.
    2. A process dies: WorkerError.
    """
    if check_integer("n_jobs", n_jobs, at_least=1) == 1:
        return [call() for call in calls]
    try:
        pickled = _pickle(list(calls))
    except Exception as error:
        raise OptionError(
            f"n_jobs={n_jobs} needs a model_class and a dataset that can be pickled: {error}. Define them at the top "
            "of a module, install cloudpickle, or use n_jobs=1."
        ) from error
    # Not forked: OpenMP does not survive a fork, and as many threads as here give the same bits.
    pool = ProcessPoolExecutor(
        min(n_jobs, len(calls)), multiprocessing.get_context("spawn"), _begin, (pickled, torch.get_num_threads())
    )
    try:
        return [pickle.loads(result) for result in pool.map(_run, range(len(calls)))]
    except BrokenProcessPool as error:
        raise WorkerError(
            "A process that trains a fold has died, or could not start: a script must start its work under "
            "`if __name__ == '__main__':`. Use n_jobs=1 if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(pickled: bytes, threads: int) -> None:
    global _pickled  # noqa: PLW0603  # what this process is for
    _pickled = pickled
    torch.set_num_threads(threads)


def _run(number: int) -> bytes:
    return _pickle(pickle.loads(_pickled)[number]())


def _pickle(value: Any) -> bytes:
    """Return the pickle of a value; of functions and classes of a notebook as well, if cloudpickle is installed."""
    try:
        from cloudpickle import dumps  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415  # optional
    except ImportError:
        from pickle import dumps  # noqa: PLC0415
    pickled: bytes = dumps(value)
    return pickled
