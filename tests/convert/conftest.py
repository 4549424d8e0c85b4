"""Arrays whose values are their positions, and the laws of every recording."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Input, Sample


def _numbered(shape: tuple[int, ...], dtype: Any = np.float64) -> NDArray[Any]:
    """Each value is its own position, as far as the dtype allows."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(dtype)


def _same_sample(left: Sample, right: Sample) -> None:
    assert left[1] == right[1]
    assert list(left[0]) == list(right[0])
    for name, value in left[0].items():
        if isinstance(value, str):
            assert value == right[0][name]
            continue
        assert value.dtype == right[0][name].dtype
        assert value.shape == right[0][name].shape
        assert value.tobytes() == right[0][name].tobytes()


def _all_samples(given: Input) -> list[Sample]:
    """Every item in order, after checking the laws of a recording."""
    given = pickle.loads(pickle.dumps(given))
    assert hash(given) == hash(pickle.loads(pickle.dumps(given)))
    assert " at 0x" not in repr(given)
    recording = given.open()
    try:
        n_samples = recording.n_samples
        numbers = np.arange(n_samples)
        found = list(recording.samples(numbers))
        assert len(found) == n_samples >= 1
        spans = recording.span(numbers)
        assert spans.shape == (n_samples, 2)
        assert spans.dtype == np.float64
        assert (spans[:, 0] < spans[:, 1]).all()
        json.dumps([dict(recording.about), dict(recording.groups), list(recording.notes)], allow_nan=False)
        json.dumps([metadata for _, metadata in found], allow_nan=False)
        rng = np.random.default_rng(5)
        mixed = np.concatenate([rng.permutation(n_samples)[:40], numbers[-3:], numbers[:2], numbers[:1]])
        for number, sample in zip(mixed.tolist(), recording.samples(mixed), strict=True):
            _same_sample(sample, found[number])
    finally:
        recording.close()
        recording.close()
    again = given.open()
    assert dict(again.about) == dict(recording.about)
    again.close()
    return found


@pytest.fixture
def numbered() -> Callable[..., NDArray[Any]]:
    return _numbered


@pytest.fixture
def all_samples() -> Callable[[Input], list[Sample]]:
    return _all_samples
