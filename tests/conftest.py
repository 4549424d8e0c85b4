"""How many random cases the laws are tried on (`default`, and `soak` with PENSTOCK_SOAK=1), and what all tests save.

Several tests run at once, each with processes of its own: what is done twice here is waited for everywhere.
"""

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(
    "penstock_cellmap_parts",
    "penstock_convert_parts",
    "penstock_nwb_parts",
    "penstock_source_suite",
    "penstock_test_parts",
    "penstock_test_shards",
)

# Neither profile judges by the clock: the machine may be busy.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("default", max_examples=60, **_UNTIMED)
settings.register_profile("soak", max_examples=2000, **_UNTIMED)
settings.load_profile("soak" if os.environ.get("PENSTOCK_SOAK") == "1" else "default")

# Threads of torch and of BLAS wait for each other in a loop where tests share the cores. Processes that tests start
# inherit this; whoever sets it keeps what was set.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Set aside the hundreds of thousands of objects that collecting makes, and that stay.

    None of them is garbage to look for, and a process that is forked off would copy what it goes through.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
