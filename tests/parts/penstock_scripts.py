"""Scripts of the repository, loaded as modules: examples, and hooks of the site."""

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["load_script"]

_ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """Return the module of a file, such as "examples/birdsong.py"."""
    file = _ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} must be a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
