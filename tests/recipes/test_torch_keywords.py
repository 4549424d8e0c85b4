"""Loaders that stand in for torch's DataLoader take its keywords, and they mean the same in all three."""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import Numbers
from torch.utils.data import RandomSampler

from penstock import OptionError, ResumeError, create_shards_from_arrays, create_webdataset_dataloader
from penstock.recipes.cellmap import CellMapDataLoader
from penstock.recipes.chunked import ChunkedDataLoader

N = 24
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    create_shards_from_arrays(folder, {"x": np.arange(N)}, shard_size=10)
    return folder


@pytest.fixture(params=["webdataset", "cellmap", "chunked"])
def make(request: pytest.FixtureRequest, shards: Path) -> Make:
    """Make a loader of the numbers 0 … 23 in batches of 5."""
    if request.param == "webdataset":
        return partial(create_webdataset_dataloader, shards, batch_size=5, num_workers=0)
    if request.param == "cellmap":
        return partial(CellMapDataLoader, Numbers(N), batch_size=5)
    return partial(ChunkedDataLoader, Numbers(N), 5, 5)


def values(loader: Any) -> list[list[int]]:
    return [(batch["x"] if isinstance(batch, dict) else batch).tolist() for batch in loader]


def sum_items(items: list[Any]) -> torch.Tensor:
    numbers = [item["x"] if isinstance(item, dict) else item for item in items]
    return sum((torch.as_tensor(number) for number in numbers), torch.zeros(1))


def note_worker(folder: str, number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    Path(folder, f"{number}-{info.id}-{os.getpid()}").touch()


def test_order_and_last_batch_are_chosen_as_in_torch(make: Make) -> None:
    in_order = [list(range(start, min(start + 5, N))) for start in range(0, N, 5)]
    assert values(make(shuffle=False)) == in_order
    assert values(make(shuffle=False, drop_last=True)) == in_order[:-1]
    shuffled = [item for batch in values(make(shuffle=True)) for item in batch]
    assert set(shuffled) == set(range(N))
    assert shuffled[:5] != in_order[0]


def test_a_generator_seeds_the_order_and_its_state_does_not_matter(make: Make) -> None:
    one, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    first = values(make(generator=one))
    torch.rand(3, generator=one)
    assert values(make(generator=one)) == first
    assert values(make(generator=other)) != first
    with pytest.raises(OptionError, match=r"generator must be a torch.Generator, or None, got 3"):
        make(generator=3)


def test_batches_are_what_the_collate_function_makes(make: Make) -> None:
    sums = [int(batch) for batch in make(shuffle=False, collate_fn=sum_items)]
    assert sums == [sum(range(start, min(start + 5, N))) for start in range(0, N, 5)]


def test_a_sampler_gives_the_order_of_each_epoch(make: Make) -> None:
    if make.func is ChunkedDataLoader:  # type: ignore[attr-defined]  # a partial
        return  # chunks are cut from an order of their own
    of_torch = torch.utils.data.DataLoader(Numbers(N), 5, sampler=random_items())
    wanted = [values(of_torch) for _ in range(3)]
    loader = make(sampler=random_items())
    native = getattr(loader, "_pytorch_loader", loader)
    assert [(len(loader), native.remaining, values(loader)) for _ in range(2)] == [(2, 2, each) for each in wanted[:2]]
    next(iter(loader))
    assert native.remaining == 1
    resumed = make(sampler=random_items())
    resumed.load_state_dict(loader.state_dict())
    assert values(resumed) == wanted[2][1:]
    later = make(sampler=random_items())
    later = getattr(later, "_pytorch_loader", later)
    later.skip(1)
    assert values(later) == wanted[0][1:]
    with pytest.raises(OptionError, match=r"skip\(n\) needs n <= 2, the batches left in this epoch, got 3"):
        later.skip(3)
    with pytest.raises(ResumeError, match="The sampler must give the order that the state was saved with"):
        make(sampler=[7, 7, 3, 3, 3, 1]).load_state_dict(loader.state_dict())
    assert values(make(sampler=[7, 7, 3, 3, 3, 1])) == [[7, 7, 3, 3, 3], [1]]


def random_items() -> RandomSampler:
    return RandomSampler(range(N), num_samples=9, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("context", ["fork", multiprocessing.get_context("fork")])
def test_each_worker_process_calls_the_function_that_it_was_given(make: Make, context: Any, tmp_path: Path) -> None:
    note = partial(note_worker, str(tmp_path))
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1, "timeout": 60}
    loader = make(shuffle=False, worker_init_fn=note, multiprocessing_context=context, **options)
    assert values(loader) == values(make(shuffle=False))
    values(loader)
    notes = sorted(path.name.split("-") for path in tmp_path.iterdir())
    assert [note[:2] for note in notes] == [["0", "0"], ["1", "1"]]  # once each, over two epochs
    assert str(os.getpid()) not in {note[2] for note in notes}
    for name in ("close", "end_workers"):
        getattr(loader, name, int)()
    assert multiprocessing.active_children() == []


def test_workers_of_one_epoch_end_with_it(make: Make, tmp_path: Path) -> None:
    note = partial(note_worker, str(tmp_path))
    loader = make(num_workers=1, worker_init_fn=note, persistent_workers=False)
    assert len([values(loader) for _ in range(2)]) == 2
    assert multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true but no accelerator")
def test_the_other_keywords_are_taken_and_a_device_is_a_device(make: Make) -> None:
    loader = make(shuffle=False, pin_memory=True, sampler=None, batch_sampler=None, timeout=0)
    assert len(values(loader)) == 5
    assert loader.device == torch.device("cpu")


def test_a_device_that_was_named_is_a_device(shards: Path) -> None:
    for loader in (
        CellMapDataLoader(Numbers(N), device="meta"),
        CellMapDataLoader(Numbers(N)).to("meta"),
        create_webdataset_dataloader(shards, device="meta", num_workers=0),
    ):
        assert loader.device == torch.device("meta")


MEANINGLESS = {
    "batch_sampler": ([[1, 2]], r"batch_sampler must be None .*, got \[\[1, 2\]\]\. "),
    "sampler": ([1, 2], r"sampler must be None .*, got \[1, 2\]\. "),
    "in_order": (False, r"in_order must be True .*, got False\. Leave it out"),
    "pin_memory_device": ("cuda", r"pin_memory_device must be '' .*, got 'cuda'\. Use device="),
}
REFUSED = {
    "webdataset": ["batch_sampler", "in_order", "pin_memory_device"],
    "cellmap": ["batch_sampler", "in_order", "pin_memory_device"],
    "chunked": ["batch_sampler", "sampler"],
}


@pytest.mark.parametrize(
    ("make", "keyword"), [(kind, name) for kind, names in REFUSED.items() for name in names], indirect=["make"]
)
def test_what_means_nothing_here_is_refused_with_what_to_use(make: Make, keyword: str) -> None:
    value, said = MEANINGLESS[keyword]
    with pytest.raises(OptionError, match=said):
        make(**{keyword: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"collate_fn": 3}, "collate_fn must be a function, or None, got 3"),
        ({"worker_init_fn": "seed"}, "worker_init_fn must be a function, or None, got 'seed'"),
        ({"timeout": -1}, "timeout must be a finite number >= 0, got -1"),
        ({"drop_last": "no"}, "drop_last must be one of True, False, None, got 'no'"),
        ({"persistent_workers": 2}, "persistent_workers must be one of True, False, None, got 2"),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context needs num_workers >= 1, got 0"),
        ({"seed": 1, "generator": torch.Generator()}, "Either seed or generator must be given, got both"),
        ({"pad_value": 0, "collate_fn": list}, "pad_value must be None with a collate_fn"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(shards: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        create_webdataset_dataloader(shards, num_workers=0, **options)
