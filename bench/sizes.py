"""How much data a workload has: all of it, the little of `python -m bench --quick`, or what lies between.

Contenders run in processes of their own, which import the same modules: the choice reaches them as a variable.
"""

import os

__all__ = ["COMPARED_VARIABLE", "QUICK_VARIABLE", "is_compared", "is_quick", "sized"]

QUICK_VARIABLE, COMPARED_VARIABLE = "PENSTOCK_BENCH_QUICK", "PENSTOCK_BENCH_COMPARED"


def is_quick() -> bool:
    """Return whether this is a quick run, whose figures say nothing."""
    return bool(os.environ.get(QUICK_VARIABLE))


def is_compared() -> bool:
    """Return whether two commits are compared, so that limits and other packages are left out."""
    return bool(os.environ.get(COMPARED_VARIABLE))


def sized(full: int, quick: int) -> int:
    """Return the size of a whole run, that of a quick one, or a quarter for a quick comparison."""
    if is_quick() and is_compared():
        return max(quick, full // 4)
    return quick if is_quick() else full
