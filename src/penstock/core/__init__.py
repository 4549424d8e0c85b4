"""The vocabulary: spans, fields, indexes, draws, protocols, seeds and errors. Only numpy and the standard library."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
