"""Results of a training: figures from predictions, a table of all folds, a file of all epochs."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError
from penstock.files.durable import write_aside

__all__ = [
    "accuracy_and_f1",
    "aggregate_predictions",
    "confusion_matrix_of",
    "fold_results",
    "format_results",
    "summarize_folds",
    "write_results_csv",
]

_Floats = NDArray[np.float64]
_Int64s = NDArray[np.int64]

_PLURALS = {"loss": "losses", "accuracy": "accuracies", "f1": "f1s"}
_COLUMNS = {f"{side}_{one}": f"{side}_{many}" for side in ("train", "val") for one, many in _PLURALS.items()}
_HEADINGS = ("fold", "train", "val", "epochs", "best", "val loss", "accuracy", "macro F1", "waiting")


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


def format_results(results: Mapping[str, Any]) -> str:
    """Return a table with one row per fold, and a summary.

    Parameters
    ----------
    results
        The first result of `cross_val_training`, or the result of `single_fold_training`.
    """
    folds = fold_results(results)
    rows = [_HEADINGS] + [
        (
            str(number),
            f"{len(fold['train_indices']):,}",
            f"{len(fold['val_indices']):,}",
            str(fold["history"]["total_epochs"]),
            str(fold["history"]["best_epoch"] + 1),
            f"{fold['final_val_loss']:.4f}",
            f"{fold['final_val_acc']:.1%}",
            f"{fold['final_val_f1']:.3f}",
            f"{fold['waiting_share']:.1%}",
        )
        for number, fold in enumerate(folds, 1)
    ]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, wide, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in wide))
    if "summary" in results:
        summary = results["summary"]
        lines.append(
            f"accuracy {summary['mean_val_accuracy']:.1%} ± {summary['std_val_accuracy']:.1%} over {len(folds)} folds; "
            f"{summary['aggregated_accuracy']:.1%} of {summary['aggregated_count']:,} {summary['aggregated_over']}, "
            f"macro F1 {summary['aggregated_f1']:.3f}"
        )
    return "\n".join(lines)


def write_results_csv(results: Mapping[str, Any], path: str | Path) -> None:
    """Write one row per epoch and fold; the file is complete or missing.

    Columns: fold and epoch, counted from 1; loss, accuracy and macro F1 of training and validation; the learning rate;
    and whether the weights of this epoch were kept.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["fold", "epoch", *_COLUMNS, "learning_rate", "kept"])
    for number, fold in enumerate(fold_results(results), 1):
        history = fold["history"]
        for epoch in range(history["total_epochs"]):
            figures = [repr(history[name][epoch]) for name in (*_COLUMNS.values(), "learning_rates")]
            writer.writerow([number, epoch + 1, *figures, int(epoch == history["best_epoch"])])
    write_aside(Path(path), text.getvalue().encode())


def fold_results(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results of each fold, of a cross-validation or of a single training."""
    if "fold_results" in results:
        return list(results["fold_results"].values())
    if "history" in results:
        return [results]
    raise OptionError("results must be those of cross_val_training or single_fold_training.")
