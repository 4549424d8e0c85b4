"""Makes the parts that tests share importable, also in worker processes."""

import sys
from pathlib import Path

import pytest

_PARTS = str(Path(__file__).parents[1] / "run" / "parts")
if _PARTS not in sys.path:
    sys.path.insert(0, _PARTS)
pytest.register_assert_rewrite("penstock_test_parts", "penstock_source_suite")
