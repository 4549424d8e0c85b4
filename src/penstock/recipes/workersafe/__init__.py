"""Standardized and augmented torch datasets that give the same items for any number of workers."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
