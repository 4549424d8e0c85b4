"""Random windows of long recordings and simulations, read in the background."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
