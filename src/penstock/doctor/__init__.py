"""Examine this installation, this machine and a folder of data: what was found, and what to do about it."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
