"""Let tests, and the processes that they start, import `penstock_cellmap_parts`."""

import sys
from pathlib import Path

_PARTS = str(Path(__file__).parent / "parts")
if _PARTS not in sys.path:
    sys.path.insert(0, _PARTS)
