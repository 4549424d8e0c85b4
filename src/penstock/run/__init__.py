"""Executors of plans: in process, in threads, in worker processes. They never change what a plan yields."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
