"""Figures of a training, from its predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError

__all__ = [
    "accuracy_and_f1",
    "aggregate_predictions",
    "confusion_matrix_of",
    "summarize_folds",
]

_Floats = NDArray[np.float64]
_Int64s = NDArray[np.int64]

_PLURALS = {"loss": "losses", "accuracy": "accuracies", "f1": "f1s"}


def confusion_matrix_of(targets: ArrayLike, predictions: ArrayLike, num_classes: int) -> _Int64s:
    """Return how often each class (row) was predicted as each other (column).

    Examples
    --------
    >>> confusion_matrix_of([0, 0, 1], [0, 1, 1], 2).tolist()
    [[1, 1], [0, 1]]
    """
    pairs = np.asarray(targets, np.int64) * num_classes + np.asarray(predictions, np.int64)
    counted = np.bincount(pairs, minlength=num_classes * num_classes)
    return counted.reshape(num_classes, num_classes).astype(np.int64)


def accuracy_and_f1(confusion: _Int64s) -> tuple[float, float]:
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


def aggregate_predictions(
    probabilities: ArrayLike, recordings: ArrayLike, targets: ArrayLike
) -> tuple[NDArray[Any], _Floats, _Int64s]:
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


def summarize_folds(folds: Sequence[Mapping[str, Any]], num_classes: int) -> dict[str, Any]:
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
