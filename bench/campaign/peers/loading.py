"""Cases of workers, order, resume, shapes and what is left behind."""

import atexit
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.peers.adapter import Adapter, N, NotOfferedError
from bench.campaign.peers.judge import Outcome, ReadingError, apart, compare, judge, numbers_of, prepare

__all__ = ["LOADING"]

ALL = range(N)


def flat(loader: Any) -> list[Any]:
    return [value for batch in loader for value in batch]


# -- workers -----------------------------------------------------------------------------------------------------------


class Once:
    """Does something at one sample, the first time only."""

    def __init__(self, what: str, memory: Path, number: int = 5) -> None:
        self.what, self.memory, self.number = what, str(memory), number

    def __call__(self, value: Any) -> Any:
        if int(value[0]) == 100 * self.number and not Path(self.memory).exists():
            if self.what == "raise":
                raise ValueError("the user's own error")
            Path(self.memory).touch()
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        return value


def dying_worker(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder)
    dies = Once("die", folder.parent / "died")
    outcome, detail = judge(lambda: sorted_by_number(flat(adapter.loader(folder, workers=2, transform=dies))), ALL)
    return outcome, detail


def sorted_by_number(values: list[Any]) -> list[Any]:
    return sorted(values, key=lambda value: int(np.asarray(value).ravel()[0]))


def raising_transform(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder)
    fails = Once("raise", folder.parent / "never")
    outcome, detail = judge(lambda: flat(adapter.loader(folder, workers=2, transform=fails)), ALL)
    return (outcome, detail) if "user's own error" in detail or outcome != "error" else ("error", f"{detail}")


def hanging_transform(adapter: Adapter, folder: Path) -> Outcome:
    """With a timeout of 3 seconds, where there is one."""
    prepare(adapter, folder)
    hangs = Once("hang", folder.parent / "hung")
    return judge(lambda: flat(adapter.loader(folder, workers=2, transform=hangs, timeout=3)), ALL)


def unpicklable(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder)
    file = Path("/dev/null").open()  # noqa: SIM115
    local = lambda value: value if file else None  # noqa: E731
    return judge(
        lambda: sorted_by_number(flat(adapter.loader(folder, workers=1, transform=local, method="spawn"))), ALL
    )


def interrupt(adapter: Adapter, folder: Path) -> Outcome:
    """Press Ctrl-C while a batch is waited for; the program must end, and its workers with it."""
    prepare(adapter, folder)
    ready = folder.parent / "hung"
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 0
        try:
            flat(adapter.loader(folder, workers=2, transform=Once("hang", ready)))
        except KeyboardInterrupt:
            code = 130
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ready.exists():
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang", "the sample was never reached"
    os.killpg(child, signal.SIGINT)
    return after_the_end(child)


def after_the_end(child: int, seconds: float = 20.0) -> Outcome:
    """Return how a process ended that should end now, and whether its group is gone."""
    deadline, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < deadline:
        ended, found = os.waitpid(child, os.WNOHANG)
        status = found if ended else None
        time.sleep(0.01)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang", f"the program did not end within {seconds:.0f} s of Ctrl-C"
    while time.monotonic() < deadline:
        try:
            os.killpg(child, 0)
        except ProcessLookupError:
            return "right", f"ended with code {os.waitstatus_to_exitcode(status)}, nothing left"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    return "silent", f"workers were alive {seconds:.0f} s after the program ended"


# -- order and resume --------------------------------------------------------------------------------------------------


def one_order(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder)
    orders = {
        workers: numbers_of(apart(lambda workers=workers: flat(adapter.loader(folder, workers=workers, shuffle=True))))
        for workers in (0, 1, 2, 4)
    }
    for workers, order in orders.items():
        if sorted(order) != list(ALL):
            return "silent", f"{workers} workers deliver {order}"
    different = [workers for workers, order in orders.items() if order != orders[0]]
    if different:
        return "silent", f"another order for {different} workers: {orders[0]} and {orders[different[0]]}"
    return "right", "one order for 0, 1, 2 and 4 workers"


def part(adapter: Adapter, folder: Path, state: Any, steps: int | None, **options: Any) -> tuple[list[Any], Any]:
    """Return the next batches from a state on, and the state after them."""
    loader = adapter.loader(folder, **{"shuffle": True, **options})
    if state is not None:
        adapter.load(loader, state)
    batches, found = iter(loader), []
    while steps is None or len(found) < steps:
        try:
            found.append(next(batches))
        except StopIteration:
            break
    return found, adapter.state(loader)


def whole_epoch(adapter: Adapter, folder: Path, **options: Any) -> list[Any]:
    return apart(lambda: flat(adapter.loader(folder, **{"shuffle": True, **options})))


def check_state(adapter: Adapter) -> None:
    if adapter.package == "webdataset":
        raise NotOfferedError("there is no state to save")


def resume_at(adapter: Adapter, folder: Path, steps: int, workers: tuple[int, ...]) -> Outcome | None:
    """Stop after some steps, resume with other workers as often as given; return what is wrong."""
    first, *others = workers
    expected = numbers_of(whole_epoch(adapter, folder, workers=first))
    found, state = apart(lambda: part(adapter, folder, None, steps, workers=first))
    for number, count in enumerate(others):
        until = 1 if number < len(others) - 1 else None
        more, state = apart(
            lambda state=state, until=until, count=count: part(adapter, folder, state, until, workers=count)
        )
        found += more
    outcome, detail = compare([value for batch in found for value in batch], expected)
    return None if outcome == "right" else (outcome, f"stopped after {steps} batches, workers {workers}: {detail}")


def resume_every_step(adapter: Adapter, folder: Path) -> Outcome:
    check_state(adapter)
    prepare(adapter, folder)
    for workers, stops in ((0, range(1, 6)), (2, (2, 5))):
        for steps in stops:
            if found := resume_at(adapter, folder, steps, (workers, workers)):
                return found
    return "right", "after each of 5 batches; with 2 workers, after 2 and 5"


def resume_three_times(adapter: Adapter, folder: Path) -> Outcome:
    check_state(adapter)
    prepare(adapter, folder)
    return resume_at(adapter, folder, 1, (0, 2, 1, 2)) or ("right", "workers 0, 2, 1, 2")


def edges(adapter: Adapter, folder: Path) -> Outcome:
    """A state before the first batch, and one after the last; loaded twice."""
    check_state(adapter)
    prepare(adapter, folder)
    expected = numbers_of(whole_epoch(adapter, folder))
    _, state = apart(lambda: part(adapter, folder, None, 0))
    for _ in range(2):
        found, _ = apart(lambda: part(adapter, folder, state, None))
        outcome, detail = compare([value for batch in found for value in batch], expected)
        if outcome != "right":
            return outcome, f"from a state before the first batch: {detail}"
    _, state = apart(lambda: part(adapter, folder, None, 6))
    found, _ = apart(lambda: part(adapter, folder, state, None))
    numbers = sorted(numbers_of([value for batch in found for value in batch]))
    if numbers not in ([], list(ALL)):
        return "silent", f"from a state after the last batch: {numbers}"
    return "right", "before the first batch, after the last one"


def foreign_state(adapter: Adapter, folder: Path) -> Outcome:
    """The state of another seed, and of a dataset of another length."""
    check_state(adapter)
    prepare(adapter, folder)
    more = folder.parent / "more"
    prepare(adapter, more, 20)
    _, state = apart(lambda: part(adapter, folder, None, 3))
    details = []
    for name, options in {"another seed": {"seed": 2}, "20 samples": {"count": 20}}.items():
        where = more if "count" in options else folder
        try:
            found, _ = apart(lambda where=where, options=options: part(adapter, where, state, None, **options))
        except ReadingError as error:
            details.append(f"{name}: {error}")
            continue
        count = sum(len(batch) for batch in found)
        return "silent", f"the state is taken by a loader of {name}, which delivers {count} samples"
    return "error", "; ".join(details)


def not_ahead(adapter: Adapter, folder: Path) -> Outcome:
    """Batches that workers made ahead do not count."""
    check_state(adapter)
    prepare(adapter, folder)
    return resume_at(adapter, folder, 1, (2, 2)) or ("right", "one batch delivered, more made ahead by 2 workers")


def noisy(value: Any) -> Any:
    import torch

    return value + torch.randint(1, 99, ()).item()


def augmentation(adapter: Adapter, folder: Path) -> Outcome:
    """Random numbers as the library says; torch's in a worker otherwise, after torch.manual_seed."""
    import torch

    prepare(adapter, folder)
    options: dict[str, Any] = {"transform": noisy}
    if adapter.package == "grain":
        from grain.python import RandomMapTransform

        class Noisy(RandomMapTransform):
            def random_map(self, value: Any, rng: np.random.Generator) -> Any:
                return value + rng.integers(1, 99)

        options = {"random": Noisy()}

    def epoch(workers: int) -> dict[int, int]:
        torch.manual_seed(7)
        values = flat(adapter.loader(folder, workers=workers, **options))
        return {int(value[0]) // 100: int(value[0]) % 100 for value in values}

    found = [apart(lambda workers=workers: epoch(workers)) for workers in (0, 2)]
    if found[0] == found[1]:
        return "right", "the same noise with 0 and with 2 workers"
    return (
        "silent",
        f"of {N} samples, {sum(found[0][n] != found[1].get(n) for n in found[0])} have other noise with 2 workers",
    )


# -- shapes and resources ----------------------------------------------------------------------------------------------


def large_batch(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder)
    return judge(lambda: flat(adapter.loader(folder, batch_size=100)), ALL)


def lengths(adapter: Adapter, folder: Path) -> Outcome:
    prepare(adapter, folder, 11)
    for drop_last in (False, True):
        for workers in (0, 2):
            options = {"workers": workers, "drop_last": drop_last, "count": 11}

            def count(options: dict[str, Any] = options) -> tuple[int, int]:
                loader = adapter.loader(folder, **options)
                try:
                    length = len(loader)
                except TypeError as error:
                    raise NotOfferedError("the loader has no length") from error
                return length, sum(1 for _ in loader)

            length, iterated = apart(count)
            if length != iterated:
                return (
                    "silent",
                    f"len() is {length}, {iterated} batches come with {workers} workers, drop_last={drop_last}",
                )
    return "right", "for drop_last on and off, 0 and 2 workers"


def left_behind(adapter: Adapter, folder: Path) -> Outcome:
    """An exception in the loop: processes and shared memory after the program has ended."""
    prepare(adapter, folder)
    before = {path.name for path in Path("/dev/shm").iterdir()}
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            for _ in adapter.loader(folder, workers=2):
                raise ValueError("in the loop")
        except ValueError:
            pass
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    outcome, detail = after_the_end(child)
    left = sorted({path.name for path in Path("/dev/shm").iterdir()} - before)
    if outcome == "right" and left:
        return "silent", f"left in /dev/shm: {left[:3]}"
    return outcome, detail


LOADING: dict[int, Any] = {
    36: dying_worker,
    37: raising_transform,
    38: hanging_transform,
    39: unpicklable,
    43: interrupt,
    44: one_order,
    45: resume_every_step,
    46: resume_three_times,
    47: edges,
    48: foreign_state,
    49: not_ahead,
    51: augmentation,
    59: large_batch,
    62: lengths,
    63: left_behind,
}
