"""Properties that are worked out once, without the lock that Python 3.11 holds meanwhile for all objects of a class.

A process that is forked while another thread holds that lock would wait for it for ever. As from Python 3.12 on, two
threads may work out the same value; one of them is kept.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

__all__ = ["cached_property"]

_Value = TypeVar("_Value")


class cached_property(functools.cached_property[_Value]):  # noqa: N801  # named as the one of Python
    """A property that is worked out once."""

    def __init__(self, func: Callable[[Any], _Value]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
