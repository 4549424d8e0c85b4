"""Arrays of every kind, and lists, written into columns at once: what comes back is what samples give."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.recipes.webdataset import create_shards_from_arrays
from penstock.source import TarSource

_N = 10
_STRUCTURED = np.dtype([("a", "<i4", (2,)), ("b", [("c", "u1"), ("d", "<f4")]), ("e", "S2")])
_KINDS: dict[str, Any] = {
    "ragged lists": [list(range(number)) for number in range(_N)],
    "ragged arrays": [np.arange(number) for number in range(_N)],
    "ragged tensors": [torch.ones(number) for number in range(_N)],
    "bytes": [b"x" * number for number in range(_N)],
    "texts": ["é" * number for number in range(_N)],
    "nothing": [None] * _N,
    "dicts": [None if number % 2 else {"a": [number, {"b": None}]} for number in range(_N)],
    "dates": np.arange(3 * _N).astype("datetime64[ns]").reshape(_N, 3),
    "structured": np.array([((i, i), (i, i / 2), b"ab") for i in range(_N)], _STRUCTURED),
    "bool": np.arange(_N) % 2 == 0,
    "float16": np.arange(_N, dtype=np.float16),
    "big endian": np.arange(_N, dtype=">i4"),
    "no elements": np.zeros((_N, 0, 3), np.float32),
    "Fortran order": np.asfortranarray(np.arange(_N * 12.0).reshape(_N, 3, 4)),
    "reversed": np.arange(_N * 4).reshape(_N, 4)[::-1, ::-1],
    "fixed texts": np.array([f"ä{number}" for number in range(_N)]),
    "fixed texts of different lengths": np.array(["ä" * number for number in range(_N)]),
    "fixed bytes of different lengths": np.array([b"x" * number for number in range(_N)]),
    "texts of NumPy": np.array(["ä" * number for number in range(_N)], np.dtypes.StringDType()),
    "objects": np.array([{"a": number} for number in range(_N)], object),
    "arrays as objects": np.array([np.arange(number) for number in range(_N)], object),
    "tensors": torch.arange(2 * _N, dtype=torch.float16).reshape(_N, 2),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_arrays_come_back_as_from_samples(kind: str, tmp_path: Path) -> None:
    given, found = _KINDS[kind], {}
    for layout in ("samples", "columns"):
        data = {"field": given, "number": np.arange(_N)}
        create_shards_from_arrays(tmp_path / layout, data, 4, layout=layout, show_progress=False)
        with closing(TarSource(tmp_path / layout)) as source:
            found[layout] = [source.take([number])["field"][0] for number in range(_N)]
    for one, other, wanted in zip(found["columns"], found["samples"], given, strict=True):
        assert type(one) is type(other)
        if isinstance(one, np.ndarray | np.generic):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
            assert np.array_equal(one, np.asarray(wanted))
        else:
            assert one == other == wanted
