"""Damaged shards under WebDataset loaders: an error by name, or the same substitute for every reader."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
from penstock_test_parts import positions, to_plain
from penstock_test_shards import OURS, flip_member, ours, xs

from penstock import DamageError, Loader, create_shards_from_arrays, create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader

N, SHARD = 41, 8  # five shards of 8 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """41 samples of which 13 is bad in x and 30 in y."""
    folder = tmp_path / "damaged"
    create_shards_from_arrays(folder, positions(N), shard_size=SHARD)
    flip_member(folder, "sample_000000013.x.npy")
    flip_member(folder, "sample_000000030.y.npy")
    return folder


def batches_of(loader: Loader) -> list[Any]:
    with loader:
        return [to_plain(batch) for batch in loader]


@pytest.mark.parametrize("kind", OURS)
def test_damage_is_an_error_that_names_shard_and_item_whoever_reads(damaged: Path, kind: str) -> None:
    with ours(damaged, kind, shuffle=False) as loader:
        seen = []
        with pytest.raises(DamageError, match=r"item 13 in shard_000001\.tar.*checksum") as caught:
            seen.extend(batch["x"].tolist() for batch in loader)
    assert (caught.value.shard, caught.value.item) == ("shard_000001.tar", 13)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("kind", OURS)
def test_a_substitute_keeps_shape_and_order_whoever_reads(sets: Callable[..., Path], damaged: Path, kind: str) -> None:
    healthy = batches_of(ours(sets(), kind, seed=3))
    found = batches_of(ours(damaged, kind, seed=3, on_error="substitute"))
    assert [len(batch["x"]) for batch in found] == [len(batch["x"]) for batch in healthy]
    substitutes = {}
    for batch, wanted in zip(found, healthy, strict=True):
        for row, item in enumerate(wanted["x"]):
            x = batch["x"][row]
            assert batch["y"][row] == [x, x + 0.25]
            assert batch["metadata"][row]["sample_id"] == f"sample_{x:09d}"
            if x != item:
                substitutes[item] = x
    assert set(substitutes) == {13, 30}
    assert not set(substitutes.values()) & {13, 30}
    # The same for everyone: a reader on its own, later, finds the same substitutes.
    again = WebDatasetLoader(damaged, on_error="substitute", shuffle=False)
    assert {item: x for item, x in enumerate(xs(again)) if item != x} == substitutes
    entries = [json.loads(line) for line in (damaged / "quarantine.jsonl").read_text().splitlines()]
    assert {(entry["item"], entry["shard"]) for entry in entries} == {
        (13, "shard_000001.tar"),
        (30, "shard_000003.tar"),
    }
    assert all("checksum" in entry["reason"] for entry in entries)


def test_substitutes_reach_torchs_workers(damaged: Path) -> None:
    dataset = WebDatasetLoader(damaged, on_error="substitute")
    found = [xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)) for _ in range(2)]
    alone = dict(enumerate(xs(WebDatasetLoader(damaged, on_error="substitute", shuffle=False))))
    assert [sorted(epoch) for epoch in found] == [sorted(alone.values())] * 2


@pytest.mark.parametrize("k", range(11))
def test_resuming_is_exact_among_substitutes(damaged: Path, k: int) -> None:
    def loader() -> Loader:
        return create_webdataset_dataloader(damaged, batch_size=4, num_workers=0, on_error="substitute")

    whole = batches_of(loader())
    first = loader()
    seen = [to_plain(batch) for batch in islice(first, k)]
    state = first.state_dict()
    first.close()
    second = loader()
    second.load_state_dict(state)
    assert seen + batches_of(second) == whole


def test_more_bad_items_than_allowed_are_an_error(damaged: Path) -> None:
    with pytest.raises(DamageError, match=r"more than max_bad_items=1 items are bad"):
        list(WebDatasetLoader(damaged, on_error="substitute", max_bad_items=1))
    assert len(list(WebDatasetLoader(damaged, on_error="substitute", max_bad_items=2))) == N


def test_the_quarantine_can_lie_elsewhere(damaged: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad items.jsonl"
    list(WebDatasetLoader(damaged, on_error="substitute", quarantine=path))
    assert not (damaged / "quarantine.jsonl").exists()
    assert {json.loads(line)["item"] for line in path.read_text().splitlines()} == {13, 30}


def test_an_item_that_is_not_read_is_not_bad(damaged: Path) -> None:
    list(WebDatasetLoader(damaged, on_error="substitute", fields=["y"]))
    assert [json.loads(line)["item"] for line in (damaged / "quarantine.jsonl").read_text().splitlines()] == [30]
