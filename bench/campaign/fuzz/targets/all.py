"""Every parser, by name, and which of the fault cases it is about."""

from bench.campaign.fuzz.target import Target
from bench.campaign.fuzz.targets.archives import ARCHIVES
from bench.campaign.fuzz.targets.conversions import CONVERSIONS
from bench.campaign.fuzz.targets.decoders import DECODERS
from bench.campaign.fuzz.targets.saved import SAVED
from bench.campaign.fuzz.targets.shards import SHARDS
from bench.campaign.fuzz.targets.sounds import SOUNDS
from bench.campaign.fuzz.targets.stores import STORES
from bench.campaign.fuzz.targets.trainers import TRAINERS

__all__ = ["GROUPS", "TARGETS"]

GROUPS: dict[str, tuple[tuple[int, ...], tuple[Target, ...]]] = {
    "archives of others": ((11, 12, 13, 24, 25, 26), ARCHIVES),
    "files of a dataset": ((13, 14, 16, 18, 19, 28), SHARDS),
    "members of shards": ((23, 27, 28), DECODERS),
    "stored arrays and images": ((20, 21), STORES),
    "recordings and tables to convert": ((21, 23, 27), CONVERSIONS),
    "audio files": ((22,), SOUNDS),
    "saved states and results": ((48,), (*SAVED, *TRAINERS)),
}
"""What is parsed, the numbers of the fault cases, and the parsers."""

TARGETS: dict[str, Target] = {target.name: target for _, targets in GROUPS.values() for target in targets}
