"""Lets the tests here, and processes that they start, import what they share by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
