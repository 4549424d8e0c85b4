"""Convert recordings to shards: inputs, the order in which items are written, and the engines that write them."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
