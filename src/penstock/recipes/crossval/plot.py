"""Plot a training: losses and accuracies over the epochs, and the confusion matrix."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.errors import MissingDependency
from penstock.files.figures import save_figure
from penstock.observe.text import GREY, SANS, replace_missing_glyphs, shorten
from penstock.recipes.crossval.results import fold_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_results"]

# Colors of Okabe and Ito, as in the other figures.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DPI = 120
_MOST_NAMES, _MOST_NUMBERS = 24, 12  # most classes with readable names, and with readable counts
_NAME_LETTERS = 14


def plot_results(results: Mapping[str, Any], path: str | Path) -> None:
    """Plot losses and accuracies over the epochs, and the confusion matrix, to a file (.png, .pdf, .svg).

    Validation is a solid line, training a dotted one; a dot marks the epoch whose weights were kept.

    Parameters
    ----------
    results
        The first result of `cross_val_training`, or the result of `single_fold_training`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "Plotting results") from error
    folds = fold_results(results)
    figure = Figure(figsize=(13.0, 4.4), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    losses, accuracies, confused = figure.subplots(1, 3, width_ratios=(1, 1, 1.05))
    _plot_epochs(losses, folds, "losses", "loss")
    losses.set_ylim(bottom=0)
    _plot_epochs(accuracies, folds, "accuracies", "accuracy")
    accuracies.set_ylim(0, 1.02)
    accuracies.legend(loc="lower right", frameon=False, prop={"family": SANS, "size": 8.5})
    summary = results.get("summary", results)
    _plot_confusion(confused, np.asarray(summary["confusion_matrix"]), results.get("classes"))
    _label_axes(confused, f"Confusion matrix ({summary.get('aggregated_over', 'items')})", "predicted", "true class")
    if "summary" in results:
        title = (
            f"{len(folds)} folds: accuracy {summary['mean_val_accuracy']:.1%} ± {summary['std_val_accuracy']:.1%}; "
            f"{summary['aggregated_accuracy']:.1%} of {summary['aggregated_count']:,} {summary['aggregated_over']}"
        )
    else:
        title = f"accuracy {results['final_val_acc']:.1%} of {len(results['val_indices']):,} items"
    figure.suptitle(title, x=0.01, ha="left", size=11, family=SANS)
    save_figure(figure, Path(path), _DPI)


def _plot_epochs(axes: "Axes", folds: Sequence[Mapping[str, Any]], name: str, label: str) -> None:
    for number, fold in enumerate(folds, 1):
        history, colour = fold["history"], _COLOURS[(number - 1) % len(_COLOURS)]
        epochs = np.arange(1, history["total_epochs"] + 1)
        axes.plot(epochs, history[f"train_{name}"], color=colour, linestyle=":", linewidth=1)
        values = history[f"val_{name}"]
        axes.plot(epochs, values, color=colour, linewidth=1.5, label=f"fold {number}")
        best = history["best_epoch"]
        axes.plot([best + 1], [values[best]], marker="o", markersize=5, color=colour)
    _label_axes(axes, f"{label.capitalize()}: validation —, training ···", "epoch", label)
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, color="#EEEEEE", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _plot_confusion(axes: "Axes", confusion: Any, classes: Sequence[str] | None) -> None:
    """Plot a confusion matrix: colors are fractions of the true class, numbers are counts."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    many = len(confusion)
    names = [shorten(replace_missing_glyphs(name), _NAME_LETTERS) for name in classes or map(str, range(many))]
    if many <= _MOST_NAMES and len(names) == many:
        size = 8 if many <= _MOST_NUMBERS else 6
        axes.set_xticks(range(many), names, rotation=45 if max(map(len, names)) > 2 else 0, ha="right", size=size)
        axes.set_yticks(range(many), names, size=size)
    if many <= _MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(confusion):
            colour = "white" if shares[row, column] > 0.55 else GREY
            if count:
                axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, size=8, family=SANS)


def _label_axes(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", size=9.5, family=SANS)
    axes.set_xlabel(x, size=9, family=SANS)
    axes.set_ylabel(y, size=9, family=SANS)
    axes.tick_params(labelsize=8, colors=GREY)
