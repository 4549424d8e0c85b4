"""Feeds PyTorch training from scientific data that does not fit in memory.

The names that `dir(penstock)` lists are loaded on first use, so that `import penstock` does not import torch. All other
public names live in the namespaces: `penstock.transform`, `penstock.convert`, `penstock.recipes.webdataset` and so on.
"""

from penstock.core.doors import open_door
from penstock.core.version import __version__ as __version__

__getattr__, __dir__, __all__ = open_door(__name__, __file__, aliases="aliases.pyi")
