"""One fold: a plain PyTorch loop that keeps the best weights, stops early, and resumes after an interruption.

All randomness of an epoch is a function of (seed, fold, epoch): the order of the items, their augmentation, and the
global generators that a model may use, which are seeded at the start of each epoch. So a checkpoint at the end of an
epoch needs no generator state, and a resumed run is bit-equal to one without interruption.
"""

import io
import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.core.errors import OptionError, ReadError, ResumeError
from penstock.core.seeds import key_for
from penstock.core.text import count
from penstock.files.durable import write_aside
from penstock.files.regular import open_regular
from penstock.observe.progress import track_progress
from penstock.recipes.crossval.results import accuracy_and_f1
from penstock.recipes.workersafe.torch_loader import end_iterator

__all__ = ["FoldSpec", "FoldTraining", "Predictions", "preserve_random_state", "seed_all"]

_FORMAT = 1
_LISTS = (
    "train_losses",
    "train_accuracies",
    "train_f1s",
    "val_losses",
    "val_accuracies",
    "val_f1s",
    "learning_rates",
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for the validation items, in their order."""

    loss: float
    probabilities: NDArray[np.float32]
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoldSpec:
    """Settings of the training of one fold."""

    config: Mapping[str, Any]
    """A checked config."""

    num_classes: int
    """Number of labels, and of outputs of the model."""

    class_weights: torch.Tensor | None
    """Weights for the loss; None for equal ones."""

    seed: int
    """Seed of this fold."""

    checkpoint: Path | None
    """File that is written after each epoch, and resumed from if it exists; None for no checkpoints."""

    identity: Mapping[str, Any]
    """Values that a checkpoint must agree with, by name; plain JSON."""


class FoldTraining:
    """A model, and everything needed to train it to the end.

    Parameters
    ----------
    model
        The model with its initial weights, on its device.
    train_loader, val_loader
        Loaders of the factory: order and augmentation are functions of their epoch.
    spec
        Settings of the training.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        val_loader: Any,
        spec: FoldSpec,
    ) -> None:
        config = spec.config
        self.model, self._train, self._val, self._config, self._seed = (
            model,
            train_loader,
            val_loader,
            config,
            spec.seed,
        )
        self._device = next((part.device for part in model.parameters()), torch.device("cpu"))
        self._num_classes = spec.num_classes
        self._criterion = nn.CrossEntropyLoss(weight=spec.class_weights)
        self._optimizer = _make_optimizer(model, config)
        self._scheduler = _make_scheduler(self._optimizer, config["lr_schedule"])
        self._mixed = config["mixed_precision"] and self._device.type == "cuda"
        # One for all epochs, because it adapts its scale.
        self._scaler = torch.amp.GradScaler("cuda", enabled=self._mixed)
        self._checkpoint, self._identity = spec.checkpoint, json.loads(json.dumps(spec.identity, default=repr))
        self.history: dict[str, Any] = {name: [] for name in _LISTS}
        self.history |= {"early_stopped": False, "best_epoch": 0, "total_epochs": 0}
        self.best_weights: dict[str, torch.Tensor] = {}
        """A copy of the weights of the epoch with the smallest validation loss, on the CPU."""
        self.waited_seconds = self.trained_seconds = 0.0
        self.waiting: dict[str, Any] | None = None
        """Figures of `penstock.watch`; None unless requested."""

    def run(self, name: str) -> Predictions:
        """Train to the end, load the best weights into the model, and return its predictions."""
        self._resume()
        epochs, loader = self._config["num_epochs"], self._train
        watched: AbstractContextManager[Any] = nullcontext(loader)
        if self._config["benchmark_performance"]:
            from penstock.observe.watcher import watch  # noqa: PLC0415  # only if requested

            watched = watch(loader)
        # A watched loader shows its own progress.
        show = self._config["progress"] and not self._config["benchmark_performance"]
        with track_progress(name, epochs, "epochs", show=show) as bar, watched as batches:
            bar.advance(self.history["total_epochs"])
            while not self._is_finished():
                self._run_epoch(batches)
                self._save()
                best = self.history["best_epoch"]
                bar.advance(1, f"best validation loss {self.history['val_losses'][best]:.4f} in epoch {best + 1}")
        if self._config["benchmark_performance"]:
            self.waiting = batches.to_dict()
        self.model.load_state_dict(self.best_weights)
        return self.predict()

    def _is_finished(self) -> bool:
        done, patience = self.history["total_epochs"], self._config["early_stopping"]
        if done >= self._config["num_epochs"]:
            return True
        stopped = bool(patience and done and done - 1 - self.history["best_epoch"] >= patience)
        self.history["early_stopped"] = stopped
        return stopped

    def _run_epoch(self, batches: Any) -> None:
        epoch = self.history["total_epochs"]
        seed_all(key_for(self._seed, "epoch", epoch))
        self._train.epoch = epoch
        rate = self._optimizer.param_groups[0]["lr"]
        loss, confusion = self._train_epoch(batches)
        found = self.predict()
        if not np.isfinite(loss) or not np.isfinite(found.loss):
            raise OptionError(
                f"Losses must be finite, got {loss} in training and {found.loss} in validation of epoch {epoch + 1}. "
                f"Use a smaller learning_rate than {self._config['learning_rate']:g}, and look for NaN in the data."
            )
        accuracy, f1 = accuracy_and_f1(confusion)
        val_accuracy, val_f1 = accuracy_and_f1(_confusion_matrix(found.probabilities, found.targets))
        figures = (loss, accuracy, f1, found.loss, val_accuracy, val_f1, rate)
        for name, figure in zip(_LISTS, figures, strict=True):
            self.history[name].append(figure)
        if epoch == 0 or found.loss < self.history["val_losses"][self.history["best_epoch"]]:
            self.history["best_epoch"] = epoch
            self.best_weights = _copy_weights(self.model)
        self.history["total_epochs"] = epoch + 1
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(found.loss)
        elif self._scheduler is not None:
            self._scheduler.step()

    def _train_epoch(self, batches: Any) -> tuple[float, NDArray[np.int64]]:
        """Return the mean loss over the items, and the confusion matrix."""
        began = time.perf_counter()
        self.model.train()
        loss_sum, count, confusion = torch.zeros((), dtype=torch.float64, device=self._device), 0, None
        for x, y in self._time_batches(batches):
            inputs, targets = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True).long()
            with torch.autocast(self._device.type, enabled=self._mixed):
                outputs = self.model(inputs)
                self._check_batch(outputs, y)
                loss = self._criterion(outputs, targets)
            self._optimizer.zero_grad(set_to_none=True)
            self._scaler.scale(loss).backward()
            if self._config["gradient_clipping"]:
                self._scaler.unscale_(self._optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self._config["gradient_clipping"])
            self._scaler.step(self._optimizer)
            self._scaler.update()
            loss_sum += loss.detach() * len(targets)
            count += len(targets)
            new = _count_pairs(targets, outputs.detach())
            confusion = new if confusion is None else confusion + new
        self.trained_seconds += time.perf_counter() - began
        assert confusion is not None, "the factory makes no empty loader"
        return float(loss_sum) / count, confusion.cpu().numpy()

    def _time_batches(self, batches: Any) -> Iterator[Any]:
        waiting = time.perf_counter()
        ready = iter(batches)
        try:
            while True:
                try:
                    batch = next(ready)
                except StopIteration:
                    return
                finally:
                    self.waited_seconds += time.perf_counter() - waiting
                yield batch
                waiting = time.perf_counter()
        finally:
            if not getattr(self._train, "persistent_workers", False):
                end_iterator(ready)

    def predict(self) -> Predictions:
        """Return the predictions of the current weights."""
        self.model.eval()
        self._val.epoch = self.history["total_epochs"]  # for datasets with `set_epoch`; the same after a resume
        outputs, targets = [], []
        with torch.no_grad():
            for x, y in self._val:
                with torch.autocast(self._device.type, enabled=self._mixed):
                    outputs.append(self.model(x.to(self._device, non_blocking=True)).float().cpu())
                self._check_batch(outputs[-1], y)
                targets.append(y.long())
        logits, classes = torch.cat(outputs), torch.cat(targets)
        weight = self._criterion.weight
        # Over all items at once, since the mean of batch means is not the mean.
        loss = nn.functional.cross_entropy(logits, classes, weight=None if weight is None else weight.cpu())
        return Predictions(float(loss), logits.softmax(dim=1).numpy(), classes.numpy())

    def _check_batch(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        if outputs.shape != (len(labels), self._num_classes):
            raise OptionError(
                f"The output of the model must have shape (batch, num_classes) = {(len(labels), self._num_classes)}, "
                f"got {tuple(outputs.shape)}."
            )
        if labels.min() < 0 or labels.max() >= self._num_classes:
            wrong = int(labels.min()) if labels.min() < 0 else int(labels.max())
            raise OptionError(
                f"Labels must be from 0 to {self._num_classes - 1} with num_classes={self._num_classes}, got {wrong}."
            )

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        stored = {
            "format": _FORMAT,
            "identity": json.dumps(self._identity),
            "history": self.history,
            "model": self.model.state_dict(),
            "best_weights": self.best_weights,
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        content = io.BytesIO()
        torch.save(stored, content)
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_aside(self._checkpoint, content.getvalue())

    def _resume(self) -> None:
        if self._checkpoint is None or not self._checkpoint.exists():
            return
        try:
            with open_regular(self._checkpoint) as file:
                stored = torch.load(file, map_location="cpu", weights_only=True)
            identity, done = json.loads(stored["identity"]), stored["history"]["total_epochs"]
        except Exception as error:
            raise ReadError(
                f"Could not read {self._checkpoint} as a checkpoint of a fold: {error}. Remove it to start over."
            ) from error
        self._check_same(identity, done)
        try:
            self.model.load_state_dict(stored["model"])
        except RuntimeError as error:
            raise ResumeError(f"{self._checkpoint} belongs to another model: {error}") from error
        self._optimizer.load_state_dict(stored["optimizer"])
        self._scaler.load_state_dict(stored["scaler"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(stored["scheduler"])
        self.history, self.best_weights = stored["history"], stored["best_weights"]

    def _check_same(self, identity: Mapping[str, Any], done: int) -> None:
        changed = [
            f"{name} was {identity.get(name)!r} and is {self._identity.get(name)!r}"
            for name in {**identity, **self._identity}
            if identity.get(name) != self._identity.get(name)
        ]
        if done > self._config["num_epochs"]:
            changed.append(f"{count(done, 'epoch')} done, but num_epochs is {self._config['num_epochs']}")
        if changed:
            raise ResumeError(
                f"{self._checkpoint} belongs to another training: {'; '.join(changed)}. Use the same settings, or "
                "another checkpoint_dir to start over."
            )


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the global generators of torch, numpy and Python on exit."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # to be restored
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def seed_all(key: int) -> None:
    """Seed the global generators, which user models and datasets may use; Penstock never does."""
    torch.manual_seed(key >> 1)
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)


def _copy_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    # state_dict() returns the weights themselves, which keep changing.
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _count_pairs(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    n_classes = outputs.shape[1]
    pairs = targets * n_classes + outputs.argmax(dim=1)
    return torch.bincount(pairs, minlength=n_classes * n_classes).reshape(n_classes, n_classes)


def _confusion_matrix(probabilities: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    counted: NDArray[np.int64] = _count_pairs(torch.from_numpy(targets), torch.from_numpy(probabilities)).numpy()
    return counted


def _make_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    rate, decay = config["learning_rate"], config["l2_regularization"]
    if config["use_adam"]:
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=config["momentum"], weight_decay=decay)


def _make_scheduler(optimizer: torch.optim.Optimizer, schedule: Mapping[str, Any] | None) -> Any:
    if schedule is None:
        return None
    kinds = torch.optim.lr_scheduler
    kind = {"plateau": kinds.ReduceLROnPlateau, "exponential": kinds.ExponentialLR, "cosine": kinds.CosineAnnealingLR}
    arguments: dict[str, Any] = {name: value for name, value in schedule.items() if name != "type"}
    return kind[schedule["type"]](optimizer, **arguments)
