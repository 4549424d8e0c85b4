"""Small datasets that encode their position."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import create_shards_from_arrays


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a dataset of n samples once: x is i, y is (i, i + 1/4)."""
    made: dict[Any, Path] = {}

    def written(n: int, shard_size: int, **options: Any) -> Path:
        key = (n, shard_size, tuple(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("set")
            x = np.arange(n)
            arrays = {"x": x, "y": np.stack([x, x + 0.25], axis=1).astype(np.float32)}
            create_shards_from_arrays(made[key], arrays, shard_size=shard_size, **options)
        return made[key]

    return written
