"""The shard format: writing, indexing and verifying datasets of tar shards."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
