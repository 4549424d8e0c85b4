"""Cross-validated training in one call, from features, labels and authors."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import TensorDataset

from penstock.convert.table import read_table
from penstock.core.errors import OptionError, PenstockError, ReadError, SourceError
from penstock.core.limits import check_expansion
from penstock.core.text import cause
from penstock.files.kinds import local_path
from penstock.files.regular import open_regular
from penstock.recipes.crossval.engine import DEFAULTS, SINGLE_FOLD_DEFAULTS, TrainingEngine, check_config
from penstock.recipes.crossval.folds import best_grouped_folds, best_grouped_split, stratified_folds

__all__ = ["cross_val_training", "single_fold_training"]

_LOG = logging.getLogger("penstock")

_NEEDED, _OPTIONAL = ("features", "labels"), ("authors", "recordings")


def cross_val_training(
    data_path: str | Path | None = None,
    features: ArrayLike | torch.Tensor | None = None,
    labels: ArrayLike | None = None,
    authors: ArrayLike | None = None,
    model_class: Callable[..., nn.Module] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    spec_augment: bool = False,
    gaussian_noise: bool = False,
    *,
    recordings: ArrayLike | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train `k_folds` models, each validated on authors it has never seen, and return `(results, best_results)`.

    Parameters
    ----------
    data_path
        A file instead of the arrays: .npz with `features` and `labels`, and optionally `authors` and `recordings`; or
        a table, .csv, .tsv or .parquet, with columns of these names, whose other columns, all numbers, are the features
        of an item. In Parquet, `features` may be a column of lists.
    features
        Array of shape (items, …), such as spectrograms (items, channel, frequency, time). Kept in memory as float32.
    labels
        One per item: 0, 1, …, or names.
    authors
        Who recorded each item: no author is in both training and validation of a fold. None to keep recordings whole;
        without recordings, items are split by class alone, with a warning, because the validation then also rewards
        what was learned about an author.
    model_class
        Called with the number of classes, once per fold.
    num_classes
        None for the number of different labels.
    config
        Keys of `penstock.recipes.crossval.engine.DEFAULTS`; they take precedence over the next two arguments.
    spec_augment, gaussian_noise
        Whether masks, and noise, are applied to training items.
    recordings
        Recording that each item is a segment of: predictions are averaged over the segments of a recording.

    Returns
    -------
    See `TrainingEngine.run_cross_validation`. `results` also has `classes`, the names of the labels, and `split`: the
    score of the folds (0 is ideal) and their seed, if authors or recordings were kept whole.
    """
    defaults = {**DEFAULTS, "spec_augment": spec_augment, "gaussian_noise": gaussian_noise}
    chosen = check_config(config, defaults)
    data = _Data.of(data_path, features, labels, authors, recordings)
    engine = _make_engine(model_class, num_classes, data, chosen)
    split = None
    if data.groups is None:
        _LOG.warning("Neither authors nor recordings were given: related items may be in both training and validation.")
        folds = stratified_folds(data.labels, chosen["k_folds"], seed=chosen["seed"])
    else:
        folds, score, seed = best_grouped_folds(
            data.labels,
            data.groups,
            chosen["k_folds"],
            max_attempts=chosen["max_split_attempts"],
            min_val_segments=chosen["min_val_segments"],
            show=chosen["progress"],
        )
        split = {"score": score, "seed": seed}
    results, best_results = engine.run_cross_validation(data.dataset, folds, recordings=data.recordings)
    return {**results, "classes": data.classes, "split": split}, best_results


def single_fold_training(
    data_path: str | Path | None = None,
    features: ArrayLike | torch.Tensor | None = None,
    labels: ArrayLike | None = None,
    authors: ArrayLike | None = None,
    model_class: Callable[..., nn.Module] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    use_predefined_split: bool = True,
    spec_augment: bool = False,
    gaussian_noise: bool = False,
    *,
    recordings: ArrayLike | None = None,
) -> dict[str, Any]:
    """Train one model, validated on `test_size` of each class, and return its results.

    Parameters that are not described here are those of `cross_val_training`.

    Parameters
    ----------
    config
        Keys of `penstock.recipes.crossval.engine.SINGLE_FOLD_DEFAULTS`.
    use_predefined_split
        True: no author is in both training and validation; needs authors, or recordings instead. False: items are split
        by class alone, or by recordings if given, regardless of authors.

    Returns
    -------
    See `TrainingEngine.run_single_fold_predefined`; also `classes` and `split`.
    """
    defaults = {**SINGLE_FOLD_DEFAULTS, "spec_augment": spec_augment, "gaussian_noise": gaussian_noise}
    chosen = check_config(config, defaults)
    data = _Data.of(data_path, features, labels, authors, recordings)
    engine = _make_engine(model_class, num_classes, data, chosen)
    if not use_predefined_split:
        result = engine.run_single_fold_stratified(data.dataset, recordings=data.recordings)
        return {**result, "classes": data.classes, "split": None}
    if data.groups is None:
        raise OptionError(
            "use_predefined_split=True needs authors or recordings, got neither. Give them, or use "
            "use_predefined_split=False to split items by class alone."
        )
    found = best_grouped_split(
        data.labels,
        data.groups,
        chosen["test_size"],
        max_attempts=chosen["max_split_attempts"],
        min_test_segments=chosen["min_test_segments"],
        show=chosen["progress"],
    )
    result = engine.run_single_fold_predefined(data.dataset, found.train, found.test, recordings=data.recordings)
    return {**result, "classes": data.classes, "split": {"score": found.score, "seed": found.seed}}


def _make_engine(model_class: Any, num_classes: int | None, data: "_Data", config: Mapping[str, Any]) -> TrainingEngine:
    return TrainingEngine(model_class, len(data.classes) if num_classes is None else num_classes, config)


class _Data(NamedTuple):
    dataset: TensorDataset
    labels: NDArray[np.int64]
    classes: list[str]
    groups: Any
    """Groups that are kept whole: authors, or recordings, or None."""

    recordings: Any

    @classmethod
    def of(cls, data_path: Any, features: Any, labels: Any, authors: Any, recordings: Any) -> "_Data":
        given = {"features": features, "labels": labels, "authors": authors, "recordings": recordings}
        if data_path is not None:
            repeated = [name for name, value in given.items() if value is not None]
            if repeated:
                raise OptionError(f"data_path excludes arrays, got both it and {', '.join(repeated)}.")
            local_path(data_path)  # a URL would be a file that does not exist
            given = _read_file(Path(data_path))
        missing = [name for name in _NEEDED if given[name] is None]
        if missing:
            raise OptionError(f"data_path, or features and labels, are required, got no {' and no '.join(missing)}.")
        x = _to_tensor(given["features"])
        classes, y = _encode_labels(given["labels"])
        for name in ("labels", *_OPTIONAL):
            if given[name] is not None and np.shape(given[name]) != (len(x),):
                raise SourceError(
                    f"{name} must have one entry per item, shape {(len(x),)}, got {np.shape(given[name])}."
                )
        groups = given["recordings"] if given["authors"] is None else given["authors"]
        return cls(TensorDataset(x, torch.from_numpy(y)), y, classes, groups, given["recordings"])


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        return _read_columns(path)
    if path.suffix != ".npz":
        raise SourceError(
            f"data_path must be an .npz, .csv, .tsv or .parquet file, got {path}. Save it once: "
            "np.savez(path, features=…, labels=…, authors=…)."
        )
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as stored:
            n_bytes = sum(member.file_size for member in stored.zip.infolist())
            check_expansion(f"The arrays of {path}", n_bytes, path.stat().st_size)
            unknown = sorted(set(stored.files) - set(_NEEDED) - set(_OPTIONAL))
            if unknown:
                _LOG.warning("%s also has %s, which is ignored.", path, ", ".join(unknown))
            return {name: stored[name] if name in stored.files else None for name in (*_NEEDED, *_OPTIONAL)}
    except PenstockError:
        raise
    except Exception as error:  # a damaged archive can make zipfile and NumPy raise anything
        raise ReadError(f"Could not read {path}: {cause(error)}.") from error


def _read_columns(path: Path) -> dict[str, Any]:
    """Return the arrays of a table: the columns with their names, and all others, or `features`, as the features."""
    table = read_table(path)
    if "labels" not in table:
        raise SourceError(f"The table {path} must have a column 'labels', got columns {', '.join(map(repr, table))}.")
    columns = {name: table.pop(name, None) for name in ("labels", *_OPTIONAL)}
    for name, values in {**columns, **table}.items():
        if values is not None and None in values:
            raise SourceError(
                f"Cells of {path} must not be empty, but row {values.index(None) + 1} has none in column {name!r}."
            )
    wrong = [name for name, values in table.items() if name != "features" and isinstance(values[0], str)]
    if wrong:
        raise SourceError(
            f"The columns of {path} besides {', '.join(map(repr, columns))} must be features, which are numbers, but "
            f"{', '.join(map(repr, wrong))} is text. Remove it from the table."
        )
    features = table["features"] if "features" in table else list(zip(*table.values(), strict=True))
    try:
        stacked = np.array(features, np.float32) if features else None
    except (TypeError, ValueError) as error:
        raise SourceError(f"The features of {path} must be numbers, as many in each row: {error}") from error
    return {"features": stacked, **{name: values and np.array(values) for name, values in columns.items()}}


def _to_tensor(features: Any) -> torch.Tensor:
    if isinstance(features, torch.Tensor):
        return features.detach().float()
    array = np.asarray(features)
    if array.ndim < 2 or array.dtype.kind not in "fiu" or not len(array):
        raise SourceError(
            "features must be real numbers of shape (items, …) with at least one item, got "
            f"{array.dtype} {array.shape}."
        )
    plain = np.ascontiguousarray(array, np.float32)
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def _encode_labels(labels: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of the classes, and the class number of each item; integers stay as they are."""
    given = np.asarray(labels)
    if given.dtype.kind in "iu" and given.size:
        if given.min() < 0:
            raise SourceError(f"Labels must be 0, 1, …, or names, got {given.min()}.")
        return [str(number) for number in range(int(given.max()) + 1)], given.astype(np.int64)
    names = given.tolist()
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise SourceError("Labels must be integers or names, one per item.")
    classes, number = np.unique(np.array(names), return_inverse=True)
    return classes.tolist(), number.astype(np.int64)
