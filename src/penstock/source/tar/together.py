"""Read items of several datasets of shards with one call, as if they were one dataset."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError
from penstock.source.tar.engine import ShardEngine
from penstock.source.tar.read_items import fill_block
from penstock.source.tar.request import Request

__all__ = ["fill_together"]

_Int64s = NDArray[np.int64]


def fill_together(parts: Sequence[tuple[ShardEngine, _Int64s, _Int64s]], block: Mapping[str, NDArray[Any]]) -> bool:
    """Read items of engines into rows of `block`, and return True; or return False if something is in the way.

    All engines must read the same fields in the same way. Nothing is lost if it is False: reading the datasets one by
    one meets the same damage, opens shards in turn if they are many, and reads again what was written to.
    """
    try:
        visits = []
        for engine, items, rows in parts:
            visit = engine.begin(items, rows)
            if visit is None:
                return False
            visits.append(visit)
        requests = list(Request.join(visits).split_by_layout())
        for request in requests:
            fill_block(request, block, parts[0][0].spec)
        if any(request.find_changed() for request in requests):
            return False
    except (PenstockError, OSError):
        return False
    for (engine, _, _), visit in zip(parts, visits, strict=True):
        engine.end(visit)
    return True
