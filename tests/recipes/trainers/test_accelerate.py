"""Accelerate: the order is the loader's, and a run resumes from every `save_state` to the same weights."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from penstock_test_parts import run_side_by_side, to_plain
from torch.utils.data import DataLoader, TensorDataset

from penstock.core.errors import LoaderError, ResumeError
from penstock.feed.loader import Loader
from penstock.plan.orders import Shuffle
from penstock.plan.plan import Plan, Segments
from penstock.plan.world import World
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.recipes.trainers.accelerate import prepare_loader
from penstock.source.array import ArraySource

BATCHES = 9  # three chunks


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def chunked(seed: int = 42) -> ChunkedDataLoader:
    return ChunkedDataLoader(TensorDataset(torch.arange(14)), 2, 3, seed=seed)


def native(length: int | None = 3) -> Loader:
    source = ArraySource({"x": np.arange(14)})
    plan = Plan(source.index, Shuffle(), batch_size=2, seed=5)
    return Loader(source, plan if length is None else Segments(plan, length))


class Run:
    """A training loop, and a record of what it saw."""

    def __init__(self, loader: Any, accumulate: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(layer.weight, 0.5)
        torch.nn.init.constant_(layer.bias, 0.1)
        self.layer, self.optimizer = self.accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1, 0.9))
        self.feed = prepare_loader(self.accelerator, loader)
        self.seen: list[list[int]] = []
        self.steps: list[bool] = []

    def train(self, batches: int, folder: Path | None = None) -> None:
        left = batches
        while left > 0:
            for batch in self.feed:
                self._step(batch["x"] if isinstance(batch, dict) else batch[0])
                left -= 1
                if folder is not None:
                    self.accelerator.save_state(folder / str(len(self.seen)))
            if folder is not None:  # at the end of an epoch
                self.accelerator.save_state(folder / f"{len(self.seen)} ended")

    def _step(self, items: torch.Tensor) -> None:
        self.seen.append(items.tolist())
        with self.accelerator.accumulate(self.layer):
            loss = ((self.layer(items.float()[:, None] / 100) - 1) ** 2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps.append(self.accelerator.sync_gradients)

    def weights(self) -> list[float]:
        return [parameter.item() for parameter in self.layer.parameters()]


@pytest.mark.parametrize("make", [chunked, native, lambda: native(None)])
def test_batches_are_those_of_the_loader_and_a_run_goes_on_from_each(make: Any, tmp_path: Path) -> None:
    loader = make()
    expected: list[list[int]] = []
    while len(expected) < BATCHES:
        expected += [(batch["x"] if isinstance(batch, dict) else batch[0]).tolist() for batch in loader]
    whole = Run(make())
    whole.train(BATCHES, tmp_path)
    assert whole.seen == expected
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert sum(name.endswith("ended") for name in saved) > 1
    for name in saved:
        done, rest = int(name.split()[0]), Run(make())
        rest.accelerator.load_state(tmp_path / name)
        rest.train(len(expected) - done)
        assert rest.seen == expected[done:], name
        assert rest.weights() == whole.weights(), name


def test_accumulated_gradients_are_used_up_at_the_end_of_a_chunk_and_go_on_from_steps(tmp_path: Path) -> None:
    whole = Run(chunked(), accumulate=2)
    whole.train(BATCHES, tmp_path)
    assert whole.steps == [False, True, True] * 3
    for done in (2, 3, 5, 6, 8):
        rest = Run(chunked(), accumulate=2)
        rest.accelerator.load_state(tmp_path / str(done))
        rest.train(BATCHES - done)
        assert (rest.seen, rest.steps) == (whole.seen[done:], whole.steps[done:])
        assert rest.weights() == whole.weights()


def test_validation_within_training_has_a_place_of_its_own(tmp_path: Path) -> None:
    run = Run(chunked(), accumulate=2)
    data = TensorDataset(torch.arange(100, 107))
    val = prepare_loader(run.accelerator, ChunkedDataLoader(data, 2, 3, shuffle=False))
    checked = []
    for batch in run.feed:
        checked.append([(items.tolist(), run.accelerator.gradient_state.end_of_dataloader) for (items,) in val])
        run._step(batch[0])
    first = [([100, 101], False), ([102, 103], False), ([104, 105], True)]
    assert checked == [first, [([106], True)], first]
    assert run.steps == [False, True, True]
    assert len(val) == 1  # the short chunk is next
    run.accelerator.save_state(tmp_path / "state")
    other = Run(chunked(), accumulate=2)
    again = prepare_loader(other.accelerator, ChunkedDataLoader(data, 2, 3, shuffle=False))
    other.accelerator.load_state(tmp_path / "state")
    assert [items.tolist() for (items,) in again] == [[106]]
    assert other.feed.describe() == "pass 1, chunk 2/3, batch 0"


def test_a_loop_that_was_broken_off_goes_on_and_leaves_accelerate_outside_of_a_loader() -> None:
    run = Run(chunked())
    for _ in run.feed:
        break
    assert not run.accelerator.gradient_state.in_dataloader
    seen = [batch[0].tolist() for batch in run.feed]
    assert seen == [items.tolist() for items in torch.tensor(chunked().chunked.get_chunk_indices(0)).split(2)][1:]


@pytest.mark.parametrize("make", [native, lambda: CellMapDataLoader(TensorDataset(torch.arange(14)), batch_size=2)])
def test_a_loader_that_accelerate_does_not_save_says_so(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in range(2):  # once for each loader, and not for each epoch
        prepared = accelerator.prepare(make())
        assert len(list(prepared)) == len(list(prepared)) > 0
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "A loader begins at its first epoch while an Accelerator is in use"
    ] * 2
    assert "prepare_loader(accelerator, loader), or accelerator.register_for_checkpointing(loader)" in caplog.text
    caplog.clear()
    loader = make()
    accelerator.register_for_checkpointing(loader)
    list(loader)
    accelerator.save_state(tmp_path / "state")
    second = [to_plain(batch) for batch in loader]
    caplog.clear()
    accelerator.load_state(tmp_path / "state")
    assert [to_plain(batch) for batch in loader] == second
    Run(native()).train(BATCHES)
    assert not caplog.messages


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    run = Run(chunked())
    data = TensorDataset(torch.arange(4))
    for loader in (DataLoader(data), ChunkedDataLoader(data, 2)):
        with pytest.raises(LoaderError, match=f"got {type(loader).__name__}, which has no position to save"):
            prepare_loader(run.accelerator, loader)
    with pytest.raises(LoaderError, match="must deal to the 1 ranks of the trainer, got 2"):
        prepare_loader(run.accelerator, ChunkedDataLoader(data, 2, 2, world=World(0, 2)))
    prepared = run.accelerator.prepare(chunked())
    with pytest.raises(
        LoaderError, match=r"call prepare_loader\(accelerator, loader\) in place of accelerator\.prepare"
    ):
        next(iter(prepared))
    with pytest.raises(LoaderError, match=r"must be an accelerate\.Accelerator, got ChunkedDataLoader"):
        prepare_loader(chunked(), run.accelerator)  # type: ignore[arg-type]
    run.accelerator.save_state(tmp_path / "state")
    other = Run(chunked(seed=7))
    with pytest.raises(ResumeError, match="the seed changed from 42 to 7"):
        other.accelerator.load_state(tmp_path / "state")


ENDED: list[Any] = []  # a model of several ranks waits for the others when it is deleted; it goes with its process


def rank(number: int, folder: Path) -> dict[str, Any]:
    """Train three chunks as one of two ranks, then the last two of them again from where the first had half of them."""
    # The address is asked for, and not used: the ranks have met over a file.
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=number, world_size=2, timeout=timedelta(seconds=300)
    )
    run = Run(ChunkedDataLoader(TensorDataset(torch.arange(14)), 2, 4))
    for _ in range(3):
        for batch in run.feed:
            run._step(batch[0])
            if len(run.seen) == 3:
                run.accelerator.save_state(folder / "state")
    found = {"world": run.accelerator.num_processes, "whole": [list(run.seen), run.weights()]}
    run.accelerator.load_state(folder / "state")
    run.seen.clear()
    for _ in range(2):
        for batch in run.feed:
            run._step(batch[0])
    found["rest"] = [run.seen, run.weights()]
    ENDED.append(run)
    return found


def test_two_ranks_share_every_chunk_and_go_on_together(tmp_path: Path) -> None:
    ranks = run_side_by_side((rank, 0, tmp_path), (rank, 1, tmp_path))
    chunks = [ChunkedDataLoader(list(range(14)), 2, 4).chunked.get_chunk_indices(chunk) for chunk in range(3)]
    for number, found in enumerate(ranks):
        assert found["world"] == 2
        seen, weights = found["whole"]
        assert seen == [items[at : at + 2] for items in chunks for at in (2 * number, 4 + 2 * number)]
        assert found["rest"] == [seen[3:], weights]
    assert ranks[0]["whole"][1] == ranks[1]["whole"][1]
