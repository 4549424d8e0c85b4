"""All kinds of kills."""

from bench.campaign.kills.conversions import CONVERSIONS
from bench.campaign.kills.remote import REMOTE
from bench.campaign.kills.trainings import TRAININGS
from bench.campaign.kills.workers import WORKERS
from bench.campaign.kills.writers import WRITERS
from bench.campaign.trials import Trials

__all__ = ["KILLS"]

KILLS = Trials("kills", [*WRITERS, *CONVERSIONS, *TRAININGS, *REMOTE, *WORKERS])
