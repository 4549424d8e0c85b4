"""The loader with other datasets: any map-style dataset of torch, of tuples or of dicts."""

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.loader import CellMapDataLoader


class Dicts(Dataset[Any]):
    """A map-style dataset of dicts that augments by the epoch of `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {
            "x": torch.tensor([item, self.epoch]),
            "name": f"item {item}",
            "n": item,
            "ragged": torch.ones(item % 2),
        }

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_any_map_style_dataset_of_torch_is_accepted(workers: int) -> None:
    pairs = TensorDataset(torch.arange(10) * 10, torch.arange(10) * 100)
    loader = CellMapDataLoader(pairs, batch_size=4, num_workers=workers, is_train=False)
    assert [[x.tolist(), y.tolist()] for x, y in loader][-1] == [[80, 90], [800, 900]]
    shuffled = CellMapDataLoader(pairs, batch_size=4, num_workers=workers, rng=1)
    found = [value for x, _ in shuffled for value in x.tolist()]
    assert sorted(found) == list(range(0, 100, 10)) != found
    forked = {"multiprocessing_context": "fork"} if workers else {}
    dicts = CellMapDataLoader(Dicts(), batch_size=5, num_workers=workers, is_train=False, **forked)
    assert [batch["x"].tolist() for _ in range(2) for batch in dicts] == [
        [[item, epoch] for item in range(first, first + 5)] for epoch in (0, 1) for first in (0, 5)
    ]
    batch = dicts[[2, 3]]
    assert (batch["name"], batch["n"].tolist(), [len(row) for row in batch["ragged"]]) == (
        ["item 2", "item 3"],
        [2, 3],
        [0, 1],
    )
    with pytest.raises(OptionError, match=r"dataset with crops.*got TensorDataset"):
        CellMapDataLoader(pairs, weighted_sampler=True)
    with pytest.raises(OptionError, match="must have the same keys"):
        CellMapDataLoader([{"a": 1}, {"b": 1}], batch_size=2)[[0, 1]]
    for each in (loader, shuffled, dicts):
        each.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
