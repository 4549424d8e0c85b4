"""Trains models on folds of a dataset; statistics, augmentation and class weights come from the training side.

The work here is on the data; the training loop is plain PyTorch (`fold`).
"""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import Subset

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.seeds import key_for
from penstock.recipes.crossval.config import TRAINING_KEYS, check_config
from penstock.recipes.crossval.fold import FoldSpec, FoldTraining, Predictions, preserve_random_state, seed_all
from penstock.recipes.crossval.folds import best_grouped_split, stratified_split
from penstock.recipes.crossval.results import (
    accuracy_and_f1,
    aggregate_predictions,
    confusion_matrix_of,
    summarize_folds,
)
from penstock.recipes.workersafe.datasets import (
    AugmentedDataset,
    WorkerSafeStandardizedDataset,
    compute_standardization_stats,
)
from penstock.recipes.workersafe.factory import OptimalDataLoaderFactory
from penstock.recipes.workersafe.torch_loader import end_workers
from penstock.transform.presets import get_augmentation_params

__all__ = ["TrainingEngine", "class_weights", "labels_of"]

_Int64s = NDArray[np.int64]


class TrainingEngine:
    """Trains one model per fold.

    Results are a function of the seed: the same for any number of worker processes, and after any interruption. The
    global generators of torch, numpy and Python are left as they were.

    Parameters
    ----------
    model_class
        Called with the number of classes (as `num_classes=`, if it has such a parameter), once per fold. Its output
        has shape (batch, classes).
    num_classes
        Labels are 0 … num_classes - 1.
    config
        Keys of `penstock.recipes.crossval.config.DEFAULTS`. Standardization comes first, with mean and standard
        deviation of the training items; then noise, then masks, on training items only. So noise is in units of the
        standard deviation and masks are filled with the mean, unless `standardize` is False: then noise is in units of
        the data, and masks are filled with the mean of the item.

    Examples
    --------
    >>> features = torch.tensor([[number % 2, 0.5] for number in range(80)], dtype=torch.float32)
    >>> dataset = torch.utils.data.TensorDataset(features, torch.arange(80) % 2)
    >>> engine = TrainingEngine(lambda classes: nn.Linear(2, classes), 2, {"num_epochs": 30, "learning_rate": 0.1})
    >>> engine.run_single_fold_predefined(dataset, range(40), range(40, 80))["final_val_acc"]
    1.0
    """

    def __init__(
        self, model_class: Callable[..., nn.Module], num_classes: int, config: Mapping[str, Any] | None = None
    ) -> None:
        if not callable(model_class):
            raise OptionError(f"model_class must be a function that returns a model, got {model_class!r}.")
        self.model_class, self.num_classes = model_class, check_integer("num_classes", num_classes, at_least=2)
        self.config = check_config(config)
        self.device = torch.device(self.config["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))

    def run_cross_validation(
        self, dataset: Any, fold_indices: Sequence[Any], *, recordings: ArrayLike | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train on each fold, and return `(results, best_results)`.

        Parameters
        ----------
        dataset
            A map-style dataset of (x, label).
        fold_indices
            (training items, validation items) of each fold.
        recordings
            One per item: predictions are averaged over the items of a recording.

        Returns
        -------
        `results` has `fold_results` ("fold_1", … as from `run_single_fold_predefined`), `summary` and `config`;
        `best_results` has the smallest losses and the largest accuracies and F1s over the epochs of each fold.

        Raises
        ------
        Exception
            Any exception in a fold, with a note that names the fold.
        """
        folds = [self._check_fold(dataset, fold) for fold in fold_indices]
        if not folds:
            raise OptionError("fold_indices must have (training, validation) items of at least one fold, got none.")
        places = [(number, len(folds)) for number in range(1, len(folds) + 1)]
        found = [self._train_fold(dataset, fold, place, recordings) for fold, place in zip(folds, places, strict=True)]
        results = {
            "fold_results": {f"fold_{number}": fold for number, fold in enumerate(found, 1)},
            "summary": summarize_folds(found, self.num_classes),
            "config": dict(self.config),
        }
        histories = [fold["history"] for fold in found]
        best_results = {
            "accuracies": [max(history["val_accuracies"]) for history in histories],
            "f1s": [max(history["val_f1s"]) for history in histories],
            "losses": [min(history["val_losses"]) for history in histories],
        }
        return results, best_results

    def run_single_fold_predefined(
        self,
        dataset: Any,
        train_idx: Iterable[int] | ArrayLike,
        val_idx: Iterable[int] | ArrayLike,
        *,
        recordings: ArrayLike | None = None,
    ) -> dict[str, Any]:
        """Train on `train_idx`, validate on `val_idx`, and return the results.

        Returns
        -------
        `final_val_loss`, `final_val_acc` and `final_val_f1` of the best weights, those of the epoch with the smallest
        validation loss; `history` by epoch, counted from 0; `model` with these weights, on the CPU, and a copy in
        `model_state`; `val_probabilities` (items, classes), `val_predictions` and `val_targets` in the order of
        `val_indices`; `recordings`, the same for recordings, or None; `confusion_matrix`; `standardization` (mean and
        standard deviation, or None); `training_time` in seconds; `waiting_share`, the fraction of training time
        spent waiting for batches; and `waiting`, all figures of `penstock.watch`, if `benchmark_performance` is set.
        """
        return self._train_fold(dataset, self._check_fold(dataset, (train_idx, val_idx)), (1, 1), recordings)

    def run_single_fold_stratified(self, dataset: Any, *, recordings: ArrayLike | None = None) -> dict[str, Any]:
        """Train on a random split with `test_size` of each class for validation; recordings are kept whole."""
        labels = labels_of(dataset)
        size, seed = self.config["test_size"], self.config["seed"]
        if recordings is None:
            train, val = stratified_split(labels, size, seed=seed)
        else:
            train, val, *_ = best_grouped_split(
                labels,
                recordings,
                size,
                max_attempts=self.config["max_split_attempts"],
                min_test_segments=self.config["min_test_segments"],
                show=self.config["progress"],
            )
        return self._train_fold(dataset, (train, val), (1, 1), recordings)

    def _check_fold(self, dataset: Any, fold: Any) -> tuple[_Int64s, _Int64s]:
        sides = []
        for name, items in zip(("training", "validation"), fold, strict=True):
            numbers = np.asarray(items if hasattr(items, "__len__") else list(items))
            if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu":
                raise OptionError(f"The {name} items must be a list of one or more integers, got {items!r}.")
            if numbers.min() < 0 or numbers.max() >= len(dataset) or len(np.unique(numbers)) < len(numbers):
                raise OptionError(
                    f"The {name} items must be unique and from 0 to {len(dataset) - 1}, got {len(np.unique(numbers))} "
                    f"unique ones of {len(numbers)}, from {numbers.min()} to {numbers.max()}."
                )
            sides.append(numbers.astype(np.int64))
        shared = np.intersect1d(sides[0], sides[1])
        if len(shared):
            raise OptionError(
                f"Training and validation must not share items, but share {len(shared)}, the first is {shared[0]}."
            )
        return sides[0], sides[1]

    def _train_fold(
        self, dataset: Any, fold: tuple[_Int64s, _Int64s], place: tuple[int, int], recordings: ArrayLike | None
    ) -> dict[str, Any]:
        began, (number, count), (train, val) = time.perf_counter(), place, fold
        with _name_fold_in_errors(number, count), preserve_random_state():
            names = _check_recordings(recordings, len(dataset), fold)
            seed = key_for(self.config["seed"], "fold", number)
            train_set, val_set, statistics = self._make_subsets(dataset, train, val, seed)
            weights = None
            if self.config["use_class_weights"]:
                weights = torch.from_numpy(class_weights(labels_of(dataset)[train], self.num_classes)).to(self.device)
            train_loader, val_loader = self._create_data_loaders(train_set, val_set)
            try:
                seed_all(key_for(seed, "model"))
                folder = self.config["checkpoint_dir"]
                spec = FoldSpec(
                    config=self.config,
                    num_classes=self.num_classes,
                    class_weights=weights,
                    seed=seed,
                    checkpoint=None if folder is None else folder / f"fold_{number}.pt",
                    identity=self._identity(fold, statistics),
                )
                training = FoldTraining(self._make_model().to(self.device), train_loader, val_loader, spec)
                predictions = training.run(f"Fold {number} of {count}")
            finally:
                end_workers(train_loader, val_loader)
            result = self._result(predictions, training)
            result["recordings"] = self._by_recording(predictions, names, val)
            result |= {"train_indices": train, "val_indices": val, "standardization": statistics}
        result["training_time"] = time.perf_counter() - began
        return result

    def _make_subsets(self, dataset: Any, train: _Int64s, val: _Int64s, seed: int) -> tuple[Any, Any, Any]:
        """Return both sides, and the statistics of the training side."""
        config, statistics = self.config, None
        train_set: Any = Subset(dataset, train.tolist())
        val_set: Any = Subset(dataset, val.tolist())
        if config["standardize"]:
            axis = config["standardize_axis"]
            statistics = compute_standardization_stats(
                dataset, train, config["standardize_sample_size"], axis=axis, seed=key_for(seed, "statistics")
            )
            train_set, val_set = (
                WorkerSafeStandardizedDataset(dataset, items.tolist(), *statistics, axis=axis) for items in (train, val)
            )
        return self._augment(train_set, key_for(seed, "augment")), val_set, statistics

    def _augment(self, train_set: Any, seed: int) -> Any:
        masks, noise = self.config["spec_augment"], self.config["gaussian_noise"]
        if masks is False and noise is False:
            return train_set
        shape = tuple(np.shape(train_set[0][0]))
        if masks is not False and len(shape) not in (2, 3):
            raise OptionError(f"spec_augment needs items of ([channel,] frequency, time), got shape {shape}.")
        advice = get_augmentation_params(
            len(train_set),
            self.num_classes,
            self.config["aggressive_augmentation"],
            input_size=(shape[-2], shape[-1]) if len(shape) in (2, 3) else (1, 1),
        )
        recommended = advice["spec_augment_params"]
        if masks is True and not recommended["time_mask_param"] + recommended["freq_mask_param"]:
            raise OptionError(
                f"spec_augment=True needs larger spectrograms, got {shape[-2]} × {shape[-1]}, for which no masks are "
                "recommended. Use spec_augment={'time_mask_param': …, 'freq_mask_param': …}."
            )
        if not self.config["standardize"]:
            recommended["mask_value"] = "mean"
        given = {"spec_augment_params": masks, "gaussian_noise_params": noise}
        own = {name: arguments for name, arguments in given.items() if isinstance(arguments, Mapping)}
        return AugmentedDataset(
            train_set,
            use_spec_augment=masks is not False,
            use_gaussian_noise=noise is not False,
            augment_params={**advice, **own},
            seed=seed,
        )

    def _create_data_loaders(self, train_subset: Any, val_subset: Any) -> tuple[Any, Any]:
        """Return the loaders of both sides, made by the factory."""
        config = self.config
        has_augmentation = config["spec_augment"] is not False or config["gaussian_noise"] is not False
        plain = {"num_workers": 0, "pin_memory": False}
        options = config["loader_options"] if config["optimize_dataloaders"] else plain
        # Own generators: torch would seed workers from the global one, more often without workers than with persistent
        # ones, and the model's dropout would depend on that.
        train_loader = OptimalDataLoaderFactory.create_training_loader(
            train_subset,
            batch_size=config["batch_size"],
            has_augmentation=has_augmentation,
            has_standardization=config["standardize"],
            seed=config["seed"],
            generator=torch.Generator().manual_seed(config["seed"]),
            **options,
        )
        val_loader = OptimalDataLoaderFactory.create_validation_loader(
            val_subset,
            batch_size=config["batch_size"],
            has_standardization=config["standardize"],
            generator=torch.Generator().manual_seed(config["seed"]),
            **options,
        )
        return train_loader, val_loader

    def _make_model(self) -> nn.Module:
        try:
            named = "num_classes" in inspect.signature(self.model_class).parameters
        except ValueError:  # it has no readable signature
            named = False
        return self.model_class(num_classes=self.num_classes) if named else self.model_class(self.num_classes)

    def _identity(self, fold: tuple[_Int64s, _Int64s], statistics: Any) -> dict[str, Any]:
        items = xxhash.xxh3_64_hexdigest(b"|".join(side.tobytes() for side in fold))
        numbers = None if statistics is None else [np.asarray(value).tolist() for value in statistics]
        settings = {key: self.config[key] for key in TRAINING_KEYS}
        return {**settings, "num_classes": self.num_classes, "items": items, "standardization": numbers}

    def _result(self, predictions: Predictions, training: FoldTraining) -> dict[str, Any]:
        classes = predictions.probabilities.argmax(axis=1)
        confusion = confusion_matrix_of(predictions.targets, classes, self.num_classes)
        accuracy, f1 = accuracy_and_f1(confusion)
        return {
            "history": training.history,
            "final_val_loss": predictions.loss,
            "final_val_acc": accuracy,
            "final_val_f1": f1,
            "best_val_acc": max(training.history["val_accuracies"]),
            "best_val_f1": max(training.history["val_f1s"]),
            "model": training.model.cpu(),
            "model_state": training.best_weights,
            "confusion_matrix": confusion,
            "val_probabilities": predictions.probabilities,
            "val_predictions": classes,
            "val_targets": predictions.targets,
            "waiting": training.waiting,
            "waiting_share": training.waited_seconds / max(training.trained_seconds, 1e-9),
        }

    def _by_recording(self, predictions: Predictions, recordings: Any, val: _Int64s) -> dict[str, Any] | None:
        if recordings is None or not self.config["aggregate_predictions"]:
            return None
        names, means, targets = aggregate_predictions(predictions.probabilities, recordings[val], predictions.targets)
        accuracy, f1 = accuracy_and_f1(confusion_matrix_of(targets, means.argmax(axis=1), self.num_classes))
        return {
            "names": names,
            "probabilities": means,
            "predictions": means.argmax(axis=1),
            "targets": targets,
            "accuracy": accuracy,
            "f1": f1,
        }


def class_weights(labels: ArrayLike, num_classes: int) -> NDArray[np.float32]:
    """Return items / (classes × items of the class): weights that make rare classes count as much as frequent ones.

    Examples
    --------
    >>> class_weights([0, 0, 0, 1], 2).round(3).tolist()
    [0.6669999957084656, 2.0]
    """
    counts = np.bincount(np.asarray(labels, np.int64), minlength=num_classes)
    missing = np.flatnonzero(counts == 0)
    if len(missing) or len(counts) > num_classes:
        raise OptionError(
            f"Class weights need items of all classes 0 … {num_classes - 1} in training, and no others; "
            + (f"class {missing[0]} has no item." if len(missing) else f"got label {len(counts) - 1}.")
        )
    weights: NDArray[np.float32] = (counts.sum() / (num_classes * counts)).astype(np.float32)
    return weights


def labels_of(dataset: Any) -> _Int64s:
    """Return the label of each item: `tensors[1]`, `targets` or `labels` of the dataset, or from reading all items."""
    tensors = getattr(dataset, "tensors", None)
    known = [tensors[1] if tensors is not None and len(tensors) > 1 else None]
    known += [getattr(dataset, name, None) for name in ("targets", "labels")]
    for found in known:
        if found is not None and len(found) == len(dataset):
            return np.asarray(found).astype(np.int64)
    try:
        return np.array([int(dataset[number][1]) for number in range(len(dataset))], np.int64)
    except (TypeError, IndexError) as error:
        raise SourceError(
            f"Items must be (x, label), but those of {type(dataset).__name__} are not: {error}."
        ) from error


def _check_recordings(recordings: ArrayLike | None, n_items: int, fold: tuple[_Int64s, _Int64s]) -> Any:
    if recordings is None:
        return None
    names = np.asarray(recordings)
    if names.shape != (n_items,):
        raise OptionError(f"recordings must have one entry per item, shape ({n_items},), got {names.shape}.")
    shared = np.intersect1d(names[fold[0]], names[fold[1]])
    if len(shared):
        raise OptionError(
            f"Recordings must not have items in both training and validation, but {len(shared)} have, the first is "
            f"{str(shared[0])!r}. Keep recordings whole."
        )
    return names


@contextmanager
def _name_fold_in_errors(number: int, count: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"[penstock] in fold {number} of {count}")
        raise
