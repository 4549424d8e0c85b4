"""Sources read items: they know no order, no batches and no randomness."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
