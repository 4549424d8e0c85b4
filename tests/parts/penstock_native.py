"""Which implementation of `penstock.source.native` tests run on."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.source import native

__all__ = ["needs_c", "use_numpy"]

needs_c = pytest.mark.skipif(not native.is_compiled(), reason="about the C part, which is not used here")


@contextmanager
def use_numpy() -> Iterator[None]:
    """Read with NumPy in this process and those that it forks, whatever is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "find_obstacle", lambda: "a test")
        yield
