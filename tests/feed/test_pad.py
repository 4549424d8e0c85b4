"""Pad: batches of items of different lengths, padded, cut and packed, out of every executor."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    Bucketed,
    DatasetSource,
    Loader,
    OptionError,
    Packed,
    Pad,
    Plan,
    RunOptions,
    Shuffle,
    TokenBudget,
    World,
    create_shards_from_arrays,
)
from penstock.plan.lengths.near import Budget
from penstock.plan.lengths.packed import Packing
from penstock.source.tar.source import TarSource

LENGTHS = np.random.default_rng(5).integers(0, 12, 40)
EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork")),
}


class Sentences:
    """Item i has tokens 100 i, 100 i + 1, …; a vector for each of them; and the label i."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, item: int) -> dict[str, Any]:
        tokens = 100 * item + np.arange(LENGTHS[item])
        return {"tokens": tokens, "vectors": np.stack([tokens, -tokens], axis=1).astype(np.float32), "label": item}


SOURCE = DatasetSource(Sentences())
PLANS: dict[str, Any] = {
    "bucketed": Bucketed(SOURCE.index, LENGTHS, 6, 3),
    "budget": TokenBudget(SOURCE.index, LENGTHS, 32, 7, 3, pad_to_multiple_of=4),
    "truncated": TokenBudget(SOURCE.index, LENGTHS, 9, 7, 3, too_long="truncate", tail="pad"),
    "packed": Packed(SOURCE.index, LENGTHS, 16, 3, 3, tail="pad"),
    "split": Packed(SOURCE.index, LENGTHS, 7, 3, 3, split=True),
}


def make_loader(plan: Any, executor: str = "inline", rank: int = 0, ranks: int = 1) -> Loader:
    workers, options = EXECUTORS[executor]
    collate = Pad("tokens", "vectors", value=-1, values={"vectors": 0.5})
    return Loader(SOURCE, plan, collate=collate, num_workers=workers, options=options, world=World(rank, ranks))


def to_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


@pytest.mark.parametrize("name", PLANS)
def test_every_token_is_where_lengths_mask_segments_and_positions_say(name: str) -> None:
    plan = PLANS[name]
    with make_loader(plan) as loader:
        batches = list(loader)
    assert len(batches) == len(loader) == plan.n_batches
    seen = []
    for batch in batches:
        mask, lengths = batch["mask"], batch["lengths"]
        assert batch["tokens"].shape == mask.shape == batch["vectors"].shape[:2]
        assert (batch["tokens"][~mask] == -1).all() or plan.tail == "pad"
        assert (batch["vectors"][..., 0][mask] == batch["tokens"][mask]).all()
        padded = [row for row in range(len(mask)) if not mask[row].any()]
        assert [n for row, n in enumerate(lengths.tolist()) if row not in padded] == [
            n for row, n in enumerate(mask.sum(1).tolist()) if row not in padded
        ]
        seen += batch["tokens"][mask].tolist()
        if isinstance(plan.batch_size, Packing):
            assert mask.shape[1] == plan.batch_size.length
            check_segments(batch)
        elif isinstance(plan.batch_size, Budget):
            assert mask.numel() <= plan.batch_size.max_tokens
            assert mask.shape[1] % plan.batch_size.pad_to_multiple_of == 0
    cut = 9 if name == "truncated" else 99
    assert sorted(seen) == [100 * item + n for item in range(40) for n in range(min(LENGTHS[item], cut))]


def check_segments(batch: dict[str, Any]) -> None:
    """Check that a segment is one item, or a piece of it, whose tokens are numbered from 0 on; rows name the labels."""
    segment = 0
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["rows"].tolist().count(row) + 1):
            inside = batch["segments"][row] == number
            tokens = batch["tokens"][row][inside]
            assert batch["positions"][row][inside].tolist() == list(range(len(tokens)))
            assert (tokens.diff() == 1).all()
            assert set((tokens // 100).tolist()) <= {batch["label"][segment].item()}
            assert batch["rows"][segment] == row
            segment += 1
        assert (batch["segments"][row] > 0).sum() == batch["lengths"][row]
        assert (batch["positions"][row][batch["segments"][row] == 0] == 0).all()
    assert segment == len(batch["label"])


@pytest.mark.parametrize("name", PLANS)
def test_batches_are_the_same_out_of_every_executor_and_after_every_resume(name: str) -> None:
    plan = PLANS[name]
    with make_loader(plan) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(to_lists(batch))
            states.append(loader.state_dict())
    # Starting processes takes long, and what they are sent is the same for all plans.
    for executor in ("threads", "processes") if name in ("budget", "split") else ("threads",):
        with make_loader(plan, executor) as other:
            assert [to_lists(batch) for batch in other] == whole
    executors = ["inline", "threads"]
    for step, state in enumerate(states[:-1]):
        with make_loader(plan, executors[step % 2]) as resumed:
            resumed.load_state_dict(state)
            assert [to_lists(batch) for batch in resumed] == whole[step + 1 :]


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_resume_with_equal_steps_where_one_stopped(name: str) -> None:
    plan = PLANS[name]
    with make_loader(plan) as loader:
        batches = iter(loader)
        done = [next(batches) for _ in range(3)]
        state = loader.state_dict()
    ranks = [make_loader(plan, rank=rank, ranks=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    rest = [list(rank) for rank in ranks]
    assert len(rest[0]) == len(rest[1])
    tokens = sorted(token for batch in [*done, *rest[0], *rest[1]] for token in batch["tokens"][batch["mask"]].tolist())
    cut = 9 if name == "truncated" else 99
    assert tokens == [100 * item + n for item in range(40) for n in range(min(LENGTHS[item], cut))]


def test_fields_of_other_lengths_are_padded_by_another_pad() -> None:
    items = [{"text": [1, 2], "sound": torch.ones(3, 2), "id": 7}, {"text": [3], "sound": torch.ones(1, 2), "id": 8}]
    pad = Pad("sound", pad_to_multiple_of=4, rest=Pad("text", names=("n_text", "is_text"), value=9))
    batch = pad(items)
    assert list(batch) == ["sound", "text", "id", "n_text", "is_text", "lengths", "mask"]
    assert batch["sound"].shape == (2, 4, 2)
    assert batch["sound"].sum().item() == 8
    assert batch["text"].tolist() == [[1, 2], [3, 9]]
    assert batch["lengths"].tolist() == [3, 1]
    assert batch["is_text"].tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("pad", "items", "message"),
    [
        (Pad("x"), [{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}], r"\(2, 3\) and .* \(2, 4\) in item 1"),
        (Pad("x"), [{"x": np.ones(2)}, {"x": np.ones(2, int)}], "got float64 of shape .* and int64 .* in item 1"),
        (Pad("x"), [{"x": 3}], "at least one axis to be padded, got a single value in item 0"),
        (Pad("x", "y"), [{"x": [1], "y": [1, 2]}], "the same length, got 1 for 'x' and 2 for 'y' in item 0"),
        (Pad("x"), [{"y": [1]}], "Pad needs field 'x', but item 0 of the batch has 'y'"),
        (Pad("x"), [(1, 2)], "Pad needs field 'x', but item 0 of the batch has tuple"),
        (Pad("x", value=-1), [{"x": np.ones(2, np.uint8)}], "'x' of uint8 cannot be padded with -1"),
        (Pad("x", value=0.5), [{"x": [1]}], "'x' of int64 cannot be padded with 0.5, which is not one of its values"),
        (Pad("x"), [{"x": ["a"]}], "'x' of <U1 cannot be padded with 0"),
        (Pad("x"), [{"x": [1], "mask": 1}], "adds 'lengths', 'mask' to each batch, but it already has 'mask'"),
    ],
)  # fmt: skip
def test_items_that_cannot_be_padded_are_named(pad: Pad, items: list[Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pad(items)


def test_a_plan_that_cuts_or_packs_needs_pad_and_lengths_that_hold() -> None:
    plan = Packed(SOURCE.index, LENGTHS, 16, 2)
    with pytest.raises(OptionError, match=r"This plan cuts or packs items when they are collated: collate must be Pad"):
        Loader(SOURCE, plan)
    with pytest.raises(OptionError, match=r"Packed rows have one length: leave out pad_to_multiple_of"):
        Loader(SOURCE, plan, collate=Pad("tokens", pad_to_multiple_of=8)).at(0, 0)
    short = np.maximum(LENGTHS - 1, 0)
    budget = TokenBudget(SOURCE.index, short, 32)
    with pytest.raises(OptionError, match=r"lengths that the plan was made with, got (\d+) instead of \d+ in item \d+"):
        list(Loader(SOURCE, budget, collate=Pad("tokens", "vectors")))
    with pytest.raises(OptionError, match=r"TokenBudget\(pad_to_multiple_of=8\)"):
        Loader(SOURCE, PLANS["budget"], collate=Pad("tokens", "vectors", pad_to_multiple_of=8)).at(0, 0)
    wrongs: list[tuple[Any, str]] = [(Pad, "names of the fields"), (lambda: Pad("x", values={"y": 1}), "got 'y'")]
    for wrong, message in wrongs:
        with pytest.raises(OptionError, match=message):
            wrong()


def test_items_that_are_dropped_are_counted_in_the_log(caplog: Any) -> None:
    with Loader(SOURCE, TokenBudget(SOURCE.index, LENGTHS, 9, too_long="drop"), collate=Pad("tokens", "vectors")):
        n_long = int((LENGTHS > 9).sum())
    assert f"{n_long} of 40 items are left out, because they are too long for the plan" in caplog.text


def test_an_ordinary_plan_and_varying_fields_of_shards_are_padded(tmp_path: Any) -> None:
    tokens = [np.arange(n, dtype=np.int32) + 100 * item for item, n in enumerate([3, 1, 4])]
    create_shards_from_arrays(tmp_path, {"tokens": tokens, "id": np.arange(3)}, shard_size=2)
    source = TarSource(tmp_path, fields=["tokens", "id"])
    with Loader(source, Plan(source.index, Shuffle(), 3, seed=1, tail="pad"), collate=Pad("tokens")) as loader:
        (batch,) = loader
    assert [row[: tokens[item].size] for row, item in zip(batch["tokens"].tolist(), batch["id"], strict=True)] == [
        tokens[item].tolist() for item in batch["id"]
    ]
    assert batch["tokens"].dtype == torch.int32
    assert batch["mask"].sum().item() == 8
