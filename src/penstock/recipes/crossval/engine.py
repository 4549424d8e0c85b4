"""Trains models on folds of a dataset; statistics, augmentation and class weights come from the training side.

The work here is on the data; the training loop is plain PyTorch (`fold`).
"""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import Subset

from penstock.core.checks import check_integer, check_keys, check_number
from penstock.core.errors import OptionError, SourceError
from penstock.core.seeds import key_for
from penstock.recipes.crossval.fold import (
    FoldTraining,
    accuracy_and_f1,
    confusion_matrix_of,
    preserve_random_state,
)
from penstock.recipes.crossval.folds import best_grouped_split, stratified_split
from penstock.recipes.workersafe.datasets import (
    AugmentedDataset,
    WorkerSafeStandardizedDataset,
    compute_standardization_stats,
)
from penstock.recipes.workersafe.factory import OptimalDataLoaderFactory, end_workers
from penstock.transform.presets import get_augmentation_params

__all__ = [
    "DEFAULTS",
    "SINGLE_FOLD_DEFAULTS",
    "TrainingEngine",
    "aggregate_predictions",
    "check_config",
    "class_weights",
    "labels_of",
]

_Int64s = NDArray[np.int64]

DEFAULTS: Mapping[str, Any] = {
    "k_folds": 4,
    "num_epochs": 220,
    "batch_size": 24,
    "learning_rate": 0.001,
    "use_class_weights": False,
    "early_stopping": 35,  # epochs without a smaller validation loss; 0 for never
    "standardize": True,
    "standardize_axis": None,  # one mean for all; -2 for one per frequency bin of (channel, frequency, time)
    "aggregate_predictions": True,
    "max_split_attempts": 30_000,
    "min_val_segments": 0,
    "min_test_segments": 0,
    "test_size": 0.2,
    "spec_augment": False,  # True, or arguments of SpecAugment
    "gaussian_noise": False,  # True, or arguments of GaussianNoise
    "optimize_dataloaders": True,  # False for no worker processes and no pinned memory
    "loader_options": {},  # for OptimalDataLoaderFactory, such as num_workers: how batches are made, never which ones
    "benchmark_performance": False,  # True: penstock.watch reports what the training waited for
    "optimizer": None,  # a function from the parameters to a torch optimizer; None for Adam
    "mixed_precision": True,  # on a GPU; there is nothing to gain elsewhere
    "gradient_clipping": 1.0,  # 0 for none
    "seed": 42,
    "device": None,  # None for CUDA if available
    "checkpoint_dir": None,
    "progress": True,
}
"""Keys of the config of a cross-validation, with their defaults."""

SINGLE_FOLD_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "num_epochs": 250,
    "batch_size": 48,
    "max_split_attempts": 10_000,
    "min_test_segments": 5,
}
"""Defaults of a training on a single split."""

# What the weights depend on, besides the items and the optimizer; a checkpoint resumes only if it is the same.
_IDENTITY = ("batch_size", "use_class_weights", "early_stopping", "standardize", "standardize_axis", "spec_augment",
             "gaussian_noise", "mixed_precision", "gradient_clipping", "seed")  # fmt: skip
_AT_LEAST = {"k_folds": 2, "num_epochs": 1, "batch_size": 1, "max_split_attempts": 1}
_PLURALS = {"loss": "losses", "accuracy": "accuracies", "f1": "f1s"}
_ORDER_OPTIONS = {"shuffle", "sampler", "batch_sampler", "batch_size", "drop_last", "seed", "generator"}


def check_config(config: Mapping[str, Any] | None, defaults: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return all keys: the given ones, and `defaults` for the rest.

    Examples
    --------
    >>> check_config({"batch_size": 8})["batch_size"], check_config({})["num_epochs"]
    (8, 220)
    """
    full = {**defaults, **(config or {})}
    check_keys("Keys of config", full, DEFAULTS)
    for key, default in DEFAULTS.items():
        value = full[key]
        if key in ("spec_augment", "gaussian_noise") and isinstance(value, Mapping):
            continue
        if isinstance(default, bool) and not isinstance(value, bool):
            raise OptionError(f"{key} must be True or False, got {value!r}.")
        if type(default) is int:
            full[key] = check_integer(key, value, at_least=_AT_LEAST.get(key, 0))
        elif type(default) is float:
            full[key] = check_number(key, value, at_least=0)
    wrong = _ORDER_OPTIONS & set(full["loader_options"])
    if wrong:
        raise OptionError(f"loader_options must not change which items are in a batch, got {', '.join(sorted(wrong))}.")
    for key, switch in (("loader_options", "optimize_dataloaders"), ("standardize_axis", "standardize")):
        if full[key] not in (None, {}) and not full[switch]:
            raise OptionError(f"{key} needs {switch}=True, got False. Leave out one of the two.")
    return full


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
        Keys of `penstock.recipes.crossval.engine.DEFAULTS`. Standardization comes first, with mean and standard
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
        folds = [_check_fold(dataset, fold) for fold in fold_indices]
        if not folds:
            raise OptionError("fold_indices must have (training, validation) items of at least one fold, got none.")
        found = [
            self._train_fold(dataset, fold, recordings, number, len(folds)) for number, fold in enumerate(folds, 1)
        ]
        results = {
            "fold_results": {f"fold_{number}": fold for number, fold in enumerate(found, 1)},
            "summary": _summarize_folds(found, self.num_classes),
            "config": dict(self.config),
        }
        best_results = {
            "accuracies": [fold["best_val_acc"] for fold in found],
            "f1s": [fold["best_val_f1"] for fold in found],
            "losses": [min(fold["history"]["val_losses"]) for fold in found],
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
        return self._train_fold(dataset, _check_fold(dataset, (train_idx, val_idx)), recordings)

    def run_single_fold_stratified(self, dataset: Any, *, recordings: ArrayLike | None = None) -> dict[str, Any]:
        """Train on a random split with `test_size` of each class for validation; recordings are kept whole."""
        labels, config = labels_of(dataset), self.config
        if recordings is None:
            train, val = stratified_split(labels, config["test_size"], seed=config["seed"])
        else:
            train, val, *_ = best_grouped_split(
                labels,
                recordings,
                config["test_size"],
                max_attempts=config["max_split_attempts"],
                min_test_segments=config["min_test_segments"],
                show=config["progress"],
            )
        return self._train_fold(dataset, (train, val), recordings)

    def _train_fold(
        self, dataset: Any, fold: tuple[_Int64s, _Int64s], recordings: ArrayLike | None, number: int = 1, count: int = 1
    ) -> dict[str, Any]:
        began, (train, val), config = time.perf_counter(), fold, self.config
        with _name_fold_in_errors(number, count), preserve_random_state():
            names = _check_recordings(recordings, len(dataset), fold)
            seed = key_for(config["seed"], "fold", number)
            train_set, val_set, statistics = self._make_subsets(dataset, train, val, seed)
            weights = None
            if config["use_class_weights"]:
                weights = torch.from_numpy(class_weights(labels_of(dataset)[train], self.num_classes)).to(self.device)
            folder = config["checkpoint_dir"]
            identity = {
                **{key: config[key] for key in _IDENTITY},
                "num_classes": self.num_classes,
                "items": xxhash.xxh3_64_hexdigest(b"|".join(side.tobytes() for side in fold)),
                "standardization": statistics and [np.asarray(value).tolist() for value in statistics],
            }
            loaders = self._create_data_loaders(train_set, val_set)
            try:
                training = FoldTraining(
                    self._make_model,
                    loaders,
                    config,
                    num_classes=self.num_classes,
                    class_weights=weights,
                    seed=seed,
                    checkpoint=None if folder is None else Path(folder) / f"fold_{number}.pt",
                    identity=identity,
                )
                predictions = training.run(f"Fold {number} of {count}")
            finally:
                end_workers(*loaders)
            classes = predictions.probabilities.argmax(axis=1)
            confusion = confusion_matrix_of(predictions.targets, classes, self.num_classes)
            accuracy, f1 = accuracy_and_f1(confusion)
            by_recording = None
            if names is not None and config["aggregate_predictions"]:
                by_recording = self._by_recording(predictions.probabilities, names[val], predictions.targets)
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
            "recordings": by_recording,
            "train_indices": train,
            "val_indices": val,
            "standardization": statistics,
            "waiting": training.waiting,
            "waiting_share": training.waited_seconds / max(training.trained_seconds, 1e-9),
            "training_time": time.perf_counter() - began,
        }

    def _make_subsets(self, dataset: Any, train: _Int64s, val: _Int64s, seed: int) -> tuple[Any, Any, Any]:
        """Return both sides, and the statistics of the training side."""
        statistics, axis = None, self.config["standardize_axis"]
        train_set: Any = Subset(dataset, train.tolist())
        val_set: Any = Subset(dataset, val.tolist())
        if self.config["standardize"]:
            statistics = compute_standardization_stats(dataset, train, axis=axis, seed=key_for(seed, "statistics"))
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
        size = (shape[-2], shape[-1]) if len(shape) in (2, 3) else (1, 1)
        params = get_augmentation_params(len(train_set), self.num_classes, input_size=size)
        recommended = params["spec_augment_params"]
        if masks is True and not recommended["time_mask_param"] + recommended["freq_mask_param"]:
            raise OptionError(
                f"spec_augment=True needs larger spectrograms, got {shape[-2]} × {shape[-1]}, for which no masks are "
                "recommended. Use spec_augment={'time_mask_param': …, 'freq_mask_param': …}."
            )
        if not self.config["standardize"]:
            recommended["mask_value"] = "mean"
        given = {"spec_augment_params": masks, "gaussian_noise_params": noise}
        params |= {name: dict(arguments) for name, arguments in given.items() if isinstance(arguments, Mapping)}
        return AugmentedDataset(train_set, masks is not False, noise is not False, params, seed=seed)

    def _create_data_loaders(self, train_subset: Any, val_subset: Any) -> tuple[Any, Any]:
        """Return the loaders of both sides, made by the factory."""
        config = self.config
        options = {
            "batch_size": config["batch_size"],
            "has_standardization": config["standardize"],
            **(config["loader_options"] if config["optimize_dataloaders"] else {"num_workers": 0, "pin_memory": False}),
        }
        # Own generators: torch would seed workers from the global one, more often without workers than with persistent
        # ones, and the model's dropout would depend on that.
        generators = [torch.Generator().manual_seed(config["seed"]) for _ in range(2)]
        augmented = config["spec_augment"] is not False or config["gaussian_noise"] is not False
        train_loader = OptimalDataLoaderFactory.create_training_loader(
            train_subset, has_augmentation=augmented, seed=config["seed"], generator=generators[0], **options
        )
        val_loader = OptimalDataLoaderFactory.create_validation_loader(val_subset, generator=generators[1], **options)
        return train_loader, val_loader

    def _make_model(self) -> nn.Module:
        try:
            named = "num_classes" in inspect.signature(self.model_class).parameters
        except ValueError:  # it has no readable signature
            named = False
        model = self.model_class(num_classes=self.num_classes) if named else self.model_class(self.num_classes)
        return model.to(self.device)

    def _by_recording(self, probabilities: Any, recordings: Any, targets: Any) -> dict[str, Any]:
        names, means, classes = aggregate_predictions(probabilities, recordings, targets)
        predictions = means.argmax(axis=1)
        accuracy, f1 = accuracy_and_f1(confusion_matrix_of(classes, predictions, self.num_classes))
        found = {"names": names, "probabilities": means, "predictions": predictions, "targets": classes}
        return {**found, "accuracy": accuracy, "f1": f1}


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


def aggregate_predictions(
    probabilities: ArrayLike, recordings: ArrayLike, targets: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.float64], _Int64s]:
    """Return the recordings, the mean probabilities over the segments of each, and their classes.

    Parameters
    ----------
    probabilities
        Array of shape (segments, classes).
    recordings, targets
        One of each per segment.

    Examples
    --------
    >>> names, means, classes = aggregate_predictions([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], ["b", "a", "a"], [0, 1, 1])
    >>> names.tolist(), means.round(3).tolist(), classes.tolist()
    (['a', 'b'], [[0.3, 0.7], [0.9, 0.1]], [1, 0])
    """
    given, classes = np.asarray(probabilities, np.float64), np.asarray(targets, np.int64)
    names, number = np.unique(np.asarray(recordings), return_inverse=True)
    sums = np.zeros((len(names), given.shape[1]))
    np.add.at(sums, number, given)
    first = np.zeros(len(names), np.int64)
    first[number[::-1]] = classes[::-1]
    other = np.flatnonzero(first[number] != classes)
    if len(other):
        name = names[number[other[0]]]
        raise OptionError(
            f"All segments of a recording must have one class, but {str(name)!r} has segments of class "
            f"{first[number[other[0]]]} and of class {classes[other[0]]}. Use aggregate_predictions=False, or "
            "recordings of one class each."
        )
    return names, sums / np.bincount(number)[:, None], first


def _summarize_folds(folds: Sequence[Mapping[str, Any]], num_classes: int) -> dict[str, Any]:
    """Return mean and standard deviation over folds, and figures over all predictions of items unseen in training.

    Predictions are those of recordings if the folds have them, otherwise of single items.
    """
    summary: dict[str, Any] = {}
    for name, key in (("accuracy", "final_val_acc"), ("loss", "final_val_loss"), ("f1", "final_val_f1")):
        values = [float(fold[key]) for fold in folds]
        summary[f"mean_val_{name}"], summary[f"std_val_{name}"] = float(np.mean(values)), float(np.std(values))
        summary[f"individual_{_PLURALS[name]}"] = values
    if all(fold["recordings"] is not None for fold in folds):
        parts, summary["aggregated_over"] = [fold["recordings"] for fold in folds], "recordings"
    else:
        parts, summary["aggregated_over"] = (
            [{"probabilities": fold["val_probabilities"], "targets": fold["val_targets"]} for fold in folds],
            "items",
        )
    probabilities = np.concatenate([part["probabilities"] for part in parts]).astype(np.float64)
    targets = np.concatenate([part["targets"] for part in parts])
    confusion = confusion_matrix_of(targets, probabilities.argmax(axis=1), num_classes)
    summary["aggregated_count"] = len(targets)
    summary["aggregated_accuracy"], summary["aggregated_f1"] = accuracy_and_f1(confusion)
    likely = np.maximum(probabilities[np.arange(len(targets)), targets], np.finfo(np.float64).tiny)
    summary["aggregated_loss"] = float(-np.log(likely).mean())
    summary["confusion_matrix"] = confusion
    return summary


def _check_fold(dataset: Any, fold: Any) -> tuple[_Int64s, _Int64s]:
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
