"""Tuning: what is tried, what is chosen, the verdict, and what stays unchanged."""

import json
import multiprocessing as mp
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import eventually
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from penstock.core.errors import LoaderError, OptionError
from penstock.feed.loader import Loader
from penstock.files.machine import Machine, this_machine
from penstock.observe import search as tuning_module
from penstock.observe.search import tune
from penstock.observe.tuning import Setting, Trial, Tuning
from penstock.plan.orders import Shuffle
from penstock.plan.plan import Plan
from penstock.recipes.workersafe.datasets import WorkerSafeAugmentedDataset
from penstock.run.options import RunOptions
from penstock.source.array import ArraySource
from penstock.source.dataset import DatasetSource

INLINE, THREADS, PROCESSES = Setting.of("inline"), Setting.of("threads", 2), Setting.of("processes", 2)
HERE = this_machine()


def found(*times: tuple[Setting, float], step: float | None = None, machine: Machine = HERE) -> Tuning:
    trials = tuple(Trial(setting, seconds, 0.1) for setting, seconds in times)
    return Tuning(trials, batch_items=32, batch_bytes=1_000_000, step_seconds=step, machine=machine)


def loader(n_items: int = 64, **options: Any) -> Loader:
    source = ArraySource({"x": np.arange(n_items)})
    return Loader(source, Plan(source.index, Shuffle(), batch_size=4, seed=5, tail="drop"), **options)


class Own(Dataset[Any]):
    """Augments with a generator and a counter of its own."""

    def __init__(self) -> None:
        self.rng, self.reads = np.random.default_rng(3), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return torch.tensor(self.rng.normal() + self.reads), number


def make_counting(kind: str) -> Any:
    """Return a dataset whose items depend on how often they were read."""
    if kind == "own":
        return Own()
    base = [(torch.ones(4, 16), number) for number in range(8)]
    augmented = WorkerSafeAugmentedDataset(base, {"time_mask_param": 9, "p": 1.0}, seed=2)
    inside = {"subset": Subset(augmented, range(8)), "concat": ConcatDataset([augmented, base])}
    return inside.get(kind, augmented)


def loader_of(dataset: Any) -> Loader:
    source = DatasetSource(dataset)
    return Loader(source, Plan(source.index, Shuffle(), batch_size=4))


class TestChoice:
    def test_the_simplest_within_five_percent_of_the_fastest_is_chosen(self) -> None:
        assert found((INLINE, 1.04), (THREADS, 1.0), (PROCESSES, 1.02)).setting == INLINE
        assert found((INLINE, 1.06), (THREADS, 1.0), (PROCESSES, 0.99)).setting == THREADS
        assert found((INLINE, 2.0), (THREADS, 1.9), (PROCESSES, 1.0)).setting == PROCESSES

    def test_fewer_workers_and_fewer_batches_ahead_are_simpler(self) -> None:
        one, two = Setting.of("processes", 1), Setting.of("processes", 2)
        assert found((INLINE, 9.0), (two, 1.0), (one, 1.0)).setting == one
        assert found((INLINE, 9.0), (Setting.of("processes", 2, 4), 1.0), (two, 1.01)).setting == two

    def test_gain_and_wait_are_ratios_of_what_was_measured(self) -> None:
        tuned = found((INLINE, 0.04), (PROCESSES, 0.02), step=0.015)
        assert tuned.gain == 2.0
        assert tuned.wait_fraction == pytest.approx(0.25)
        assert found((INLINE, 0.04)).wait_fraction is None

    def test_arguments_for_both_kinds_of_loader(self) -> None:
        tuned = found((INLINE, 9.0), (Setting.of("processes", 2, 4), 1.0))
        assert tuned.dataloader_kwargs() == {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
        given = RunOptions(timeout_seconds=7)
        assert tuned.loader_kwargs(given) == {
            "num_workers": 2,
            "options": RunOptions(executor="processes", prefetch=4, persistent=True, timeout_seconds=7),
        }
        assert found((INLINE, 1.0)).dataloader_kwargs() == {"num_workers": 0}
        assert found((INLINE, 1.0)).loader_kwargs() == {"num_workers": 0, "options": RunOptions()}
        with pytest.raises(OptionError, match="has worker processes only, got 2 threads"):
            found((INLINE, 9.0), (THREADS, 1.0)).dataloader_kwargs()
        with pytest.raises(OptionError, match=r"must be one that was tried \(no workers\), got 'threads'"):
            found((INLINE, 9.0)).trial("threads")


class TestVerdict:
    def test_it_says_what_is_delivered_what_to_set_and_what_it_gains(self) -> None:
        said = found((INLINE, 0.04), (PROCESSES, 0.02)).verdict
        assert "delivers 50.0 batches/s (1,600 items/s, 50.0 MB/s) with 2 worker processes" in said
        assert "2.00 times as fast as without workers" in said
        assert "shorter than 20 ms will wait for data" in said
        assert "Set num_workers=2" in said

    def test_data_as_the_bottleneck(self) -> None:
        said = found((INLINE, 0.04), step=0.01).verdict
        assert "takes 10 ms, and the training waits 75 % of the time for data: data is the bottleneck" in said

    def test_a_step_that_hides_the_loading(self) -> None:
        said = found((INLINE, 0.04), (THREADS, 0.0101), step=0.01).verdict
        assert "data is not the bottleneck" in said
        assert "executor='threads'" in said

    def test_no_workers(self) -> None:
        assert (
            "Set num_workers=0: the best setting with workers is 0.50 times" in found((INLINE, 1), (THREADS, 2)).verdict
        )


class TestFile:
    def test_what_was_saved_is_loaded(self, tmp_path: Path) -> None:
        tuned = found((INLINE, 0.04), (PROCESSES, 0.02), step=0.01)
        tuned.save(tmp_path / "tuned.json")
        assert Tuning.load(tmp_path / "tuned.json") == tuned
        assert json.loads((tmp_path / "tuned.json").read_text())["verdict"] == tuned.verdict
        assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]

    def test_another_machine_is_refused(self, tmp_path: Path) -> None:
        found((INLINE, 0.04), machine=Machine(HERE.cpus + 3, 1, 1)).save(tmp_path / "tuned.json")
        with pytest.raises(OptionError, match=f"was tuned with {HERE.cpus + 3} CPUs, and this machine has {HERE.cpus}"):
            Tuning.load(tmp_path / "tuned.json")

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 1, "trials": [{}]}', '{"version": 7}'])
    def test_what_is_none_says_so(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tuned.json").write_text(text)
        with pytest.raises(
            OptionError, match=r"Could not read .*tuned\.json as a tuning|tuned\.json must have version 1, got 7"
        ):
            Tuning.load(tmp_path / "tuned.json")
        with pytest.raises(OptionError, match=r"Could not read .*nowhere\.json as a tuning"):
            Tuning.load(tmp_path / "nowhere.json")


class TestTrials:
    def test_a_loader_is_tried_in_every_executor_and_stays_where_it_is(self) -> None:
        subject = loader()
        batches = iter(subject)
        first = next(batches)["x"].tolist()
        state = subject.state_dict()
        tuned = tune(subject, budget=0.2, max_workers=HERE.cpus)
        tried = {(trial.setting.executor, trial.setting.workers) for trial in tuned.trials}
        counts = {1, HERE.cpus} | {2**power for power in range(6) if 2**power <= HERE.cpus}
        assert tried == {("inline", 0)} | {(kind, count) for kind in ("threads", "processes") for count in counts}
        assert all(trial.seconds_per_batch > 0 and trial.startup_seconds > 0 for trial in tuned.trials)
        assert (tuned.batch_items, tuned.batch_bytes) == (4, 32)
        assert subject.state_dict() == state
        rest = [batch["x"].tolist() for batch in batches]
        assert [first, *rest] == [draw.items.tolist() for draw in subject.plan.epoch(0).draws(range(16))]

    def test_a_loader_may_have_workers(self) -> None:
        for executor in ("threads", "processes"):
            with loader(num_workers=1, options=RunOptions(executor=executor)) as subject:
                assert tune(subject, budget=0.1, max_workers=1).batch_items == 4

    def test_nothing_is_left_running(self) -> None:
        before = set(threading.enumerate())
        tune(loader(), budget=0.1)
        tune(TensorDataset(torch.arange(64)), budget=0.1, batch_size=4)
        # Threads that fed a queue of torch's end by themselves, a little later.
        assert eventually(lambda: not mp.active_children() and set(threading.enumerate()) <= before)

    def test_a_dataset_and_a_dataloader_are_tried_with_torchs_workers(self) -> None:
        dataset = TensorDataset(torch.arange(64))
        for subject in (
            dataset,
            DataLoader(dataset, batch_size=16, drop_last=True),
            DataLoader(dataset, batch_size=16, num_workers=1, multiprocessing_context="fork"),
        ):
            tuned = tune(subject, budget=0.1, batch_size=16, max_workers=1)
            assert {trial.setting.executor for trial in tuned.trials} == {"inline", "processes"}
            assert tuned.batch_items == 16

    @pytest.mark.parametrize("kind", ["augmented", "subset", "concat", "own", "loader"])
    def test_a_dataset_stays_as_it_was(self, kind: str) -> None:
        tuned, fresh = make_counting(kind), make_counting(kind)
        tune(loader_of(tuned) if kind == "loader" else tuned, budget=0.1, batch_size=4, max_workers=1)
        for _ in range(2):  # two epochs
            assert all(torch.equal(tuned[number][0], fresh[number][0]) for number in range(8))

    def test_large_arrays_are_not_copied(self) -> None:
        base = TensorDataset(torch.zeros(1 << 18), torch.from_numpy(np.zeros(1 << 18)))
        copied = tuning_module._copy_for_trials(base)
        assert [each.data_ptr() for each in copied.tensors] == [each.data_ptr() for each in base.tensors]

    def test_a_dataset_that_cannot_be_copied_is_refused(self) -> None:
        dataset = Own()
        dataset.reads = threading.Lock()  # type: ignore[assignment]
        with pytest.raises(OptionError, match=r"what must be picklable: .*lock.*in __getitem__, not in __init__"):
            tune(dataset, budget=0.1)

    def test_the_step_is_called_with_every_batch_and_measured_alone(self) -> None:
        seen: list[int] = []
        tuned = tune(
            TensorDataset(torch.arange(64)),
            budget=0.1,
            batch_size=8,
            max_workers=0,
            step=lambda batch: seen.append(len(batch[0])),
        )
        assert set(seen) == {8}
        assert tuned.step_seconds is not None
        assert 0 < tuned.step_seconds <= tuned.chosen.seconds_per_batch

    def test_settings_that_do_not_fit_are_not_tried_and_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The machine's own figures are the input here; a small one cannot be had otherwise.
        small = Machine(cpus=4, memory_bytes=1 << 40, shared_bytes=6 * 32 * 2 * 2)
        monkeypatch.setattr(tuning_module, "this_machine", lambda: small)
        settings, remarks = tuning_module._choose_settings(
            tuning_module._make_subject(TensorDataset(torch.arange(64)), 4), small, batch_bytes=32, max_workers=None
        )
        assert [setting.workers for setting in settings] == [0, 1, 2, 4]
        tight = Machine(cpus=4, memory_bytes=1 << 40, shared_bytes=2 * 6 * 32)
        settings, remarks = tuning_module._choose_settings(
            tuning_module._make_subject(TensorDataset(torch.arange(64)), 4), tight, batch_bytes=32, max_workers=None
        )
        assert [setting.workers for setting in settings] == [0, 1, 2]
        assert len(remarks) == 1
        assert "4 worker processes" in remarks[0]
        assert "shared memory" in remarks[0]

    def test_more_workers_than_cpus_are_not_tried_if_workers_are_slower_than_none(self) -> None:
        tuned = tune(TensorDataset(torch.arange(64)), budget=0.05, batch_size=4, max_workers=HERE.cpus + 1)
        assert max(trial.setting.workers for trial in tuned.trials) == HERE.cpus
        assert tuned.remarks == ()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (3, {}, "must be a Loader, a torch DataLoader or a map-style dataset, got int"),
        (DataLoader(Stream()), {}, "got one with an iterable dataset"),
        ([1], {"budget": 0}, "budget must be > 0 seconds, such as 20, got 0"),
        ([1], {"step": print, "step_seconds": 1.0}, "At most one of step and step_seconds"),
        ([1], {"step_seconds": -1.0}, "step_seconds"),
        ([1], {"max_workers": -1}, "max_workers"),
        ([1], {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_is_refused(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tune(what, **options)


def test_what_has_no_batches_is_refused() -> None:
    with pytest.raises(LoaderError, match="at least one batch, got none"):
        tune(loader(3))


def test_what_was_not_tried_is_not_judged() -> None:
    cpus = HERE.cpus
    at_cpus, above = Setting.of("processes", cpus), Setting.of("processes", 2 * cpus)
    assert "add CPUs" not in found((INLINE, 3.0), (at_cpus, 1.0), step=0.1).verdict
    assert f"try more workers (max_workers={2 * cpus})" in found((INLINE, 3.0), (at_cpus, 1.0), step=0.1).verdict
    assert "or add CPUs" in found((INLINE, 3.0), (at_cpus, 1.0), (above, 1.0), step=0.1).verdict


def test_a_tuning_prints_as_the_table_of_the_command() -> None:
    lines = str(found((INLINE, 0.002), (PROCESSES, 0.001))).splitlines()
    assert lines[0] == "no workers                                    2.000 ms per batch,   0.10 s to start"
    assert lines[1] == "2 worker processes, 2 batches ahead each      1.000 ms per batch,   0.10 s to start  <"
    assert lines[2] == ""
    assert lines[3].startswith("The loader delivers 1,000.0 batches/s")
