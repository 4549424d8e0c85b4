"""Shared types: spans, fields, indexes, draws, protocols, seeds and errors. Needs only NumPy."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
