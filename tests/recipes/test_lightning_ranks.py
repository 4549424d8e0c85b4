"""Lightning with two ranks, each a process of its own: they walk different items, and together every chunk exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ResumeError
from penstock.recipes.chunked_epochs import ChunkedSampler

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import TensorDataset
from penstock.recipes.chunked_training import ChunkedSequenceDataset
from penstock.recipes.lightning import PenstockDataModule


class Counted(ChunkedSequenceDataset):
    def setup(self):
        self.dataset_train = TensorDataset(torch.arange(14))
        self.dataset_val = TensorDataset(torch.arange(100, 107))
        self.dataset_test = TensorDataset(torch.arange(200, 206))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.1)
        self.seen = []

    def saw(self, kind, batch):
        if not self.trainer.sanity_checking:
            self.seen.append([kind, batch[0].tolist()])
        return ((self.layer(batch[0].float()[:, None] / 100) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        return self.saw("train", batch)

    def validation_step(self, batch, batch_idx):
        self.saw("val", batch)

    def test_step(self, batch, batch_idx):
        self.saw("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saving(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.save_checkpoint(folder / f"step_{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, model):
        trainer.save_checkpoint(folder / f"epoch_{trainer.current_epoch}.ckpt")


def trainer(**options):
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False, max_epochs=4, **options)


def module():
    return PenstockDataModule(Counted(4, 2), {"batch_size": 2})


def end(model):
    return [model.layer.weight.item(), model.layer.bias.item()]
"""

RANKS = """
folder = Path(sys.argv[1])
whole, first = Model(), trainer(strategy="ddp", devices=2, callbacks=[Saving()])
first.fit(whole, datamodule=module())
found = {"seen": list(whole.seen), "end": end(whole)}
first.test(whole, datamodule=module(), verbose=False)
found["test"] = [items for kind, items in whole.seen if kind == "test"]
for step in (3, 4):
    rest = Model()
    trainer(strategy="ddp", devices=2).fit(rest, datamodule=module(), ckpt_path=folder / f"step_{step}.ckpt")
    found[f"from_{step}"] = {"seen": rest.seen, "end": end(rest)}
(folder / f"rank_{first.global_rank}.json").write_text(json.dumps(found))
"""


def of(seen: list[Any], kind: str) -> list[list[int]]:
    return [items for name, items in seen if name == kind]


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # lightning, of torch
def test_two_ranks_share_every_chunk_exactly_and_go_on_together_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + RANKS)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]

    sampler = ChunkedSampler(14, 8, seed=42)
    chunks = [sampler.get_chunk_indices(chunk) for chunk in range(4)]
    dealt = [[items[start : start + 2] for items in chunks for start in (2 * rank, 4 + 2 * rank)] for rank in range(2)]
    assert [of(rank["seen"], "train") for rank in ranks] == dealt
    # A pass of validation is four batches in two chunks, and the last one is short.
    assert [of(rank["seen"], "val") for rank in ranks] == [[[100, 101], [104, 105]] * 2, [[102, 103], [106]] * 2]
    assert [rank["test"] for rank in ranks] == [[[200, 201], [204]], [[202, 203], [205]]]

    for rank in ranks:
        trained = of(rank["seen"], "train")
        for step in (3, 4):
            assert of(rank[f"from_{step}"]["seen"], "train") == trained[step:]
            assert rank[f"from_{step}"]["end"] == rank["end"] == ranks[0]["end"]
    assert ranks[0]["from_3"]["seen"] == ranks[0]["seen"][-len(ranks[0]["from_3"]["seen"]) :]

    parts: dict[str, Any] = {}
    exec(SCRIPT, parts)  # the same data and model, in one rank
    with pytest.raises(ResumeError, match="Trainer is at batch 1 of epoch 1, and the loader gave its batch 2"):
        parts["trainer"]().fit(parts["Model"](), datamodule=parts["module"](), ckpt_path=tmp_path / "step_3.ckpt")
    alone = parts["Model"]()
    parts["trainer"]().fit(alone, datamodule=parts["module"](), ckpt_path=tmp_path / "epoch_1.ckpt")
    assert [item for items in of(alone.seen, "train") for item in items] == chunks[2] + chunks[3]
