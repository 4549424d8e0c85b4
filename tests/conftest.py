"""How many random cases the laws are tried on: `default`, and `soak` with PENSTOCK_SOAK=1."""

import os

from hypothesis import HealthCheck, settings

# Neither profile judges by the clock: the machine may be busy.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("default", max_examples=60, **_UNTIMED)
settings.register_profile("soak", max_examples=2000, **_UNTIMED)
settings.load_profile("soak" if os.environ.get("PENSTOCK_SOAK") == "1" else "default")
