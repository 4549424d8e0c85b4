"""Intensity transforms against independent computations, with NaN for unknown values."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.transform.intensity import NanToNum, Normalize


def rng(number: int = 0) -> np.random.Generator:
    return generator_for(6, "augment", 0, number)


def image(dtype: Any = np.float32) -> np.ndarray:
    values = rng(99).random((2, 3, 4, 5)).astype(dtype)
    values[0, 1, 2, 3] = values[1, 0, 0, 0] = np.nan
    return values


def every(field: str | None = None) -> list[Any]:
    return [
        NanToNum(field=field),
        Normalize(field=field),
        Normalize(-3.0, 0.5, field=field),
    ]


NAMES = [f"{number}-{type(transform).__name__}" for number, transform in enumerate(every())]
ALL = pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)


@ALL
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_arrays_and_tensors_come_out_alike_with_their_nans_and_go_in_unchanged(number: int, dtype: Any) -> None:
    transform, values = every()[number], image(dtype)
    values.flags.writeable = False
    tensor = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    seen = set()
    for draw in range(6):
        made, from_tensor = transform(values, rng(draw)), transform(tensor, rng(draw))
        assert isinstance(from_tensor, torch.Tensor)
        assert from_tensor.dtype == tensor.dtype
        assert np.array_equal(from_tensor.numpy(), made, equal_nan=True)
        unknown = np.isnan(values) if not isinstance(transform, NanToNum) else np.zeros(values.shape, bool)
        assert np.array_equal(np.isnan(made), unknown)
        seen.add(from_tensor.numpy().tobytes())
    assert np.array_equal(values, image(dtype), equal_nan=True)
    assert len(seen) == 1


@ALL
def test_one_field_is_changed_and_pickles_give_the_same(number: int) -> None:
    made = every()[number](image(), rng(3))
    again = pickle.loads(pickle.dumps(every("raw")[number]))
    assert again == every("raw")[number]
    label = object()
    found = again({"raw": image(), "labels": label}, rng(3))
    assert found["labels"] is label
    assert found["raw"].tobytes() == made.tobytes()
    assert np.array_equal(found["raw"], every()[number](np.asfortranarray(image()), rng(3)), equal_nan=True)


# -- contrast and gamma ------------------------------------------------------------------------------------------------


# -- blur --------------------------------------------------------------------------------------------------------------


# -- from one range to another -----------------------------------------------------------------------------------------


def test_nans_and_infinities_are_replaced_if_numbers_are_given() -> None:
    values = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert NanToNum()(values, rng()).tolist() == [1.0, 0.0, np.inf, -np.inf]
    assert NanToNum(5, 6, 7)(values, rng()).tolist() == [1.0, 5.0, 6.0, 7.0]
    assert NanToNum(5, neginf=-1)(values, rng()).tolist() == [1.0, 5.0, np.inf, -1.0]
    for known in (np.ones(3), np.ones(3, np.uint8), torch.ones(2)):
        assert NanToNum()(known, rng()) is known


def test_the_default_scale_is_for_eight_bits_whatever_the_dtype() -> None:
    values = np.arange(256, dtype=np.uint8)
    made = Normalize()(values, rng())
    assert made.dtype == np.float32
    assert made[0] == 0
    assert made[255] == 1
    assert np.abs(made - values / 255).max() < 1e-7
    assert Normalize()(torch.tensor([255], dtype=torch.uint8), rng()).dtype == torch.float32
    assert Normalize(1, 2)(np.array([1.0, np.nan]), rng()).tolist()[0] == 4.0
    signed = Normalize(-127.5, 1 / 127.5)(values, rng())
    assert (signed[0], signed[255]) == (-1, 1)
    assert Normalize(0, 1)(np.array([3], np.uint16), rng()).tolist() == [3.0]


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NanToNum(np.nan), "nan must be a finite number, got nan"),
        (lambda: NanToNum(posinf=np.inf), "posinf must be a finite number, got inf"),
        (lambda: Normalize(scale=0), "scale must not be 0, got 0"),
        (lambda: Normalize(field=-1), "field must be a name, .*, got -1"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()
