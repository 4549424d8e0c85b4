"""Laws of all transforms: arrays and tensors agree, every kind of item works, only the given generator is used."""

import pickle
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.compose import Compose
from penstock.transform.crops import RandomCrop, RandomShift
from penstock.transform.noise import Clip, GaussianNoise
from penstock.transform.specaugment import SpecAugment
from penstock.transform.standardize import Standardize


def every(field: str | int | None = None) -> list[Any]:
    return [
        Standardize(10.0, 3.0, field=field),
        Standardize(np.arange(8.0), np.arange(1.0, 9.0), axis=-2, field=field),
        SpecAugment(6, 4, 2, 2, p=1.0, field=field),
        SpecAugment(6, 4, mask_value="mean", p=0.5, field=field),
        SpecAugment(6, 4, mask_value="min", p=1.0, field=field),
        GaussianNoise(0.5, p=0.7, field=field),
        GaussianNoise(50.0, p=1.0, value_range=(0, 200), field=field),
        RandomCrop(5, axis=-1, field=field),
        RandomShift(4, axis=-1, field=field),
        RandomShift(4, axis=-2, fill="mean", p=0.8, field=field),
        Clip(20, 100.5, field=field),
        Compose([GaussianNoise(1.0, p=1.0, field=field), Standardize(3, 2, field=field), SpecAugment(field=field)]),
    ]


NAMES = [f"{number}-{type(transform).__name__}" for number, transform in enumerate(every())]
ALL = pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)


def item(dtype: Any = np.float32) -> np.ndarray:
    return (np.arange(2 * 8 * 11).reshape(2, 8, 11) + 0.25).astype(dtype)


def global_state() -> Any:
    numpys = np.random.get_state()  # noqa: NPY002  # it is what must stay as it is
    return random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().tolist()


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@ALL
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_arrays_and_tensors_come_out_equal_to_the_last_bit_and_go_in_unchanged(number: int, dtype: Any) -> None:
    transform = every()[number]
    array, tensor = item(dtype), torch.from_numpy(item(dtype))
    array.flags.writeable = False
    seen = set()
    for epoch in range(6):
        from_array = transform(array, generator_for(1, "augment", epoch, 5))
        from_tensor = transform(tensor, generator_for(1, "augment", epoch, 5))
        assert isinstance(from_tensor, torch.Tensor)
        assert same(from_array, from_tensor.numpy())
        seen.add(from_array.tobytes())
    assert same(array, item(dtype))
    assert same(tensor.numpy(), item(dtype))
    random_ones = ("SpecAugment", "GaussianNoise", "RandomCrop", "RandomShift", "Compose")
    assert (len(seen) > 1) == (type(transform).__name__ in random_ones)


@ALL
def test_only_the_given_generator_is_used_and_pickles_give_the_same(number: int) -> None:
    transform = every()[number]
    before = global_state()
    made = transform(item(), generator_for(2, "augment", 0, 1))
    assert global_state() == before
    again = pickle.loads(pickle.dumps(transform))
    assert same(again(item(), generator_for(2, "augment", 0, 1)), made)
    assert repr(again) == repr(transform)
    strided = np.ascontiguousarray(item().transpose(2, 1, 0)).transpose(2, 1, 0)
    assert np.array_equal(transform(strided, generator_for(2, "augment", 0, 1)), made)


class Pair(NamedTuple):
    x: Any
    y: Any


@ALL
def test_one_field_is_changed_and_the_others_stay_the_same_objects(number: int) -> None:
    label = object()
    rng = (generator_for(9, "augment", 0, 0) for _ in iter(int, 1))
    made = every()[number](item(), next(rng))
    named = every("x")[number]({"y": label, "x": item()}, next(rng))
    assert same(named["x"], made)
    assert named["y"] is label
    for field, given in (
        (None, (item(), label)),
        (0, [item(), label]),
        (1, (label, item())),
        (None, Pair(item(), label)),
    ):
        found = every(field)[number](given, next(rng))
        assert type(found) is type(given)
        assert same(found[field or 0], made)
        assert found[1 - (field or 0)] is label


def test_unchanged_items_are_the_same_objects() -> None:
    for transform in (SpecAugment(p=0.0), GaussianNoise(p=0.0), RandomShift(3, p=0.0), Compose([])):
        for given in (item(), torch.ones(2, 3), (item(), 1)):
            assert transform(given, generator_for(0, "augment", 0, 0)) is given


def test_bfloat16_is_changed_as_float32_and_comes_back() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    made = Standardize(1.0, 2.0)(values, generator_for(0, "augment"))
    assert made.dtype == torch.bfloat16
    assert made.tolist() == [[0.0, 0.5, 1.5]]


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"x": 1, "y": 2}, None, "field must be one of 'x', 'y', .*, got None"),
        ({"x": 1}, "z", "field must be one of 'x', .*, got 'z'"),
        ((1, 2), 2, "index >= 0 and < 2, length of the tuple, got 2"),
        ((1, 2), "x", "field must be an index .*, got 'x'"),
        (np.ones(3), "x", "must be None for an item that is a single ndarray, got 'x'"),
        ("text", None, "NumPy arrays and torch tensors, got str"),
        (np.array(["a"]), None, "real numbers, got <U1"),
        (np.ones(2, complex), None, "real numbers, got complex128"),
        (torch.ones(2, dtype=torch.complex64), None, "real numbers, got torch.complex64"),
        (torch.ones(2, requires_grad=True), None, r"use x.detach\(\)"),
    ],
)
def test_items_without_the_field_are_refused(given: Any, field: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Clip(0, 1, field=field)(given, generator_for(0, "augment"))
