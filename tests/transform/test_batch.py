"""Whole batches: the same bits as item by item, for every transform, dtype and form of a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform import (
    Binarize,
    Blur,
    Clip,
    Compose,
    GaussianNoise,
    NanToNum,
    Normalize,
    RandomContrast,
    RandomCrop,
    RandomGain,
    RandomGamma,
    RandomShift,
    SpecAugment,
    Standardize,
    transform_batch,
)

EVERY: list[Any] = [
    Standardize(10.0, 3.0),
    Standardize(np.arange(4.0), np.arange(1.0, 5.0), axis=0),
    Standardize(np.arange(5.0), np.arange(1.0, 6.0), axis=-1),
    SpecAugment(3, 2, 2, 2, p=0.5),
    SpecAugment(9, 9, mask_value="mean", p=1.0),
    SpecAugment(3, 2, mask_value="min", p=0.0),
    GaussianNoise(0.5, p=0.6),
    GaussianNoise(50.0, p=0.5, value_range=(0, 20)),
    RandomGain(0.5, 2.0, axis=0, p=0.5),
    RandomGain(0.5, 2.0, p=0.0),
    RandomCrop(3, axis=-1),
    RandomCrop(2, axis=0),
    RandomShift(3, axis=-1, p=0.5),
    RandomShift(2, axis=0, fill="mean"),
    Clip(2, 20.5),
    Binarize(7.0),
    NanToNum(-1.0, posinf=4.0),
    Normalize(1.0, 0.5),
    RandomContrast(0.5, 2.0, p=0.5),
    RandomGamma(0.5, 2.0, value_range=(0, 60)),
    Blur((0.5, 0.5), p=0.5),
    Compose([GaussianNoise(1.0, p=0.5), Standardize(3, 2), SpecAugment(2, 2, p=0.7), RandomCrop(4)]),
]
NAMES = [f"{number}-{type(transform).__name__}" for number, transform in enumerate(EVERY)]


def rngs(seed: int, count: int) -> list[np.random.Generator]:
    return [generator_for(seed, "augment", 0, item) for item in range(count)]


def values(count: int, dtype: Any) -> np.ndarray:
    made = (np.arange(count * 20).reshape(count, 4, 5) % 61 + 0.25).astype(dtype)
    made[0, 0, 0] = np.nan
    made.flags.writeable = False
    return made


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("transform", EVERY, ids=NAMES)
@few_cases
@given(count=st.integers(1, 7), seed=st.integers(0, 1000), dtype=st.sampled_from([np.float32, np.float64, np.float16]))
def test_a_batch_has_the_bits_of_its_items(transform: Any, count: int, seed: int, dtype: Any) -> None:
    batch = values(count, dtype)
    one_by_one = np.stack([transform(item, rng) for item, rng in zip(batch, rngs(seed, count), strict=True)])
    at_once = transform_batch(transform, batch, rngs(seed, count))
    assert same(at_once, one_by_one)
    assert same(batch, values(count, dtype))
    tensor = transform_batch(transform, torch.from_numpy(batch.copy()), rngs(seed, count))
    assert same(tensor.numpy(), one_by_one)


@pytest.mark.parametrize("masks", [SpecAugment(3, 2, p=1.0, field="x"), Blur((0.5, 0.5), p=1.0, field="x")])
def test_one_field_of_a_batch_is_changed(masks: Any) -> None:
    batch = {"x": values(3, np.float32), "y": torch.arange(3)}
    made = transform_batch(masks, batch, rngs(1, 3))
    items = [masks({"x": x, "y": 0}, rng)["x"] for x, rng in zip(batch["x"], rngs(1, 3), strict=True)]
    assert same(made["x"], np.stack(items))
    assert made["y"].tolist() == [0, 1, 2]
    pair = transform_batch(SpecAugment(3, 2, p=1.0), (batch["x"], batch["y"]), rngs(1, 3))
    assert pair[1] is batch["y"]


def test_spectrograms_with_channels_are_masked_alike_in_all_of_them() -> None:
    batch = np.ones((6, 2, 8, 9), np.float32)
    made = transform_batch(SpecAugment(4, 3, p=1.0), batch, rngs(3, 6))
    assert same(made[:, 0].copy(), made[:, 1].copy())
    assert len({item.tobytes() for item in made}) > 1


def test_items_may_be_numbers() -> None:
    batch = np.array([1.0, 30.0, 5.0], np.float32)
    for transform in (Clip(2, 20), GaussianNoise(p=1.0), Standardize(1.0, 2.0), RandomGain(p=1.0)):
        one_by_one = np.stack([transform(item, rng) for item, rng in zip(batch, rngs(4, 3), strict=True)])
        assert same(transform_batch(transform, batch, rngs(4, 3)), one_by_one)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(OptionError, match=r"one generator for each item of a batch of shape \(3, 4, 5\), got 2"):
        transform_batch(Clip(0, 1), values(3, np.float32), rngs(0, 2))
    with pytest.raises(OptionError, match=r"got shape .* For a batch, use transform_batch"):
        SpecAugment(p=1.0)(np.ones((2, 1, 4, 5)), rngs(0, 1)[0])
