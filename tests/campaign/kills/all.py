"""All kinds of kills."""

from tests.campaign.kills.conversions import CONVERSIONS
from tests.campaign.kills.remote import REMOTE
from tests.campaign.kills.trainings import TRAININGS
from tests.campaign.kills.workers import WORKERS
from tests.campaign.kills.writers import WRITERS
from tests.campaign.trials import Trials

__all__ = ["KILLS"]

KILLS = Trials("kills", [*WRITERS, *CONVERSIONS, *TRAININGS, *REMOTE, *WORKERS])
