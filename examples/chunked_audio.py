"""Train an autoregressive model on audio, in chunks, with Lightning: `python examples/chunked_audio.py --help`.

Generates plucked notes as wav files, trains as `chunked_audio.yaml` says (40 batches, a validation, the next 40 …), is
interrupted in the middle of a chunk, resumes in a new Trainer, and compares with an undisturbed training. It
needs `pip install 'penstock[audio,lightning,yaml]'`, and half a minute on a CPU.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import soundfile
import torch
from omegaconf import OmegaConf
from torch.nn import functional

from penstock.recipes.trainers import build_from_config

CONFIG = Path(__file__).with_suffix(".yaml")
RATE_HZ = 8000


def generate(folder: Path, files: int, seconds: float) -> None:
    """Write melodies of plucked notes: decaying tones with a few harmonics."""
    folder.mkdir(parents=True)
    for number in range(files):
        rng = np.random.default_rng(number)
        sound = np.zeros(round(seconds * RATE_HZ))
        for begin in np.arange(0, len(sound), RATE_HZ // 8):
            time = np.arange(min(RATE_HZ // 2, len(sound) - begin)) / RATE_HZ
            pitch = 220 * 2 ** (rng.integers(0, 12) / 12)
            tone = sum(np.sin(2 * np.pi * pitch * harmonic * time) / harmonic for harmonic in (1, 2, 3))
            sound[begin : begin + len(time)] += 0.2 * tone * np.exp(-6 * time)
        soundfile.write(folder / f"melody{number}.wav", np.clip(sound, -1, 1), RATE_HZ)


class NextSample(pl.LightningModule):
    """Guesses the next code of a sound from those before it: a recurrent network."""

    def __init__(self, codes: int, width: int = 48) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(codes, width)
        self.remember = torch.nn.GRU(width, width, batch_first=True)
        self.guess = torch.nn.Linear(width, codes)
        self.losses: list[float] = []
        self.checks: list[tuple[float, int]] = []

    def loss(self, batch: tuple[Any, ...]) -> torch.Tensor:
        """Return the bits that are needed to tell a sample to one who has heard all before it."""
        x, y, _ = batch
        states, _ = self.remember(self.embed(x[..., 0]))
        return functional.cross_entropy(self.guess(states).flatten(0, 1), y.flatten(), ignore_index=-100) / np.log(2)

    def training_step(self, batch: tuple[Any, ...], _: int) -> torch.Tensor:
        """Learn from a batch."""
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        """Look at a batch."""
        if not self.trainer.sanity_checking:
            self.checks.append((float(self.loss(batch)), len(batch[0])))

    def on_validation_epoch_end(self) -> None:
        """Tell how good the model is by now."""
        if self.checks:
            bits = np.average([bits for bits, _ in self.checks], weights=[items for _, items in self.checks])
            chunk = self.trainer.datamodule.feeds["train"].epoch + 1
            print(f"  after chunk {chunk}: {bits:.2f} bits per sample")
            self.checks.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=4e-3)


class InterruptionError(RuntimeError):
    """Stands for a cluster that wants its machine back."""


class Interrupt(pl.Callback):
    """Saves a checkpoint after so many steps, and ends the training."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save, and stop."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise InterruptionError


def train(
    config: Any, folder: Path, callbacks: Sequence[pl.Callback] = (), checkpoint: Path | None = None
) -> NextSample:
    """Train as the configuration says; return the model, with the loss of every step."""
    data, arguments = build_from_config(config)
    torch.manual_seed(0)
    model = NextSample(codes=data.data.n_tokens)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        **arguments, **quiet, enable_checkpointing=False, default_root_dir=folder, callbacks=list(callbacks)
    )
    try:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    except InterruptionError:
        print(f"  interrupted after {trainer.global_step} steps, at {data.feeds['train'].describe()}")
    return model


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float]]:
    """Generate, train, interrupt, resume, compare; return the losses of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="another configuration")
    parser.add_argument("--quick", action="store_true", help="a few seconds, small sizes")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="such as train.train_chunk_size=20")
    chosen = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # of this machine: no GPU, few workers
    quick = ["train.train_chunk_size=5", "train.val_chunk_size=2", "trainer.max_epochs=3", "dataset.sample_len=64"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = (10, 0.5) if chosen.quick else (30, 4.0)
        print(f"1. {files[0]} melodies of {files[1]} s are written as wav files.")
        generate(folder / "melodies", *files)
        config = OmegaConf.merge(
            OmegaConf.load(chosen.config),
            OmegaConf.from_dotlist([*(quick if chosen.quick else []), *chosen.options]),
            {"dataset": {"data_dir": str(folder / "melodies")}},
        )
        print("2. A training goes through them, chunk by chunk. Guessing would take 8 bits.")
        whole = train(config, folder)
        step = len(whole.losses) * 2 // 5
        print("3. The same training is interrupted in the middle of a chunk,")
        begun = train(config, folder, [Interrupt(step, folder / "last.ckpt")])
        print("4. and resumes at the very next batch, in a new Trainer.")
        rest = train(config, folder, checkpoint=folder / "last.ckpt")
        resumed = [*begun.losses, *rest.losses]
        same = resumed == whole.losses and all(
            torch.equal(one, other) for one, other in zip(whole.parameters(), rest.parameters(), strict=True)
        )
        print(f"5. The losses of all {len(whole.losses)} steps and the weights are {'equal' if same else 'DIFFERENT'}.")
        return whole.losses, resumed


if __name__ == "__main__":
    main()
