"""One fold: a plain PyTorch loop that keeps the best weights, stops early, and resumes after an interruption.

All randomness of an epoch is a function of (seed, fold, epoch): the order of the items, their augmentation, and the
global generators that a model may use, which are seeded at the start of each epoch. So a checkpoint at the end of an
epoch needs no generator state, and a resumed run is bit-equal to one without interruption.
"""

import io
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.core.errors import OptionError, ReadError, ResumeError
from penstock.core.seeds import key_for
from penstock.core.text import count
from penstock.files.durable import write_aside
from penstock.files.progress import track_progress
from penstock.files.regular import open_regular
from penstock.observe.watcher import watch

__all__ = ["FoldTraining", "Predictions", "accuracy_and_f1", "confusion_matrix_of", "preserve_random_state"]

_FIGURES = ("losses", "accuracies", "f1s")


class Predictions(NamedTuple):
    """Predictions for the validation items, in their order."""

    loss: float
    probabilities: NDArray[np.float32]
    targets: NDArray[np.int64]


class FoldTraining:
    """A model, and everything needed to train it to the end.

    Loaders are those of the factory for training and validation, whose order and augmentation are functions of their
    epoch. A checkpoint is written after each epoch, and resumed from if it exists and agrees with `identity`.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        loaders: tuple[Any, Any],
        config: Mapping[str, Any],
        *,
        num_classes: int,
        class_weights: torch.Tensor | None,
        seed: int,
        checkpoint: Path | None,
        identity: Mapping[str, Any],
    ) -> None:
        (self._train, self._val), self._config, self._n_classes = loaders, config, num_classes
        self._seed, self._checkpoint = seed, checkpoint
        _seed_all(key_for(seed, "model"))
        self.model = make_model()
        self._device = next((part.device for part in self.model.parameters()), torch.device("cpu"))
        self._criterion = nn.CrossEntropyLoss(weight=class_weights)
        make_optimizer = self._config["optimizer"] or partial(torch.optim.Adam, lr=self._config["learning_rate"])
        self._optimizer = make_optimizer(self.model.parameters())
        self._mixed = self._config["mixed_precision"] and self._device.type == "cuda"
        # One for all epochs, because it adapts its scale.
        self._scaler = torch.amp.GradScaler("cuda", enabled=self._mixed)
        optimizer = " ".join(repr(self._optimizer).split())
        self._identity = json.loads(json.dumps({**identity, "optimizer": optimizer}, default=repr))
        self.history: dict[str, Any] = {f"{side}_{name}": [] for side in ("train", "val") for name in _FIGURES}
        self.history |= {"early_stopped": False, "best_epoch": 0, "total_epochs": 0}
        self.best_weights: dict[str, torch.Tensor] = {}
        """A copy of the weights of the epoch with the smallest validation loss, on the CPU."""
        self.waited_seconds = self.trained_seconds = 0.0
        self.waiting: dict[str, Any] | None = None
        """Figures of `penstock.watch`; None unless requested."""

    def run(self, name: str) -> Predictions:
        """Train to the end, load the best weights into the model, and return its predictions."""
        self._resume()
        watched = self._config["benchmark_performance"]
        # A watched loader shows its own progress.
        show = self._config["progress"] and not watched
        with (
            track_progress(name, self._config["num_epochs"], "epochs", show=show) as bar,
            watch(self._train) if watched else nullcontext(self._train) as batches,
        ):
            bar.advance(self.history["total_epochs"])
            while not self._is_finished():
                self._run_epoch(batches)
                self._save()
                best = self.history["best_epoch"]
                bar.advance(1, f"best validation loss {self.history['val_losses'][best]:.4f} in epoch {best + 1}")
        self.waiting = batches.to_dict() if watched else None
        self.model.load_state_dict(self.best_weights)
        return self._predict()

    def _is_finished(self) -> bool:
        done, patience = self.history["total_epochs"], self._config["early_stopping"]
        if done >= self._config["num_epochs"]:
            return True
        stopped = bool(patience and done and done - 1 - self.history["best_epoch"] >= patience)
        self.history["early_stopped"] = stopped
        return stopped

    def _run_epoch(self, batches: Any) -> None:
        epoch = self.history["total_epochs"]
        _seed_all(key_for(self._seed, "epoch", epoch))
        self._train.epoch = epoch
        loss, confusion = self._train_epoch(batches)
        found = self._predict()
        if not np.isfinite(loss) or not np.isfinite(found.loss):
            raise OptionError(
                f"Losses must be finite, got {loss} in training and {found.loss} in validation of epoch {epoch + 1}. "
                f"Use a smaller learning_rate than {self._config['learning_rate']:g}, and look for NaN in the data."
            )
        validated = confusion_matrix_of(found.targets, found.probabilities.argmax(axis=1), self._n_classes)
        figures = {"train": (loss, *accuracy_and_f1(confusion)), "val": (found.loss, *accuracy_and_f1(validated))}
        for side, values in figures.items():
            for name, value in zip(_FIGURES, values, strict=True):
                self.history[f"{side}_{name}"].append(value)
        if epoch == 0 or found.loss < self.history["val_losses"][self.history["best_epoch"]]:
            self.history["best_epoch"] = epoch
            # A copy: state_dict() returns the weights themselves, which keep changing.
            self.best_weights = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        self.history["total_epochs"] = epoch + 1

    def _train_epoch(self, batches: Any) -> tuple[float, NDArray[np.int64]]:
        """Return the mean loss over the items, and the confusion matrix."""
        self.model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        targets_seen, classes_seen = [], []
        began = waiting = time.perf_counter()
        for x, y in batches:
            self.waited_seconds += time.perf_counter() - waiting
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
            targets_seen.append(targets)
            classes_seen.append(outputs.detach().argmax(dim=1))
            waiting = time.perf_counter()
        self.trained_seconds += time.perf_counter() - began
        seen, classes = torch.cat(targets_seen).cpu().numpy(), torch.cat(classes_seen).cpu().numpy()
        return float(loss_sum) / len(seen), confusion_matrix_of(seen, classes, self._n_classes)

    def _predict(self) -> Predictions:
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
        n_classes = self._n_classes
        if outputs.shape != (len(labels), n_classes):
            raise OptionError(
                f"The output of the model must have shape (batch, num_classes) = {(len(labels), n_classes)}, "
                f"got {tuple(outputs.shape)}."
            )
        if labels.min() < 0 or labels.max() >= n_classes:
            wrong = int(labels.min()) if labels.min() < 0 else int(labels.max())
            raise OptionError(f"Labels must be from 0 to {n_classes - 1} with num_classes={n_classes}, got {wrong}.")

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        stored = {
            "identity": json.dumps(self._identity),
            "history": self.history,
            "model": self.model.state_dict(),
            "best_weights": self.best_weights,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        content = io.BytesIO()
        torch.save(stored, content)
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_aside(self._checkpoint, content.getvalue())

    def _resume(self) -> None:
        path = self._checkpoint
        if path is None or not path.exists():
            return
        try:
            with open_regular(path) as file:
                stored = torch.load(file, map_location="cpu", weights_only=True)
            identity, done = json.loads(stored["identity"]), stored["history"]["total_epochs"]
        except Exception as error:
            raise ReadError(
                f"Could not read {path} as a checkpoint of a fold: {error}. Remove it to start over."
            ) from error
        changed = [
            f"{name} was {identity.get(name)!r} and is {self._identity.get(name)!r}"
            for name in {**identity, **self._identity}
            if identity.get(name) != self._identity.get(name)
        ]
        if done > self._config["num_epochs"]:
            changed.append(f"{count(done, 'epoch')} done, but num_epochs is {self._config['num_epochs']}")
        if changed:
            raise ResumeError(
                f"{path} belongs to another training: {'; '.join(changed)}. Use the same settings, or another "
                "checkpoint_dir to start over."
            )
        try:
            self.model.load_state_dict(stored["model"])
        except RuntimeError as error:
            raise ResumeError(f"{path} belongs to another model: {error}") from error
        self._optimizer.load_state_dict(stored["optimizer"])
        self._scaler.load_state_dict(stored["scaler"])
        self.history, self.best_weights = stored["history"], stored["best_weights"]


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


def _seed_all(key: int) -> None:
    """Seed the global generators, which user models and datasets may use; Penstock never does."""
    torch.manual_seed(key >> 1)
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)


def confusion_matrix_of(targets: NDArray[Any], predictions: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Return how often each class (row) was predicted as each other (column).

    Examples
    --------
    >>> confusion_matrix_of(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    counted = np.bincount(targets * num_classes + predictions, minlength=num_classes * num_classes)
    return counted.reshape(num_classes, num_classes).astype(np.int64)


def accuracy_and_f1(confusion: NDArray[np.int64]) -> tuple[float, float]:
    """Return the accuracy, and the mean F1 over the classes that occur as target or prediction.

    Examples
    --------
    >>> accuracy, f1 = accuracy_and_f1(np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]]))
    >>> round(accuracy, 4), round(f1, 4)
    (0.6667, 0.6667)
    """
    correct = np.diag(confusion)
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    is_present = occurrences > 0
    return float(correct.sum() / confusion.sum()), float((2 * correct[is_present] / occurrences[is_present]).mean())
