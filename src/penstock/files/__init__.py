"""File access: durable writes, folder locks, regular files, figures, and stores at a URL."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
