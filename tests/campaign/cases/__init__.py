"""The 67 fault cases, and the tests that check each of them.

Each case ends in right data, or in one typed exception that names source, shard and sample within a stated time: never
a hang, never silence. Tests are paths below `tests/`, of a file or of one test in it.
"""

from tests.campaign.cases.case import Case
from tests.campaign.cases.running import RUNNING
from tests.campaign.cases.stored import STORED

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (*STORED, *RUNNING)
