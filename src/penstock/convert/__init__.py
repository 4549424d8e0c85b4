"""Recordings to shards: which inputs can be read, in which order they are written, and who writes them."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
