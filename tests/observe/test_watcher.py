"""A watch measures exactly, by a clock that the test moves, and changes nothing."""

import gc
import io
import itertools
import json
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import FakeClock
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import penstock.observe.watcher as watching
from penstock import ArraySource, Loader, LoaderError, OptionError, Plan, Shuffle
from penstock.observe.watcher import Watch, watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(watching, "time", fake)
    return fake


class Slow:
    """A loader whose n-th batch of an epoch takes the given seconds, as do its start and its end."""

    def __init__(self, clock: FakeClock, waits: list[float], *, start: float = 0.0, end: float = 0.0) -> None:
        self.clock, self.waits, self.start, self.end = clock, waits, start, end

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.clock.now += self.start  # when it is made, as a DataLoader starts its workers
        return self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        for number, seconds in enumerate(self.waits):
            self.clock.now += seconds
            yield torch.full((4, 2), number)
        self.clock.now += self.end


def quiet(loader: Any, **options: Any) -> Watch[Any]:
    return watch(loader, show=False, **options)


def test_every_figure_is_that_of_a_naive_list(clock: FakeClock) -> None:
    rng = np.random.default_rng(5)
    waits, steps = rng.lognormal(-3, 1, 50).tolist(), rng.lognormal(-2, 1, (3, 50))
    with quiet(Slow(clock, waits, start=2.0, end=0.5), warmup=5) as w:
        for epoch in range(3):
            for batch, step in zip(w, steps[epoch], strict=False):
                assert batch.shape == (4, 2)
                clock.now += float(step)
    found = w.to_dict()
    steady = [
        (wait, steps[epoch][n]) for epoch in range(3) for n, wait in enumerate(waits) if n and epoch * 50 + n >= 5
    ]
    wait, step = np.array(steady).T
    whole = 3 * (2.5 + sum(waits)) + steps.sum()
    expected = {
        "batches": 150, "epochs": 3, "items": 600, "bytes": 150 * 8 * 8, "warmup_batches": 5, "steady_batches": 143,
        "elapsed_seconds": whole, "steady_seconds": wait.sum() + step.sum(),
        "wait_fraction": wait.sum() / (wait.sum() + step.sum()),
        "batches_per_second": 143 / (wait.sum() + step.sum()),
        "items_per_second": 572 / (wait.sum() + step.sum()),
        "bytes_per_second": 143 * 64 / (wait.sum() + step.sum()),
        "wait_mean_ms": 1000 * wait.mean(), "wait_std_ms": 1000 * wait.std(), "wait_max_ms": 1000 * wait.max(),
        "step_mean_ms": 1000 * step.mean(), "step_std_ms": 1000 * step.std(), "step_max_ms": 1000 * step.max(),
        "startup_ms": 1000 * (2 + waits[0]), "startup_max_ms": 1000 * (2 + waits[0]), "shutdown_ms": 500.0,
        "startup_fraction": 3 * (2.5 + waits[0]) / whole,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    for name, values in (("wait", wait), ("step", step)):
        for share in (50, 95):
            exact = 1000 * np.quantile(values, share / 100, method="inverted_cdf")
            assert found[f"{name}_p{share}_ms"] == pytest.approx(exact, rel=0.01)
    assert json.loads(json.dumps(found)) == found


def test_a_reader_that_sleeps_80_ms_per_batch_is_reported_as_80_ms() -> None:
    slept, waited = [], []  # milliseconds: what was slept, and what its consumer saw; a busy machine adds to both

    def slow() -> Iterator[int]:
        for number in range(6):
            begin = time.perf_counter()
            time.sleep(0.08)
            slept.append(1000 * (time.perf_counter() - begin))
            yield number

    with quiet(slow(), warmup=1) as w:
        first, batches = time.perf_counter(), iter(w)
        for number in range(6):
            begin = time.perf_counter()
            assert next(batches) == number
            waited.append(1000 * (time.perf_counter() - begin))
        assert next(batches, None) is None
        whole = 1000 * (time.perf_counter() - first)
    found = w.to_dict()
    assert slept[0] <= found["startup_ms"] <= waited[0]
    assert np.mean(slept[1:]) <= found["wait_mean_ms"] <= np.mean(waited[1:])
    assert max(slept[1:]) <= found["wait_max_ms"] <= max(waited[1:])
    for name in ("wait_p50_ms", "wait_p95_ms"):
        assert 0.99 * min(slept[1:]) <= found[name] <= 1.01 * max(waited[1:])
    assert sum(slept[1:]) / whole <= found["wait_fraction"] <= 1


def test_a_batch_without_a_finished_step_counts_only_as_waiting(clock: FakeClock) -> None:
    with quiet(Slow(clock, [1.0, 2.0, 4.0, 8.0]), warmup=0) as w:
        for batch in w:
            clock.now += 1.0
            if batch[0, 0] == 2:
                break
    found = w.to_dict()
    assert (found["batches"], found["steady_batches"]) == (3, 1)
    assert found["wait_mean_ms"] == pytest.approx(3000)
    assert found["wait_fraction"] == pytest.approx(2 / 3)
    assert found["shutdown_ms"] is None


def loaders() -> dict[str, Callable[[], Any]]:
    data = torch.arange(24).reshape(12, 2)
    source = ArraySource({"x": np.arange(12)})

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(data)

    return {
        "list": lambda: [3, 1, 2],
        "DataLoader": lambda: DataLoader(TensorDataset(data), batch_size=5),
        "stream": lambda: DataLoader(Stream(), batch_size=5),
        "Loader": lambda: Loader(source, Plan(source.index, Shuffle(), batch_size=4, seed=3)),
    }


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [part.tolist() for part in batch] if isinstance(batch, list) else getattr(batch, "tolist", lambda: batch)()


@pytest.mark.parametrize("kind", loaders())
def test_batches_pass_through_for_several_epochs_of_anything_iterable(kind: str) -> None:
    make = loaders()[kind]
    bare, watched = make(), make()
    expected = [[plain(batch) for batch in bare] for _ in range(3)]
    with quiet(watched) as w:
        assert w.loader is watched
        assert [[plain(batch) for batch in w] for _ in range(3)] == expected
        if kind == "stream":
            with pytest.raises(TypeError):
                len(w)
        else:
            assert len(w) == len(expected[0])
    assert w.to_dict()["epochs"] == 3
    assert w.to_dict()["batches"] == sum(len(epoch) for epoch in expected)


def test_a_penstock_loader_has_the_same_state_as_without_a_watch() -> None:
    loader = loaders()["Loader"]()
    with quiet(loader) as w:
        next(iter(w))
        assert loader.state_dict()["batch"] == 1


def test_batches_are_the_same_objects_and_nothing_is_read_ahead() -> None:
    given = [object() for _ in range(5)]
    source = iter(given)
    with quiet(source) as w:
        batches = iter(w)
        for number in range(3):
            assert next(batches) is given[number]
        assert next(source) is given[3]  # it was not taken
        assert list(batches) == given[4:]
        assert list(batches) == []  # the end stays the end
        assert list(w) == []  # as a generator that was used up
    assert w.to_dict()["batches"] == 4
    assert w.to_dict()["epochs"] == 1


def test_a_batch_is_released_when_the_training_drops_it() -> None:
    class Batch:
        pass

    with quiet(Batch() for _ in range(2)) as w:
        batches = iter(w)
        batch = next(batches)
        seen = weakref.ref(batch)
        del batch
        assert seen() is None


def test_leaving_an_epoch_releases_the_iterator_of_the_loader_at_once() -> None:
    ended: list[bool] = []

    class Endless:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                ended.append(True)

    with quiet(Endless()) as w:
        for batch in w:
            if batch == 3:
                break
        assert ended == [True]


def test_iterating_outside_the_with_block_raises_an_error_with_the_cure() -> None:
    w = quiet([1, 2])
    with pytest.raises(LoaderError, match=r"with penstock\.watch\(loader\) as w"):
        iter(w)
    with w:
        left = iter(w)
        assert next(left) == 1
    for late in (lambda: iter(w), lambda: next(left)):
        with pytest.raises(LoaderError, match="is over"):
            late()
    with pytest.raises(LoaderError, match="only once"), w:
        pass


def test_a_second_iteration_ends_the_first() -> None:
    with quiet([1, 2, 3]) as w:
        first, second = iter(w), None
        assert next(first) == 1
        second = iter(w)
        assert next(second) == 1
        with pytest.raises(LoaderError, match="Another iteration"):
            next(first)
        assert next(second) == 2


def test_an_error_of_the_training_passes_and_the_summary_is_printed() -> None:
    out, error = io.StringIO(), RuntimeError("loss is NaN")

    def train() -> None:
        with watch([1, 2, 3], out=out) as w:
            for batch in w:
                if batch == 2:
                    raise error

    with pytest.raises(RuntimeError) as caught:
        train()
    assert caught.value is error
    assert out.getvalue().startswith("Watched: 2 batches in 1 epoch")


def test_an_error_of_the_loader_passes_and_the_loop_may_continue(clock: FakeClock) -> None:
    class Faulty:
        """Fails at its second batch, and continues afterwards."""

        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> "Faulty":
            return self

        def __next__(self) -> int:
            self.number += 1
            clock.now += 1.0
            if self.number == 2:
                raise error
            return self.number

    error = OSError("disk")
    with quiet(Faulty(), warmup=0) as w:
        batches = iter(w)
        assert next(batches) == 1
        with pytest.raises(OSError, match="disk") as caught:
            next(batches)
        assert caught.value is error
        assert next(batches) == 3
    found = w.to_dict()
    assert (found["batches"], found["wait_mean_ms"]) == (2, pytest.approx(1000))


@pytest.mark.parametrize(
    ("batch", "items", "nbytes"),
    [
        (torch.zeros(7, 3), 7, 84),
        (np.zeros((5, 2), np.int16), 5, 20),
        ([torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64)], 6, 96),
        ({"name": ["a", "b"], "scale": torch.tensor(2.0), "x": {"y": (np.zeros((3, 1)),)}}, 3, 28),
        ((torch.zeros(0, 3), torch.zeros(2)), 2, 8),
        (["a", "b"], None, 0),
        (17, None, 0),
        ([0] * 5000 + [torch.zeros(4)], None, 0),
        ([torch.eye(3).to_sparse(), torch.zeros(3, 2)], 3, 24),
    ],
)
def test_items_are_the_first_axis_of_the_first_array_and_bytes_are_of_all(
    batch: Any, items: int | None, nbytes: int
) -> None:
    with quiet([batch]) as w:
        list(w)
    assert (w.to_dict()["items"], w.to_dict()["bytes"]) == (items, nbytes)


def test_too_few_batches_give_no_figures_and_say_so() -> None:
    with quiet([1, 2, 3], warmup=3) as w:
        list(w)
    found = w.to_dict()
    for name in ("wait_p50_ms", "wait_max_ms", "step_mean_ms", "wait_fraction", "batches_per_second", "data_bound"):
        assert found[name] is None
    assert "Too few batches" in found["advice"][0]
    with quiet([]) as w:
        assert list(w) == []
    assert w.to_dict()["startup_ms"] is None
    assert "0 batches" in str(w)
    assert repr(w) == str(w), "a notebook shows it"


def test_figures_are_available_at_any_time_and_final_after_the_with_block(clock: FakeClock) -> None:
    w = quiet(Slow(clock, [1.0] * 5), warmup=0)
    assert (w.to_dict()["batches"], str(w.last_wait_seconds)) == (0, "nan")
    with w:
        batches = iter(w)
        next(batches)
        next(batches)
        assert (w.to_dict()["batches"], w.last_wait_seconds) == (2, 1.0)
    over = w.to_dict()
    clock.now += 100
    assert w.to_dict() == over


def test_memory_is_sampled_twice_a_second_and_its_slope_is_the_steady_states(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def resident() -> int:
        # A leap while it warms up, then 2 MB per second.
        asked.append(clock.now)
        return int(1e9 + (0 if clock.now < 1010 else 5e8 + 2e6 * (clock.now - 1010)))

    monkeypatch.setattr(watching, "resident_bytes", resident)
    with quiet(Slow(clock, [0.1] * 400), warmup=100) as w:
        list(w)
    found = w.to_dict()
    assert found["resident_slope_mb_per_minute"] == pytest.approx(120, rel=0.01)
    assert found["resident_late_slope_mb_per_minute"] == pytest.approx(120, rel=0.01)
    assert found["resident_peak_bytes"] == found["resident_bytes"] == pytest.approx(1.56e9)
    assert np.diff(asked[:-1]).min() >= 0.5
    assert len(asked) == pytest.approx(80, abs=15)


def test_unknown_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "resident_bytes", lambda: 0)
    with quiet([1, 2, 3]) as w:
        list(w)
    assert w.to_dict()["resident_peak_bytes"] is None
    assert "Memory" not in str(w)


def test_a_run_of_many_batches_takes_no_more_memory(clock: FakeClock) -> None:
    def batches() -> Iterator[None]:
        for number in range(12_000):
            clock.now += 0.001 * (number % 13)
            yield None

    with quiet(batches()) as w:
        stream = iter(w)
        for _ in itertools.islice(stream, 6000):
            pass
        tracemalloc.start()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in stream:
            pass
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert w.to_dict()["batches"] == 12_000
    assert grown < 20_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": -1}, "warmup must be an integer >= 0, got -1"),
        ({"warmup": 1.5}, r"warmup must be an integer >= 0, got 1\.5"),
        ({"log_every_seconds": True}, "log_every_seconds must be .* got True"),
        ({"show": "yes"}, "show must be .* got 'yes'"),
        ({"log": 3}, "log must be a function .* got 3"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        watch([1], **options)
    with pytest.raises(OptionError, match="got int"):
        watch(3)  # type: ignore[type-var]
