"""Lightning with two ranks in separate processes: different items on each, and every chunk exactly once in all."""

import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from penstock_test_parts import run_side_by_side
from torch.utils.data import TensorDataset

from penstock.core.errors import ResumeError
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset
from penstock.recipes.chunked.loader import ChunkedSampler
from penstock.recipes.trainers.lightning import PenstockDataModule


class Counted(ChunkedSequenceDataset):
    def setup(self) -> None:
        self.dataset_train = TensorDataset(torch.arange(14))
        self.dataset_val = TensorDataset(torch.arange(100, 107))
        self.dataset_test = TensorDataset(torch.arange(200, 206))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.1)
        self.seen: list[Any] = []

    def saw(self, kind: str, batch: Any) -> torch.Tensor:
        if not self.trainer.sanity_checking:
            self.seen.append([kind, batch[0].tolist()])
        return ((self.layer(batch[0].float()[:, None] / 100) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.saw("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def end(self) -> list[float]:
        return [self.layer.weight.item(), self.layer.bias.item()]


class Saving(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step_{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch_{trainer.current_epoch}.ckpt")


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", enable_checkpointing=False, max_epochs=4, **quiet, **options)


def module() -> PenstockDataModule:
    return PenstockDataModule(Counted(4, 2), {"batch_size": 2})


ENDED: list[
    Any
] = []  # what belongs to several ranks may wait for the others when it is deleted; it goes with its process


def rank(number: int, port: int, folder: Path) -> dict[str, Any]:
    """Train as one of two ranks: whole, and from two checkpoints; return what was seen and the weights at the end."""
    os.environ.update(LOCAL_RANK=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")  # lightning's, about this machine
    whole, first = Model(), trainer(strategy="ddp", devices=2, callbacks=[Saving(folder)])
    first.fit(whole, datamodule=module())
    found = {"seen": list(whole.seen), "end": whole.end()}
    first.test(whole, datamodule=module(), verbose=False)
    found["test"] = of(whole.seen, "test")
    for step in (3, 4):
        rest = Model()
        trainer(strategy="ddp", devices=2).fit(rest, datamodule=module(), ckpt_path=folder / f"step_{step}.ckpt")
        found[f"from_{step}"] = {"seen": rest.seen, "end": rest.end()}
    assert (first.global_rank, first.world_size) == (number, 2)
    ENDED.append(first)
    return found


def of(seen: list[Any], kind: str) -> list[list[int]]:
    return [items for name, items in seen if name == kind]


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # lightning, of torch
def test_two_ranks_share_every_chunk_exactly_and_go_on_together_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = run_side_by_side((rank, 0, port, tmp_path), (rank, 1, port, tmp_path))

    sampler = ChunkedSampler(14, 8, seed=42)
    chunks = [sampler.get_chunk_indices(chunk) for chunk in range(4)]
    dealt = [[items[start : start + 2] for items in chunks for start in (2 * rank, 4 + 2 * rank)] for rank in range(2)]
    assert [of(found["seen"], "train") for found in ranks] == dealt
    # A pass of validation is four batches in two chunks, and the last one is short.
    assert [of(found["seen"], "val") for found in ranks] == [[[100, 101], [104, 105]] * 2, [[102, 103], [106]] * 2]
    assert [found["test"] for found in ranks] == [[[200, 201], [204]], [[202, 203], [205]]]

    for found in ranks:
        trained = of(found["seen"], "train")
        for step in (3, 4):
            assert of(found[f"from_{step}"]["seen"], "train") == trained[step:]
            assert found[f"from_{step}"]["end"] == found["end"] == ranks[0]["end"]
    assert ranks[0]["from_3"]["seen"] == ranks[0]["seen"][-len(ranks[0]["from_3"]["seen"]) :]

    # The same data and model, in one rank.
    with pytest.raises(ResumeError, match="at the same batch, got 1 of epoch 1 and 2 on rank"):
        trainer().fit(Model(), datamodule=module(), ckpt_path=tmp_path / "step_3.ckpt")
    alone = Model()
    trainer().fit(alone, datamodule=module(), ckpt_path=tmp_path / "epoch_1.ckpt")
    assert [item for items in of(alone.seen, "train") for item in items] == chunks[2] + chunks[3]
