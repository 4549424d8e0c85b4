"""How much data a workload has: all of it, or the little of `python -m bench --quick`.

Contenders run in processes of their own, which import the same modules: the choice reaches them as a variable.
"""

import os

__all__ = ["QUICK_VARIABLE", "is_quick", "sized"]

QUICK_VARIABLE = "PENSTOCK_BENCH_QUICK"


def is_quick() -> bool:
    """Return whether this is a quick run, whose figures say nothing."""
    return bool(os.environ.get(QUICK_VARIABLE))


def sized(full: int, quick: int) -> int:
    """Return the size of a whole run, or that of a quick one."""
    return quick if is_quick() else full
