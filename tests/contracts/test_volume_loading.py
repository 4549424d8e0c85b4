"""Seed 003's document: every one of its snippets runs as it stands, in one namespace, one after the other.

The document lies in `seeds/`, verbatim; its blocks are cut out of it when the tests run. What is changed is the import,
and "cuda" where there is no such device; and the 8 workers of the only loader that is iterated over, which are 2 here.
Those of the others, up to 16, are as they stand: none starts before it is needed.
"""

import inspect
import math
import multiprocessing
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import penstock
from penstock import CellMapDataLoader, CellMapDataset

(DOCUMENT,) = (Path(__file__).parent / "seeds").glob("003_*.txt")
TEXT = DOCUMENT.read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
OLD = [block for block in BLOCKS if "_use_streams" in block or "_worker_executor" in block]

SHAPE = (12, 16, 20)
ARRAY = {"shape": (4, 8, 8), "scale": (8.0, 8.0, 8.0)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CellMapDataset:
    """Return patches of a volume whose voxels are numbered."""
    folder = tmp_path_factory.mktemp("volume")
    for name, data in (("em", np.arange(math.prod(SHAPE)).reshape(SHAPE)), ("labels/mito", np.ones(SHAPE, "u1"))):
        group = zarr.open_group(folder / name, mode="w", zarr_format=2)
        group.create_array("s0", shape=SHAPE, chunks=(6, 8, 10), dtype="u2")[...] = data
        scale = [{"type": "scale", "scale": [8.0, 8.0, 8.0]}]
        axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
        datasets = [{"path": "s0", "coordinateTransformations": scale}]
        group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return CellMapDataset(
        f"{folder}/em", f"{folder}/labels/[mito]", ["mito"], {"raw": ARRAY}, {"gt": ARRAY}, pad=False, is_train=True
    )


def adapted(block: str) -> str:
    code = block.replace("from cellmap_data import", "from penstock import")
    return code if torch.cuda.is_available() else code.replace('device="cuda"', 'device="cpu"')


def test_the_document_is_the_one_that_was_given_and_has_these_snippets() -> None:
    assert len(BLOCKS) == 11
    assert len(OLD) == 2
    assert sum("CellMapDataLoader(" in block for block in BLOCKS) == 7


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_every_snippet_runs_in_one_namespace(
    dataset: CellMapDataset, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scope: dict[str, Any] = {"dataset": dataset}
    loaders = []
    for block in BLOCKS:
        if block in OLD:  # what the document says was removed, and its own next block stands in for
            with pytest.raises(AttributeError):
                exec(compile(block, str(DOCUMENT), "exec"), scope)
            continue
        # The first block walks through the whole epoch with 8 workers: two are enough here.
        code = adapted(block).replace("num_workers=8", "num_workers=2") if "for batch in" in block else adapted(block)
        exec(compile(code, str(DOCUMENT), "exec"), scope)
        loaders.append(scope["loader"])
    assert scope["CellMapDataLoader"] is CellMapDataLoader
    assert set(scope["batch"]) == {"raw", "gt", "idx"}
    said = capsys.readouterr().out
    assert "Pin memory: False" in said or torch.cuda.is_available()
    assert "Prefetch factor: 2" in said  # of the loader for CPU-only training, the last one before
    assert "DataLoader is initialized" in said
    if not torch.cuda.is_available():
        assert "pin_memory=True has no effect" in caplog.text  # said, and not silently left out
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("number", [number for number, block in enumerate(BLOCKS) if "CellMapDataLoader(" in block])
def test_every_loader_of_the_document_has_what_it_was_given_and_gives_the_same_batches(
    dataset: CellMapDataset, number: int
) -> None:
    scope: dict[str, Any] = {"dataset": dataset, "CellMapDataLoader": CellMapDataLoader}
    threads = _own_threads()
    exec(compile(adapted(BLOCKS[number]).split("\nfor batch in")[0], str(DOCUMENT), "exec"), scope)
    with_workers: CellMapDataLoader = scope["loader"]
    given = dict(re.findall(r"(\w+)=([\w\"]+)", BLOCKS[number]))
    assert with_workers.num_workers == int(given["num_workers"])
    assert with_workers.batch_size == int(given.get("batch_size", 1))
    assert with_workers._prefetch_factor == int(given.get("prefetch_factor", 2))
    assert with_workers._persistent_workers
    assert (_own_threads(), multiprocessing.active_children()) == (threads, [])
    with_workers.close()
    few = CellMapDataLoader(dataset, batch_size=with_workers.batch_size, num_workers=1, device="cpu")
    none = CellMapDataLoader(dataset, batch_size=with_workers.batch_size)
    for (left, right), _ in zip(zip(few, none.loader, strict=True), range(3), strict=False):
        assert list(left) == list(right) == ["raw", "gt", "idx"]
        assert all(torch.equal(left[name], right[name]) for name in left)
    few.close()


def test_the_signature_is_the_one_that_never_changed() -> None:
    parameters = inspect.signature(CellMapDataLoader).parameters
    stable = {
        "dataset": inspect.Parameter.empty, "classes": None, "batch_size": 1, "num_workers": 0,
        "weighted_sampler": False, "sampler": None, "is_train": True, "rng": None, "device": None,
        "iterations_per_epoch": None,
    }  # fmt: skip
    assert list(parameters)[: len(stable)] == list(stable)
    assert {name: parameters[name].default for name in stable} == stable
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize(
    "name",
    [
        "CellMapDataLoader",
        "CellMapDataset",
        "CellMapMultiDataset",
        "CellMapDataSplit",
        "CellMapImage",
        "EmptyImage",
        "MutableSubsetRandomSampler",
        "ClassBalancedSampler",
        "min_redundant_inds",
    ],
)
def test_the_names_are_public(name: str) -> None:
    assert hasattr(penstock, name)


STRATEGIES: dict[str, Callable[[CellMapDataset], dict[str, Any]]] = {
    "weighted": lambda dataset: {"weighted_sampler": True, "iterations_per_epoch": 4},
    "subset": lambda dataset: {"iterations_per_epoch": 4},
    "custom": lambda dataset: {"sampler": dataset.get_subset_random_sampler(12)},
    "custom, by a function": lambda dataset: {"sampler": lambda: dataset.get_subset_random_sampler(12)},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_sampling_strategies_continue_to_work(dataset: CellMapDataset, strategy: str) -> None:
    loader = CellMapDataLoader(dataset, batch_size=3, **STRATEGIES[strategy](dataset))
    for _ in range(2):
        loader.refresh()  # as users of the time before did between epochs
        batches = [batch["idx"].tolist() for batch in iter(loader.loader)]
        assert [len(items) for items in batches] == [3] * 4
        assert len(loader) == 4
        assert len({item for items in batches for item in items}) == 12
