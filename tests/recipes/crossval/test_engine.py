"""The engine trains only on the given items, keeps the best weights, and resumes as if it had never stopped."""

import copy
import multiprocessing
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from penstock.core.errors import OptionError, ReadError, ResumeError
from penstock.recipes.crossval.engine import (
    DEFAULTS,
    TrainingEngine,
    aggregate_predictions,
    check_config,
    class_weights,
    labels_of,
)
from penstock.transform.noise import GaussianNoise
from penstock.transform.specaugment import SpecAugment

N, CLASSES = 60, 3
TRAIN, VAL = np.arange(0, 40), np.arange(59, 39, -1)
PLAIN = {"optimize_dataloaders": False, "progress": False, "batch_size": 8, "num_epochs": 4, "learning_rate": 0.01}


def _features() -> np.ndarray:
    """Spectrograms (1, 4, 6) whose first value is the number of the item, over 10; classes are hard to tell."""
    rng = np.random.default_rng(5)
    features = rng.normal(3.0, 2.0, (N, 1, 4, 6)).astype(np.float32)
    features[:, 0, 0, 0] = np.arange(N) / 10
    return features


def _labels() -> np.ndarray:
    return np.random.default_rng(6).permutation(np.arange(N) % CLASSES)


def _dataset() -> TensorDataset:
    return TensorDataset(torch.from_numpy(_features()), torch.from_numpy(_labels()))


class Seen:
    """A dataset that records which items were read, and may fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.base, self.asked, self.fail_at = _dataset(), [], fail_at

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, number: int) -> Any:
        if self.fail_at is not None and len(self.asked) == self.fail_at:
            raise RuntimeError("the disk is gone")
        self.asked.append(number)
        return self.base[number]


class Small(nn.Module):
    """With dropout and batch norm: state that is random, and state that is no weight."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(24, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, num_classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _zeros(num_classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, num_classes))
    for part in model.parameters():
        nn.init.zeros_(part)
    return model


def _run(model: Any = Small, dataset: Any = None, **config: Any) -> dict[str, Any]:
    engine = TrainingEngine(model, CLASSES, {**PLAIN, **config})
    return engine.run_single_fold_predefined(_dataset() if dataset is None else dataset, TRAIN, VAL)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["history"] == other["history"]
        and all(torch.equal(value, other["model_state"][name]) for name, value in one["model_state"].items())
        and np.array_equal(one["val_probabilities"], other["val_probabilities"])
    )


def test_statistics_are_those_of_the_training_items_alone() -> None:
    mean, std = _run(num_epochs=1)["standardization"]
    assert mean == pytest.approx(_features()[TRAIN].mean(dtype=np.float64), rel=1e-9)
    assert std == pytest.approx(_features()[TRAIN].std(dtype=np.float64), rel=1e-9)
    means, stds = _run(num_epochs=1, standardize_axis=-2)["standardization"]
    bins = _features()[TRAIN].astype(np.float64).transpose(2, 0, 1, 3).reshape(4, -1)
    assert np.allclose(means, bins.mean(axis=1), rtol=1e-9)
    assert np.allclose(stds, bins.std(axis=1), rtol=1e-9)
    assert _run(num_epochs=1, standardize=False)["standardization"] is None


def test_the_weights_equal_those_of_a_plain_loop_over_the_same_items() -> None:
    """SGD with clipping and class weights, written out again from the items that were asked for."""
    seen = Seen()
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1)
    got = _run(_zeros, seen, optimizer=sgd, use_class_weights=True, gradient_clipping=0.5, num_epochs=2)
    features, labels = _features(), _labels()
    inputs = torch.from_numpy(((features.astype(np.float64) - got["standardization"][0])
                               / (got["standardization"][1] + 1e-8)).astype(np.float32))  # fmt: skip
    model, targets = _zeros(CLASSES), torch.from_numpy(labels)
    counts = np.array([np.sum(labels[TRAIN] == number) for number in range(CLASSES)])
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(len(TRAIN) / (CLASSES * counts), dtype=torch.float32))
    optimizer = sgd(model.parameters())
    # Items read: all for their labels, the training items for the statistics, then each epoch.
    asked = seen.asked[N + len(TRAIN) :]
    val_losses, train_losses, states = [], [], []
    for epoch in range(2):
        order, validated = asked[epoch * N : epoch * N + 40], asked[epoch * N + 40 : (epoch + 1) * N]
        assert sorted(order) == TRAIN.tolist()
        assert validated == VAL.tolist()
        total = 0.0
        for begin in range(0, 40, 8):
            batch = order[begin : begin + 8]
            loss = criterion(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += loss.item() * 8
        train_losses.append(total / 40)
        with torch.no_grad():
            val_losses.append(criterion(model(inputs[VAL.copy()]), targets[VAL.copy()]).item())
        states.append(copy.deepcopy(model.state_dict()))
    assert asked[:40] != asked[N : N + 40]  # epochs differ
    assert np.allclose(got["history"]["train_losses"], train_losses, rtol=1e-6)
    assert np.allclose(got["history"]["val_losses"], val_losses, rtol=1e-6)
    best = states[int(np.argmin(val_losses))]
    assert all(torch.allclose(best[name], value, rtol=1e-5, atol=1e-7) for name, value in got["model_state"].items())


def test_validation_is_standardized_and_never_augmented() -> None:
    got = _run(spec_augment={"p": 1.0}, gaussian_noise={"std": 5.0, "p": 1.0})
    mean, std = got["standardization"]
    model = Small(CLASSES)
    model.load_state_dict(got["model_state"])
    inputs = torch.from_numpy(((_features()[VAL].astype(np.float64) - mean) / (std + 1e-8)).astype(np.float32))
    with torch.no_grad():
        expected = model.eval()(inputs).softmax(dim=1).numpy()
    assert np.allclose(got["val_probabilities"], expected, atol=1e-6)
    assert got["val_targets"].tolist() == _labels()[VAL].tolist()
    assert got["val_predictions"].tolist() == expected.argmax(axis=1).tolist()


def test_training_items_are_noisy_then_masked_after_they_are_standardized() -> None:
    config = {**PLAIN, "gaussian_noise": {"std": 0.5, "p": 1.0}, "spec_augment": {"time_mask_param": 3, "p": 1.0}}
    engine = TrainingEngine(Small, CLASSES, config)
    train, val, _ = engine._make_subsets(_dataset(), TRAIN, VAL, 7)
    assert [type(step).__name__ for step in train.steps] == ["Standardize", "GaussianNoise", "SpecAugment"]
    assert [type(step).__name__ for step in val.steps] == ["Standardize"]
    assert train.steps[1:] == (GaussianNoise(std=0.5, p=1.0), SpecAugment(time_mask_param=3, p=1.0))
    train.set_epoch(0)
    first, again = train[3][0], train[3][0]
    train.set_epoch(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, train[3][0])
    # In raw units, a mask of 0.0 might be anything: the mean of the item then.
    raw = TrainingEngine(Small, CLASSES, {**PLAIN, "spec_augment": True, "standardize": False})
    wide = TensorDataset(torch.zeros(N, 20, 24), torch.from_numpy(_labels()))
    masks = raw._make_subsets(wide, TRAIN, VAL, 7)[0].steps[-1]
    assert (masks.mask_value, masks.time_mask_param, masks.freq_mask_param) == ("mean", 2, 1)
    with pytest.raises(OptionError, match="needs larger spectrograms, got 4 × 6"):
        _run(spec_augment=True)
    with pytest.raises(OptionError, match="would destroy data"):
        _run(gaussian_noise={"std": 0.1, "value_range": (0, 1)})


def test_the_best_weights_are_kept_as_they_were() -> None:
    got = _run(num_epochs=25, learning_rate=0.1, early_stopping=0)  # overfits
    history = got["history"]
    best = int(np.argmin(history["val_losses"]))
    assert history["best_epoch"] == best < 24
    assert history["total_epochs"] == 25
    assert not history["early_stopped"]
    assert got["final_val_loss"] == history["val_losses"][best]
    assert got["final_val_acc"] == history["val_accuracies"][best]
    assert all(torch.equal(value, got["model_state"][name]) for name, value in got["model"].state_dict().items())
    # A training that ends with that epoch has the same weights: nothing changed them later.
    short = _run(num_epochs=best + 1, learning_rate=0.1, early_stopping=0)
    assert all(torch.equal(value, short["model_state"][name]) for name, value in got["model_state"].items())


@pytest.mark.parametrize("patience", [1, 3])
def test_training_stops_after_the_given_epochs_without_a_smaller_loss(patience: int) -> None:
    losses = _run(num_epochs=25, learning_rate=0.1, early_stopping=0)["history"]["val_losses"]
    best, waited, expected = np.inf, 0, 25
    for number, loss in enumerate(losses, 1):
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == patience:
            expected = number
            break
    got = _run(num_epochs=25, learning_rate=0.1, early_stopping=patience)["history"]
    assert expected < 25
    assert got["early_stopped"]
    assert got["total_epochs"] == expected
    assert got["val_losses"] == losses[:expected]


FULL = {
    "num_epochs": 6,
    "spec_augment": {"time_mask_param": 3, "freq_mask_param": 2},
    "gaussian_noise": True,
    "optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


def test_resuming_after_any_epoch_is_bit_equal_to_never_stopping(tmp_path: Path) -> None:
    whole = _run(**FULL)
    for stop in range(1, 7):
        folder = tmp_path / str(stop)
        _run(**{**FULL, "num_epochs": stop}, checkpoint_dir=folder)
        assert [path.name for path in folder.iterdir()] == ["fold_1.pt"]  # and no incomplete file
        torch.manual_seed(stop)  # whatever the process did meanwhile
        assert _same(_run(**FULL, checkpoint_dir=folder), whole)


def test_resuming_after_a_failure_in_the_middle_of_an_epoch_is_bit_equal(tmp_path: Path) -> None:
    whole = _run(**FULL)
    # After the statistics and two epochs, in the middle of the third.
    with pytest.raises(RuntimeError, match="the disk is gone") as raised:
        _run(dataset=Seen(fail_at=40 + 2 * 60 + 20), **FULL, checkpoint_dir=tmp_path)
    assert "[penstock] in fold 1 of 1" in raised.value.__notes__
    seen = Seen()
    assert _same(_run(dataset=seen, **FULL, checkpoint_dir=tmp_path), whole)
    assert len(seen.asked) == 1 + 40 + 4 * 60 + 20  # one for its shape; the rest of the epochs, and the best weights


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    _run(num_epochs=2, checkpoint_dir=tmp_path)
    with pytest.raises(ResumeError, match=r"optimizer was .* lr: 0\.01 .* and is .* lr: 0\.5 "):
        _run(num_epochs=3, checkpoint_dir=tmp_path, learning_rate=0.5)
    with pytest.raises(ResumeError, match="2 epochs done, but num_epochs is 1"):
        _run(num_epochs=1, checkpoint_dir=tmp_path)
    engine = TrainingEngine(Small, CLASSES, {**PLAIN, "checkpoint_dir": tmp_path})
    with pytest.raises(ResumeError, match="items was"):
        engine.run_single_fold_predefined(_dataset(), TRAIN[1:], VAL)
    with pytest.raises(ResumeError, match="belongs to another model"):
        _run(_zeros, num_epochs=2, checkpoint_dir=tmp_path)
    (tmp_path / "fold_1.pt").write_bytes(b"torn")
    with pytest.raises(ReadError, match=r"Could not read .*fold_1\.pt as a checkpoint"):
        _run(checkpoint_dir=tmp_path)


FOLDS = [(np.arange(20, 60), np.arange(0, 20)), (np.arange(0, 40), np.arange(40, 60))]


def test_cross_validation_summarizes_its_folds() -> None:
    recordings = np.array([f"r{number // 5}" for number in range(N)])
    dataset = TensorDataset(torch.from_numpy(_features()), torch.from_numpy(np.arange(N) // 5 % CLASSES))
    engine = TrainingEngine(Small, CLASSES, PLAIN)
    results, best = engine.run_cross_validation(dataset, FOLDS, recordings=recordings)
    folds = list(results["fold_results"].values())
    accuracies = [np.mean(fold["val_probabilities"].argmax(axis=1) == fold["val_targets"]) for fold in folds]
    assert results["summary"]["individual_accuracies"] == pytest.approx(accuracies)
    assert results["summary"]["mean_val_accuracy"] == pytest.approx(np.mean(accuracies))
    assert best["losses"] == [min(fold["history"]["val_losses"]) for fold in folds]
    # Mean probabilities of each recording, by a plain loop.
    right, count = 0, 0
    for fold, (_, val) in zip(folds, FOLDS, strict=True):
        for name in sorted(set(recordings[val])):
            total = np.zeros(CLASSES)
            rows = [row for row, item in enumerate(val) if recordings[item] == name]
            for row in rows:
                total += fold["val_probabilities"][row].astype(np.float64)
            place = fold["recordings"]["names"].tolist().index(name)
            assert fold["recordings"]["probabilities"][place].tolist() == (total / len(rows)).tolist()
            assert fold["recordings"]["targets"][place] == fold["val_targets"][rows[0]]
            right += total.argmax() == fold["val_targets"][rows[0]]
            count += 1
    assert results["summary"]["aggregated_over"] == "recordings"
    assert results["summary"]["aggregated_count"] == count == 8
    assert results["summary"]["aggregated_accuracy"] == right / count
    alone, _ = TrainingEngine(Small, CLASSES, {**PLAIN, "aggregate_predictions": False}).run_cross_validation(
        dataset, FOLDS, recordings=recordings
    )
    assert alone["summary"]["aggregated_over"] == "items"
    assert alone["summary"]["aggregated_accuracy"] == pytest.approx(np.mean(accuracies))  # folds of one size
    # Models of different folds differ, also in their initial weights.
    assert not torch.equal(*(fold["model_state"]["layers.1.weight"] for fold in folds))


def test_an_error_in_a_fold_is_raised_with_its_number() -> None:
    dataset = Seen(fail_at=40 + 4 * 60 + 20 + 50)  # in the second fold
    with pytest.raises(RuntimeError, match="the disk is gone") as raised:
        TrainingEngine(Small, CLASSES, PLAIN).run_cross_validation(dataset, FOLDS)
    assert "[penstock] in fold 2 of 2" in raised.value.__notes__


def test_workers_change_nothing_and_are_ended() -> None:
    plain = _run(**FULL)
    options = {"optimize_dataloaders": True, "loader_options": {"num_workers": 2, "multiprocessing_context": "fork"}}
    assert _same(_run(**FULL, **options), plain)
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="the disk is gone") as raised:
        _run(dataset=Seen(fail_at=70), **options)
    assert raised  # which holds the loaders, and still:
    assert multiprocessing.active_children() == []


def test_the_same_seed_gives_the_same_and_leaves_global_randomness_alone() -> None:
    torch.manual_seed(1)
    random.seed(2)
    before = torch.get_rng_state(), random.getstate()
    first = _run(**FULL)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    torch.manual_seed(99)
    assert _same(_run(**FULL), first)
    assert not _same(_run(**{**FULL, "seed": 43}), first)


def test_class_weights_are_items_over_classes_times_items_of_the_class() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [2])
    assert class_weights(labels, 3).tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    with pytest.raises(OptionError, match=r"all classes 0 … 3 in training, and no others; class 3 has no item"):
        class_weights(labels, 4)
    assert labels_of(_dataset()).tolist() == labels_of(Seen()).tolist() == _labels().tolist()


def test_a_stratified_split_keeps_recordings_whole() -> None:
    engine = TrainingEngine(Small, CLASSES, {**PLAIN, "num_epochs": 1, "max_split_attempts": 50, "test_size": 0.25})
    got = engine.run_single_fold_stratified(_dataset())
    assert np.bincount(_labels()[got["val_indices"]]).tolist() == [5, 5, 5]
    labels = np.arange(N) // 4 % CLASSES
    dataset, recordings = TensorDataset(torch.from_numpy(_features()), torch.from_numpy(labels)), np.arange(N) // 4
    got = engine.run_single_fold_stratified(dataset, recordings=recordings)
    assert not set(recordings[got["train_indices"]]) & set(recordings[got["val_indices"]])
    with pytest.raises(
        OptionError, match="must not have items in both training and validation, but 1 have, the first is '2'"
    ):
        engine.run_single_fold_predefined(dataset, np.arange(0, 10), np.arange(10, 30), recordings=recordings)
    with pytest.raises(OptionError, match="must have one class, but 'a' has segments of class 0 and of class 1"):
        aggregate_predictions(np.eye(2), ["a", "a"], [0, 1])


def test_loaders_cover_all_validation_items_in_order_and_full_batches_of_training_items() -> None:
    engine = TrainingEngine(Small, CLASSES, {**PLAIN, "batch_size": 7})
    train, val = engine._create_data_loaders(*engine._make_subsets(_dataset(), TRAIN, VAL, 0)[:2])
    assert [len(y) for _, y in val] == [7, 7, 6]
    assert torch.cat([y for _, y in val]).tolist() == _labels()[VAL].tolist()
    assert [len(y) for _, y in train] == [7] * 5


def test_benchmark_performance_reports_the_wait_for_batches(capsys: pytest.CaptureFixture[str]) -> None:
    got = _run(benchmark_performance=True)
    assert got["waiting"]["batches"] == 4 * 5
    assert "waited" in capsys.readouterr().err
    assert _run()["waiting"] is None


def test_invalid_settings_are_refused_by_name() -> None:
    assert check_config({}) == dict(DEFAULTS)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"batchsize": 8}, "Did you mean 'batch_size'"),
        ({"k_folds": 1}, "k_folds must be an integer >= 2, got 1"),
        ({"standardize": 1}, "standardize must be True or False, got 1"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping must be a finite number >= 0, got nan"),
        ({"loader_options": {"shuffle": False}}, "must not change which items are in a batch, got shuffle"),
        ({"loader_options": {"num_workers": 1}, "optimize_dataloaders": False}, "Leave out one of the two"),
    ]
    for config, message in wrong:
        with pytest.raises(OptionError, match=message):
            TrainingEngine(Small, CLASSES, config)
    for fold, message in (
        (([0, 1], [1, 2]), "must not share items, but share 1, the first is 1"),
        (([0, 0], [1]), "must be unique .*got 1 unique ones of 2"),
        (([0, 60], [1]), "from 0 to 59, .*from 0 to 60"),
        (([], [1]), "a list of one or more integers"),
    ):
        with pytest.raises(OptionError, match=message):
            TrainingEngine(Small, CLASSES, PLAIN).run_single_fold_predefined(_dataset(), *fold)
    with pytest.raises(OptionError, match=r"must have shape \(batch, num_classes\) = \(8, 3\), got \(8, 2\)"):
        _run(lambda _: _zeros(2))
    with pytest.raises(OptionError, match="Labels must be from 0 to 1 with num_classes=2, got 2"):
        TrainingEngine(_zeros, 2, PLAIN).run_single_fold_predefined(_dataset(), TRAIN, VAL)
    with pytest.raises(OptionError, match=r"Losses must be finite, got .* of epoch 1"):
        _run(_zeros, optimizer=partial(torch.optim.SGD, lr=1e38), gradient_clipping=0)
