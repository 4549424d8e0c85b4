"""Measure a training: stage timings, progress bars, machine facts, the watch and its run file."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
