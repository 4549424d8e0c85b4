"""From YAML to a data module and a Trainer: example configurations, and misspelled or contradictory ones."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf

from penstock.core.errors import OptionError
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset, ChunkSizes
from penstock.recipes.chunked.loader import ChunkedSampler
from penstock.recipes.trainers.config import Built, build_from_config

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # lightning, of torch

(DOCUMENT,) = (Path(__file__).parents[2] / "contracts" / "seeds").glob("001_*.txt")
BLOCKS: list[str] = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
# Each block holds several configurations, each under a heading.
PARTS: list[tuple[str, str]] = [
    part for block in BLOCKS for part in re.findall(r"^# ([^\n]*):\n(.*?)(?=^# |\Z)", block, re.DOTALL | re.MULTILINE)
]
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Counted(ChunkedSequenceDataset):
    """70 000 numbers for training, 6 500 for validation, or as many as it is told."""

    def setup(self) -> None:
        self.dataset_train = range(getattr(self, "n_train", 70_000))
        self.dataset_val = range(100_000, 100_000 + getattr(self, "n_val", 6_500))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[str, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(("train", batch.tolist()))
        return self.layer(batch.float()[:, None] / 1e6).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("val", batch.tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def built(config: Any, caplog: pytest.LogCaptureFixture) -> tuple[Built, ChunkSizes, list[str]]:
    """What a configuration comes to, the sizes that hold after setup, and the log messages."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "penstock"):
        result = build_from_config(config, data=Counted)
        module = result.data.data
        assert isinstance(module, ChunkedSequenceDataset)
        module.setup()
        sizes = module.chunk_sizes(config["loader"]["batch_size"])
    return result, sizes, [record.getMessage() for record in caplog.records if record.name == "penstock"]


def fitted(result: Built, **options: Any) -> list[tuple[str, list[int]]]:
    model = Model()
    Trainer(**{**QUIET, "num_sanity_val_steps": 0, **result.trainer, **options}).fit(model, datamodule=result.data)
    return model.seen


LIMITS = {"limit_train_batches": 2000, "limit_val_batches": 200}
# 70 000 items are 2 188 batches of 32, and 6 500 are 204.
EXPECTED = {
    "Full chunked training (both partitions explicitly specified)": ChunkSizes(2000, 200),
    "Chunked training with inference (only train_chunk_size specified)": ChunkSizes(2000, 204),
    "Chunked validation with inference (only val_chunk_size specified)": ChunkSizes(2188, 200),
    "Standard training (existing behavior - no changes needed)": ChunkSizes(None, None),
    "Existing config (continues to work unchanged)": ChunkSizes(None, None),
    "New config (full chunked training)": ChunkSizes(2000, 200),
    "New config (chunked training with inference)": ChunkSizes(2000, 204),
    "New config (chunked validation with inference)": ChunkSizes(2188, 200),
}


def test_there_are_two_blocks_of_eight_configurations() -> None:
    assert len(BLOCKS) == 2
    assert [heading for heading, _ in PARTS] == list(EXPECTED)


@pytest.mark.parametrize(("heading", "text"), PARTS)
def test_every_configuration_does_what_its_comments_say(
    heading: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"loader": {"batch_size": 32}, **yaml.safe_load(text)}
    assert config["loader"]["batch_size"] == 32
    result, sizes, messages = built(config, caplog)
    assert sizes == EXPECTED[heading]
    # The comments say IGNORED, or "This will be used".
    limits = {**config.get("train", {}), **config.get("trainer", {})}
    limits = {name: limits[name] for name in LIMITS if name in limits}
    assert result.trainer == ({} if sizes.enabled else LIMITS)
    ignored = [line for line in messages if "ignored" in line]
    assert len(ignored) == bool(sizes.enabled and limits) == ("IGNORED" in text and bool(limits))
    assert all(f"{name}={limit}" in ignored[0] for name, limit in limits.items() if ignored)
    misplaced = [name for name in LIMITS if name in config.get("train", {})]
    assert [line for line in messages if line not in ignored] == [
        f"train.{name} is deprecated. Put it under trainer." for name in misplaced
    ]


YAML = """
batches: 3
train:
  train_chunk_size: ${batches}
  val_chunk_size: 2
  seed: 7
  ema: 0.1                 # the user's own
trainer:
  _target_: pytorch_lightning.Trainer
  limit_train_batches: 2
  max_epochs: ${train.val_chunk_size}
loader:
  batch_size: 2
dataset:
  n_train: 14
  n_val: 7
  __l_max: ${loader.batch_size}
model:
  width: ${hydra:runtime.cwd}
  depth: ???
"""


def test_a_file_is_trained_as_it_says_and_its_limits_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    sampler = ChunkedSampler(14, 6, seed=7)
    indices = [sampler.get_chunk_indices(chunk) for chunk in range(2)]
    first = [("train", indices[0][at : at + 2]) for at in (0, 2, 4)]
    second = [("train", indices[1][at : at + 2]) for at in (0, 2, 4)]
    v = 100_000
    expected = [*first, ("val", [v, v + 1]), ("val", [v + 2, v + 3])]
    expected += [*second, ("val", [v + 4, v + 5]), ("val", [v + 6])]
    for config in (path, str(path), OmegaConf.load(path)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "penstock"):
            result = build_from_config(config, data=Counted)
            assert result.trainer == {"max_epochs": 2}
            assert fitted(result) == expected
        messages = [record.getMessage() for record in caplog.records if record.name == "penstock"]
        assert len(messages) == 1
        assert messages[0].startswith("limit_train_batches=2: ignored, because train_chunk_size is set")
    plain = {"loader": {"batch_size": 2}, "dataset": {"n_train": 14, "n_val": 7}, "train": {"train_chunk_size": 3}}
    assert fitted(build_from_config(plain, data=Counted), max_epochs=1)[:3] != first  # another seed


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_without_sizes_the_limits_are_the_trainers(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train": None,
        "trainer": {"limit_train_batches": 2, "limit_val_batches": 0.5},
        "loader": {"batch_size": 2},
    }
    result = build_from_config({**config, "dataset": {"n_train": 14, "n_val": 7}}, data=Counted)
    assert result.trainer == {"limit_train_batches": 2, "limit_val_batches": 0.5}
    seen = fitted(result, max_epochs=1)
    assert [kind for kind, _ in seen] == ["train", "train", "val", "val"]


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("train", "train_chunksize", "train_chunk_size"),
        ("train", "val_chunk_sizes", "val_chunk_size"),
        ("train", "limit_train_batch", "limit_train_batches"),
        ("train", "sead", "seed"),
        ("trainer", "max_epoch", "max_epochs"),
        ("trainer", "limit_val_batch", "limit_val_batches"),
        ("loader", "batchsize", "batch_size"),
        ("loader", "num_worker", "num_workers"),
        ("dataset", "data_dirs", "data_dir"),
    ],
)
@pytest.mark.parametrize("kind", [dict, OmegaConf.create])
def test_a_misspelled_key_is_refused_with_the_nearest_right_name(
    section: str, key: str, nearest: str, kind: Any
) -> None:
    with pytest.raises(OptionError, match=f"{key}.* Did you mean '{nearest}'"):
        build_from_config(kind({section: {key: 3}}), data=Counted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trian": {}}, "Unknown key 'trian' in the configuration. Did you mean 'train'"),
        ({"loaders": {}}, "Did you mean 'loader'"),
        ({"trainer": {"gpus": 1}}, "Keys of trainer must be among accelerator, .*, got gpus"),
        ({"trainer": {"_target_": "mine.Loop"}}, "must be Lightning's Trainer, got 'mine.Loop'"),
        ({"train": {"train_chunk_size": 0}}, "train_chunk_size must be an integer >= 1, got 0"),
        ({"train": {"train_chunk_size": "many"}}, "train_chunk_size must be an integer >= 1, got 'many'"),
        ({"train": {"val_chunk_size": 2.5}}, "val_chunk_size must be an integer >= 1, got 2.5"),
        ({"train": {"val_chunk_size": True}}, "val_chunk_size must be an integer >= 1, got True"),
        (
            {"train": {"train_chunk_size": 2}, "loader": {"shuffle": False}},
            "loader.shuffle must not be set with chunk sizes, got False",
        ),
        (
            {"train": {"limit_val_batches": 2}, "trainer": {"limit_val_batches": 3}},
            "must equal trainer.*=3, got 2. Keep",
        ),
        (
            {"dataset": {"train_chunk_size": 2}},
            "train_chunk_size must be set under train only, got dataset.train_chunk_size=2",
        ),
        ({"train": {"seed": 1}, "dataset": {"seed": 2}}, "seed must be set under train only, got dataset.seed=2"),
        ({"train": 3}, "Section 'train' of the configuration must be a mapping, .* got 3"),
        ({"train": {"train_chunk_size": "${nowhere}"}}, "Could not read the configuration.*nowhere"),
        ({"train": {"train_chunk_size": "???"}}, "Could not read the configuration.*Missing mandatory value"),
        ([1, 2], "must be a mapping of sections .*got list"),
        (42, "must be a mapping of sections .*got int"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_from_config(config, data=Counted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"No configuration at .*config\.yaml"),
        ("train: [1, 2", "Could not read the configuration: while parsing"),
        ("train:\n  seed: 1\n  seed: 2\n", "Could not read the configuration:.*duplicate key"),
        ("- 1\n- 2\n", "must be a mapping of sections .*got ListConfig"),
        ("dataset:\n  _name_: qautoadio\n", "must be one of 'qautoaudio', got 'qautoadio'. Did you mean 'qautoaudio'"),
        ("train:\n  seed: 1\n", "_name_ must be one of 'qautoaudio', got None"),
        (
            "dataset:\n  _name_: qautoaudio\n  sample_length: 3\n",
            "Keys of dataset must be among .*, got sample_length. Did you mean 'sample_len'",
        ),
        ("dataset:\n  _name_: qautoaudio\n  path: x\n", "Keys of dataset must be among .*data_dir, .*, got path"),
    ],
)
def test_a_file_that_cannot_be_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=f"(?s){message}"):
        build_from_config(path)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Could not read the configuration: .*directory"):
        build_from_config(tmp_path)


def test_the_keys_of_s4_that_are_not_read_here_pass() -> None:
    own = ("name", "interval", "monitor", "mode", "ema", "test", "debug", "ignore_warnings", "state", "ckpt", "optim")
    config = {section: {} for section in ("model", "optimizer", "scheduler", "task", "encoder", "decoder", "wandb")}
    result = build_from_config(
        {**config, "callbacks": {}, "train": dict.fromkeys(own, 1), "loader": {"drop_last": True, "pin_memory": True}},
        data=Counted,
    )
    assert result.trainer == {}


def test_audio_is_named_by_its_name_and_trained_and_tested_in_batches_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "audio"
    folder.mkdir()
    for number in range(4):
        soundfile.write(folder / f"{number}.wav", np.full(20 + number, number / 8, np.float32), 8000)
    config = {
        "train": {"train_chunk_size": 2},
        "loader": {"batch_size": 2},
        "dataset": {"_name_": "qautoaudio", "data_dir": str(folder), "sample_len": 8, "train_percentage": 0.5},
    }

    class Audio(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(("train", batch[2]["lengths"].tolist()))
            return self.layer(batch[0].float()).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("val", batch[2]["lengths"].tolist()))

        test_step = validation_step

    model, result = Audio(), build_from_config(config)
    assert next(iter(result.data.train_dataloader()))[2]["lengths"].shape == (2,)  # without a Trainer
    trainer = Trainer(**QUIET, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=result.data)
    # Three items a file, of which the last is shorter: 22 frames, and 23 for testing.
    assert [len(lengths) for kind, lengths in model.seen if kind == "train"] == [2, 2]
    assert [lengths for kind, lengths in model.seen if kind == "val"] == [[8, 8], [6]]
    model.seen.clear()
    trainer.test(model, datamodule=result.data, verbose=False)
    assert [lengths for _, lengths in model.seen] == [[8, 8], [7]]
