"""Seed 002's document: names, arguments and defaults as it has them, its snippets run, and what it wants is true.

The document lies in `seeds/`, verbatim. Its blocks sketch how things might be written inside, with faults that are
known (`TrapsOfTheDocument`); what is held to is what they look like from outside, read from the blocks when the tests
run. Blocks that use other parts are run as they are, with our parts in their place.
"""

import ast
import inspect
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import penstock
from penstock import OptimalDataLoaderFactory, TrainingEngine, WorkerSafeAugmentedDataset, WorkerSafeStandardizedDataset

(DOCUMENT,) = (Path(__file__).parent / "seeds").glob("002_*.txt")
TEXT = DOCUMENT.read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
NODES = [node for block in BLOCKS for node in ast.parse(block).body]
CLASSES = {node.name: node for node in NODES if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in NODES if isinstance(node, ast.FunctionDef)}

DATA = TensorDataset(torch.arange(50 * 12.0).reshape(50, 1, 3, 4), torch.arange(50) % 3)


def namespace() -> dict[str, Any]:
    """Return what the blocks take for granted."""
    own = {name: getattr(penstock, name) for name in ("OptimalDataLoaderFactory", "SpecAugment", "worker_init_fn")}
    return {"torch": torch, "np": np, "DataLoader": DataLoader, **own}


def defined(name: str) -> Any:
    """Run the block that defines `name`, with only its import lines changed, and return that."""
    (block,) = [block for block in BLOCKS if re.search(rf"^(class|def) {name}\b", block, re.MULTILINE)]
    code = re.sub(r"from utils\.\w+ import", "from penstock import", block)
    scope = namespace()
    exec(compile(code, str(DOCUMENT), "exec"), scope)
    return scope[name]


def check_arguments(node: ast.FunctionDef, ours: Any, *, method: bool) -> None:
    parameters = inspect.signature(ours).parameters
    for argument in node.args.args[method:]:
        assert argument.arg in parameters, f"{node.name} takes no {argument.arg}"
    for argument, value in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
        assert parameters[argument.arg].default == ast.literal_eval(value), argument.arg


def test_the_document_has_these_classes_and_functions_and_all_are_here() -> None:
    assert set(CLASSES) == {
        "WorkerSafeStandardizedDataset",
        "WorkerSafeAugmentedDataset",
        "OptimalDataLoaderFactory",
        "DataLoaderPerformanceMonitor",
    }
    assert set(FUNCTIONS) == {"worker_init_fn", "_create_data_loaders", "cross_val_training"}
    for name in {*CLASSES, "worker_init_fn", "cross_val_training"}:
        assert hasattr(penstock, name)
    assert hasattr(TrainingEngine, "_create_data_loaders")


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_takes_the_arguments_of_the_document(name: str) -> None:
    ours = getattr(penstock, name)
    for node in [node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)]:
        static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
        check_arguments(node, getattr(ours, node.name), method=not static)


def test_every_function_takes_the_arguments_of_the_document() -> None:
    check_arguments(FUNCTIONS["worker_init_fn"], penstock.worker_init_fn, method=False)
    check_arguments(FUNCTIONS["cross_val_training"], penstock.cross_val_training, method=False)
    check_arguments(FUNCTIONS["_create_data_loaders"], TrainingEngine._create_data_loaders, method=True)


def test_the_defaults_of_the_training_are_those_of_the_document() -> None:
    (assigned,) = [node for node in FUNCTIONS["cross_val_training"].body if isinstance(node, ast.Assign)]
    keys = [ast.literal_eval(key) for key in assigned.value.keys]  # type: ignore[attr-defined]
    values = dict(zip(keys, assigned.value.values, strict=True))  # type: ignore[attr-defined]
    engine = TrainingEngine(torch.nn.Linear, 3, {})
    for name in keys:
        if name not in ("spec_augment", "gaussian_noise"):  # arguments of the function
            assert engine.config[name] == ast.literal_eval(values[name]), name
    assert (engine.config["spec_augment"], engine.config["gaussian_noise"]) == (False, False)


def test_the_standardised_data_set_of_the_document_and_ours_give_the_same() -> None:
    theirs = defined("WorkerSafeStandardizedDataset")(DATA, range(5, 20), 7.0, 2.0)
    ours = WorkerSafeStandardizedDataset(DATA, range(5, 20), 7.0, 2.0)
    assert len(theirs) == len(ours) == 15
    for (x, y), (other_x, other_y) in zip(ours, [theirs[number] for number in range(15)], strict=True):
        torch.testing.assert_close(x, other_x)
        assert y == other_y


def test_the_augmented_data_set_of_the_document_runs_with_our_specaugment() -> None:
    dataset = defined("WorkerSafeAugmentedDataset")(DATA, {"time_mask_param": 3, "freq_mask_param": 2, "p": 1.0})
    torch.manual_seed(0)
    masked = [dataset[number][0] for number in range(1, 20)]
    assert any((picture == 0).any() for picture in masked)
    assert torch.equal(DATA[7][0], torch.arange(84.0, 96.0).reshape(1, 3, 4))  # what it is over is as it was


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["standardised", "augmented"])
def test_every_data_set_works_with_eight_workers(kind: str) -> None:
    standardised = WorkerSafeStandardizedDataset(DATA, range(50), 300.0, 100.0)
    dataset = WorkerSafeAugmentedDataset(standardised, {"p": 1.0}, seed=1) if kind == "augmented" else standardised
    loader = OptimalDataLoaderFactory.create_validation_loader(dataset, 5, num_workers=8)
    labels = torch.cat([y for _, y in loader])
    assert labels.tolist() == [number % 3 for number in range(50)]


def test_the_engines_loaders_as_the_document_makes_them() -> None:
    engine = TrainingEngine(torch.nn.Linear, 3, {"batch_size": 8, "spec_augment": True})
    for create in (defined("_create_data_loaders"), TrainingEngine._create_data_loaders):
        train, val = create(engine, DATA, DATA)
        assert (len(train), len(val)) == (6, 7)
        assert sorted(y for _, batch in val for y in batch.tolist()) == sorted(number % 3 for number in range(50))


class Slow(Dataset[Any]):
    """A reader that takes a while: what is measured must not be less."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.04)
        return torch.zeros(2), number


class TestTrapsOfTheDocument:
    def test_the_monitor_measures_loading(self) -> None:
        found = penstock.DataLoaderPerformanceMonitor().time_batch_loading(DataLoader(Slow(), 2), num_batches=4)
        assert found["mean_batch_time"] >= 0.08
        theirs = defined("DataLoaderPerformanceMonitor")().time_batch_loading(DataLoader(Slow(), 2), num_batches=4)
        assert theirs["mean_batch_time"] < 0.01  # nothing of it

    def test_flags_of_the_factory_do_not_reach_torch(self) -> None:
        with pytest.raises(TypeError, match="has_augmentation"):
            defined("OptimalDataLoaderFactory").create_training_loader(DATA, 8, has_augmentation=True)
        loader = OptimalDataLoaderFactory.create_training_loader(DATA, 8, has_augmentation=True, num_workers=0)
        assert len(loader) == 6

    def test_validation_drops_nothing(self) -> None:
        loader = OptimalDataLoaderFactory.create_validation_loader(DATA, 24)
        assert [len(y) for _, y in loader] == [24, 24, 2]

    def test_the_data_set_has_a_length(self) -> None:
        assert not hasattr(defined("WorkerSafeAugmentedDataset"), "__len__")
        assert len(WorkerSafeAugmentedDataset(DATA, {})) == 50
