"""Seed 001's document: the names, arguments and attributes of its classes, and what it says they do.

The document lies in `seeds/`, verbatim. Its code blocks sketch how the classes might be written inside; what can be
held to is what they look like from outside, and that is read from the blocks when the tests run.
"""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock import ChunkedDataLoader, ChunkedSampler, ChunkedSequenceDataset, ChunkedTrainingMixin

(DOCUMENT,) = (Path(__file__).parent / "seeds").glob("001_*.txt")
TEXT = DOCUMENT.read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
CLASSES = {node.name: node for block in BLOCKS for node in ast.parse(block).body if isinstance(node, ast.ClassDef)}

# Of the sketched insides: a generator with a state, and parts that are torch's here.
INSIDE = {"rng", "dataloader_kwargs", "standard_dataloader"}


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return number


class Module(ChunkedSequenceDataset):
    def setup(self) -> None:
        self.dataset_train, self.dataset_val = Numbers(90), Numbers(21)


class Training(ChunkedTrainingMixin):
    def __init__(self, config: Any) -> None:
        self.data = Module()
        self.data.setup()
        super().__init__(config)

    def training_step(self, batch: torch.Tensor) -> list[int]:
        return list(batch.tolist())

    validation_step = training_step


def config(**train: Any) -> SimpleNamespace:
    return SimpleNamespace(train=train, loader={"batch_size": 3}, trainer={})


def made(name: str) -> Any:
    if name == "ChunkedSampler":
        return ChunkedSampler(10, 4)
    if name == "ChunkedDataLoader":
        return ChunkedDataLoader(Numbers(10), 2, chunk_size=2)
    if name == "ChunkedSequenceDataset":
        return Module(train_chunk_size=4, val_chunk_size=2)
    return Training(config(train_chunk_size=4, val_chunk_size=2))


def test_the_document_has_six_classes_and_all_are_here() -> None:
    assert set(CLASSES) == {
        "ChunkedSampler",
        "ChunkedDataLoader",
        "ChunkedSequenceDataset",
        "ChunkedTrainingMixin",
        "ChunkedQuantizedAudioDataset",
        "ChunkedQuantizedAutoregressiveAudio",
    }
    for name, node in CLASSES.items():
        for base in node.bases:
            parent = ast.unparse(base)
            own = getattr(penstock, parent) if hasattr(penstock, parent) else torch.utils.data.Sampler
            assert issubclass(getattr(penstock, name), own)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_takes_the_arguments_of_the_document(name: str) -> None:
    ours = getattr(penstock, name)
    for method in [node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)]:
        if method.name.startswith("_") and method.name not in ("__init__", "__iter__", "__len__"):
            continue
        parameters = inspect.signature(getattr(ours, method.name)).parameters
        spare = {parameter.kind for parameter in parameters.values()}
        for argument in method.args.args[1:]:
            assert argument.arg in parameters, f"{name}.{method.name} takes no {argument.arg}"
        assert method.args.kwarg is None or inspect.Parameter.VAR_KEYWORD in spare
        given = {
            argument.arg: ast.literal_eval(value)
            for argument, value in zip(reversed(method.args.args), reversed(method.args.defaults), strict=False)
        }
        assert {key: parameters[key].default for key in given} == given


@pytest.mark.parametrize("name", [name for name in CLASSES if "Audio" not in name])
def test_every_public_attribute_of_the_document_is_there(name: str) -> None:
    ours = made(name)
    stored = [node for node in ast.walk(CLASSES[name]) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in stored if ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store)}
    assert names
    for attribute in names - INSIDE:
        assert hasattr(ours, attribute), f"{name} has no {attribute}"


def test_the_sampler_is_as_long_as_it_says_and_cycles() -> None:
    sampler = ChunkedSampler(10, 4)
    assert len(sampler) == min(sampler.chunk_size, sampler.dataset_size) == 4
    sampler.set_chunk(2)
    assert list(sampler) == sampler.get_chunk_indices(2)
    assert len(sampler.get_chunk_indices(99)) == 4


def test_a_full_chunk_has_chunk_size_batches() -> None:
    loader = ChunkedDataLoader(Numbers(100), batch_size=4, chunk_size=5)
    assert len(loader) == loader.chunk_size == len(list(loader)) == 5
    assert loader.total_chunks == 5
    assert isinstance(ChunkedDataLoader(Numbers(100), batch_size=4), DataLoader)


@pytest.mark.parametrize(
    ("sizes", "enabled", "train", "val"),
    [
        ({}, False, None, None),
        ({"train_chunk_size": 4}, True, 4, 7),
        ({"val_chunk_size": 2}, True, 30, 2),
        ({"train_chunk_size": 4, "val_chunk_size": 2}, True, 4, 2),
    ],
)
def test_either_size_turns_chunks_on_and_the_other_one_is_inferred(
    sizes: dict[str, int], enabled: bool, train: int | None, val: int | None
) -> None:
    module = Module(**sizes)
    module.setup()
    assert module.use_chunked_training is enabled
    loaders = module.train_dataloader(batch_size=3), module.val_dataloader(batch_size=3)
    assert (module.train_chunk_size, module.val_chunk_size) == (train, val)
    assert [len(loader) for loader in loaders] == [train or 30, val or 7]


def test_a_training_validates_after_each_chunk_and_walks_through_all_of_the_data() -> None:
    training = Training(config(train_chunk_size=10, val_chunk_size=4))
    done = [training.train_epoch_with_chunking() for _ in range(6)]
    seen = [item for epoch in done for batch in epoch["train"] for item in batch]
    assert sorted(seen) == sorted([*range(90)] * 2)
    assert seen[:90] != seen[90:]
    checked = [[item for batch in epoch["val"] for item in batch] for epoch in done]
    assert checked == [[*range(12)], [*range(12, 21)]] * 3
    assert [(epoch["train_chunk"], epoch["val_chunk"]) for epoch in done] == [(n, n) for n in range(6)]


def test_limits_alone_are_the_trainers_own_affair() -> None:
    training = Training(config(limit_train_batches=2, limit_val_batches=1))
    assert not training.chunked_training_enabled
    done = training.train_epoch_with_chunking()
    assert (done["train_batches"], done["val_batches"]) == (2, 1)


def test_the_audio_classes_walk_their_files_in_chunks(tmp_path: Path) -> None:
    for number in range(50):
        soundfile.write(tmp_path / f"song{number}.wav", np.full(40, number / 64, np.float32), 8000, subtype="FLOAT")
    module = penstock.ChunkedQuantizedAutoregressiveAudio(
        train_chunk_size=11, data_dir=tmp_path, sample_len=20, quantization=None
    )
    module.setup()
    train = module.train_dataloader(batch_size=4)
    songs = {round(float(y[0, 0]) * 64) for _ in range(train.total_chunks) for _, batch, _ in train for y in batch}
    assert songs == set(range(44))  # 0.88 of the files
    dataset = penstock.ChunkedQuantizedAudioDataset(tmp_path, sample_len=20)
    assert [len(x) for x, _, _ in dataset.loader(batch_size=4, chunk_size=3)] == [4, 4, 4]
