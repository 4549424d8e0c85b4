"""Long epochs walked in chunks of a fixed number of batches, with validation after each."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
