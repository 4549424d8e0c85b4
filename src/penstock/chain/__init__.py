"""One chain of verbs over sources, plans and the loader: `open`, and the `Dataset` that it gives."""

from penstock.core.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
