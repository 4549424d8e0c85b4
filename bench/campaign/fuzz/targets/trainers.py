"""Configurations in YAML and states of Lightning, whose imports take seconds: only when they are fuzzed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.campaign.fuzz.structures import mutate_json
from bench.campaign.fuzz.target import Run, SkippedInput, Target, put_file
from penstock.core.errors import OptionError, ResumeError
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset

__all__ = ["TRAINERS"]

_YAML = (
    b"train:\n  train_chunk_size: 6\n  val_chunk_size: 2\n  seed: 3\ntrainer:\n  max_epochs: 2\n"
    b"loader:\n  batch_size: 2\ndataset:\n  note: x\n",
    b"train: {seed: 1}\ntrainer:\n  limit_train_batches: 5\n  devices: 1\nloader: &a\n  batch_size: 4\n",
    b"train:\n  __l: 3\n  seed: ${train.__l}\nloader:\n  batch_size: ${oc.env:HOME,2}\n",
    b'{"train": {"train_chunk_size": 6}, "loader": {"batch_size": 2}, "dataset": {}}',
)
_TOKENS = (
    *(
        b"${train}",
        b"${",
        b"&a ",
        b"*a",
        b"!!python/object/apply:os.system [x]",
        b"<<: *a",
        b"- ",
        b"? ",
        b"|\n",
        b"%YAML",
    ),
    *(b"\ttrain:", b"1e999", b"0o7", b"2020-01-01", b"~", b"???", b"null", b"\xff", b"[" * 500, b"_target_: x"),
)


class _Data(ChunkedSequenceDataset):
    def setup(self) -> None:
        self.dataset_train, self.dataset_val = list(range(12)), list(range(4))


def _prepare_yaml(folder: Path) -> Run:
    from penstock.recipes.trainers.config import build_from_config

    path = folder / "config.yaml"

    def run(content: bytes) -> None:
        put_file(path, content)
        build_from_config(path, data=_Data)

    return run


def _prepare_module(_: Path) -> Run:
    """Load the state of a data module of Lightning, before its loaders are made, as a Trainer does."""
    from lightning.pytorch import Trainer

    from penstock.recipes.trainers.lightning import PenstockDataModule

    def run(content: bytes) -> None:
        try:
            state = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SkippedInput from error
        if not isinstance(state, dict):
            raise SkippedInput  # Lightning itself stores a dict
        module = PenstockDataModule(_Data(3, 2, seed=9), {"batch_size": 2})
        module.trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
        module.setup("fit")
        module.load_state_dict(state)
        next(iter(module.train_dataloader()))

    return run


def _states() -> Sequence[bytes]:
    data: Any = _Data(3, 2, seed=9)
    data.setup()
    loaders = {"train": data.train_dataloader(batch_size=2), "val": data.val_dataloader(batch_size=2)}
    return [json.dumps({name: loader.state_dict() for name, loader in loaders.items()}).encode()]


TRAINERS = (
    Target("yaml", _prepare_yaml, lambda: _YAML, (OptionError,), (mutate_json,), _TOKENS, weight=0.3, is_heavy=True),
    Target("lightning", _prepare_module, _states, (ResumeError,), (mutate_json,), weight=0.05, is_heavy=True),
)
