"""From features, labels and authors to results: the same from arrays and files, and nobody is heard before."""

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.recipes.crossval.cross_validation import cross_val_training, single_fold_training
from penstock.recipes.crossval.folds import best_grouped_folds, best_grouped_split

N = 96
QUICK = {"optimize_dataloaders": False, "progress": False, "num_epochs": 3, "batch_size": 8, "max_split_attempts": 60}


@pytest.fixture
def data() -> dict[str, np.ndarray]:
    """Recordings of four segments by twelve authors; the species is where the spectrogram is loud."""
    rng = np.random.default_rng(3)
    authors = np.arange(N) // 8
    species = (authors + np.arange(N) // 4 % 2) % 3
    features = rng.normal(0, 1, (N, 1, 6, 24)).astype(np.float32)
    features[np.arange(N), 0, 2 * species] += 0.7
    return {
        "features": features,
        "labels": np.array(["finch", "lark", "owl"])[species],
        "authors": np.array([f"author {author}" for author in authors]),
        "recordings": np.arange(N) // 4,
    }


def _linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, num_classes))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["history"] == other["history"] and all(
        torch.equal(value, other["model_state"][name]) for name, value in one["model_state"].items()
    )


def test_every_author_is_validated_by_a_model_that_never_heard_them(data: dict[str, np.ndarray]) -> None:
    results, best = cross_val_training(
        **data, model_class=_linear, config={**QUICK, "num_epochs": 15, "learning_rate": 0.02}
    )
    expected = best_grouped_folds(data["labels"], data["authors"], 4, max_attempts=60)
    assert results["split"] == {"score": expected.score, "seed": expected.seed}
    assert results["classes"] == ["finch", "lark", "owl"]
    for fold, (train, val) in zip(results["fold_results"].values(), expected.folds, strict=True):
        assert np.array_equal(fold["train_indices"], train)
        assert np.array_equal(fold["val_indices"], val)
        assert not set(data["authors"][train]) & set(data["authors"][val])
        assert [results["classes"][target] for target in fold["val_targets"]] == data["labels"][val].tolist()
        mean, std = fold["standardization"]
        assert mean == pytest.approx(data["features"][train].mean(dtype=np.float64), rel=1e-9)
        assert std == pytest.approx(data["features"][train].std(dtype=np.float64), rel=1e-9)
    assert results["summary"]["aggregated_over"] == "recordings"
    assert results["summary"]["aggregated_count"] == N // 4
    assert results["summary"]["mean_val_accuracy"] > 0.7
    assert len(best["accuracies"]) == 4


def test_a_file_and_arrays_give_the_same(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "birds.npz", **data)
    arrays, _ = cross_val_training(**data, model_class=_linear, config=QUICK, spec_augment=True)
    stored, _ = cross_val_training(tmp_path / "birds.npz", model_class=_linear, config=QUICK, spec_augment=True)
    plain, _ = cross_val_training(
        **data, model_class=_linear, config={**QUICK, "spec_augment": False}, spec_augment=True
    )
    for name, fold in arrays["fold_results"].items():
        assert _same(fold, stored["fold_results"][name])
        assert not _same(fold, plain["fold_results"][name])  # the config takes precedence
    tensor, _ = cross_val_training(**{**data, "features": torch.from_numpy(data["features"]).double()},
                                   model_class=_linear, config=QUICK, spec_augment=True)  # fmt: skip
    assert _same(tensor["fold_results"]["fold_2"], arrays["fold_results"]["fold_2"])


def test_a_table_and_arrays_give_the_same(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    flat = {**data, "features": data["features"].reshape(N, -1)}
    arrays, _ = cross_val_training(**flat, model_class=_linear, config=QUICK)
    path = tmp_path / "birds.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["recordings", "labels", *(f"f{number}" for number in range(144)), "authors"])
        rows = zip(data["recordings"], data["labels"], flat["features"].tolist(), data["authors"], strict=True)
        writer.writerows([recording, label, *values, author] for recording, label, values, author in rows)
    stored, _ = cross_val_training(path, model_class=_linear, config=QUICK)
    assert stored["classes"] == arrays["classes"]
    assert all(_same(fold, stored["fold_results"][name]) for name, fold in arrays["fold_results"].items())
    path.write_text("labels,f0,species\n0,1.5,owl\n1,2.5,lark\n")
    with pytest.raises(SourceError, match=r"'species' is text\. Remove it from the table"):
        cross_val_training(path, model_class=_linear)
    path.write_text("labels,f0\n0,1.5\n1,\n")
    with pytest.raises(SourceError, match="row 2 has none in column 'f0'"):
        cross_val_training(path, model_class=_linear)
    path.write_text("f0,f1\n0,1.5\n")
    with pytest.raises(SourceError, match=r"birds\.csv must have a column 'labels', got columns 'f0', 'f1'"):
        cross_val_training(path, model_class=_linear)


def test_an_interrupted_cross_validation_resumes_in_its_fold(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    whole, _ = cross_val_training(**data, model_class=_linear, config=QUICK)
    made = []

    def failing(num_classes: int) -> nn.Module:
        made.append(num_classes)
        if len(made) == 3:
            raise RuntimeError("out of memory")
        return _linear(num_classes)

    config = {**QUICK, "checkpoint_dir": tmp_path / "run"}
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        cross_val_training(**data, model_class=failing, config=config)
    assert raised.value.__notes__ == ["[penstock] in fold 3 of 4"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["fold_1.pt", "fold_2.pt"]
    resumed, _ = cross_val_training(**data, model_class=_linear, config=config)
    assert all(_same(fold, whole["fold_results"][name]) for name, fold in resumed["fold_results"].items())
    assert resumed["split"] == whole["split"]


def test_without_authors_recordings_are_kept_whole_or_a_warning_is_given(
    data: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    del data["authors"]
    results, _ = cross_val_training(**data, model_class=_linear, config={**QUICK, "num_epochs": 1})
    for fold in results["fold_results"].values():
        assert not set(data["recordings"][fold["train_indices"]]) & set(data["recordings"][fold["val_indices"]])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    del data["recordings"]
    with caplog.at_level(logging.WARNING, "penstock"):
        results, _ = cross_val_training(**data, model_class=_linear, config={**QUICK, "num_epochs": 1})
    assert "Neither authors nor recordings" in caplog.text
    assert results["split"] is None
    for fold in results["fold_results"].values():
        assert np.unique(data["labels"][fold["val_indices"]], return_counts=True)[1].tolist() == [8, 8, 8]
    assert results["summary"]["aggregated_over"] == "items"


def test_a_single_fold_has_the_best_split_and_its_own_defaults(data: dict[str, np.ndarray]) -> None:
    config = {"progress": False, "num_epochs": 2, "optimize_dataloaders": False, "max_split_attempts": 60}
    got = single_fold_training(**data, model_class=_linear, config=config)
    expected = best_grouped_split(data["labels"], data["authors"], 0.2, max_attempts=60, min_test_segments=5)
    assert np.array_equal(got["val_indices"], expected.test)
    assert got["split"] == {"score": expected.score, "seed": expected.seed}
    assert got["recordings"]["targets"].tolist() == [got["val_targets"][row] for row in range(0, len(expected.test), 4)]
    by_class = single_fold_training(**data, model_class=_linear, config=config, use_predefined_split=False)
    kept = data["recordings"]
    assert not set(kept[by_class["train_indices"]]) & set(kept[by_class["val_indices"]])
    del data["authors"], data["recordings"]
    with pytest.raises(OptionError, match="needs authors or recordings, got neither"):
        single_fold_training(**data, model_class=_linear, config=config)
    alone = single_fold_training(**data, model_class=_linear, config=config, use_predefined_split=False)
    assert len(alone["val_indices"]) == 18  # a fifth of 32, of each species


def test_invalid_data_is_refused_by_name(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="are required, got no features and no labels"):
        cross_val_training(model_class=_linear)
    with pytest.raises(
        OptionError, match="data_path excludes arrays, got both it and features, labels, authors, recordings"
    ):
        cross_val_training("birds.npz", **data, model_class=_linear)
    with pytest.raises(SourceError, match=r"must be an \.npz, .* or \.parquet file, got .*birds.xls.* np\.savez"):
        cross_val_training(tmp_path / "birds.xls", model_class=_linear)
    (tmp_path / "birds.npz").write_bytes(b"no zip")
    with pytest.raises(ReadError, match=r"Could not read .*birds\.npz"):
        cross_val_training(tmp_path / "birds.npz", model_class=_linear)
    np.savez(tmp_path / "objects.npz", features=np.array([{}], object), labels=[0])
    with pytest.raises(ReadError, match=r"Could not read .*objects\.npz"):
        cross_val_training(tmp_path / "objects.npz", model_class=_linear)
    with pytest.raises(OptionError, match="model_class must be a function that returns a model, got None"):
        cross_val_training(**data)
    with pytest.raises(SourceError, match=r"authors must have one entry per item, shape \(96,\), got \(95,\)"):
        cross_val_training(**{**data, "authors": data["authors"][1:]}, model_class=_linear)
    with pytest.raises(SourceError, match="Labels must be 0, 1, …, or names, got -1"):
        cross_val_training(**{**data, "labels": np.full(N, -1)}, model_class=_linear)
    with pytest.raises(SourceError, match=r"features must be real numbers .*\(96,\)"):
        cross_val_training(**{**data, "features": np.zeros(N)}, model_class=_linear)
    with pytest.raises(OptionError, match="Did you mean 'k_folds'"):
        cross_val_training(**data, model_class=_linear, config={"kfolds": 3})
    with pytest.raises(OptionError, match="Labels must be from 0 to 1 with num_classes=2, got 2"):
        cross_val_training(**data, model_class=_linear, num_classes=2, config=QUICK)
