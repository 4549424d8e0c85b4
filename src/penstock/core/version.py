"""The version of Penstock: in saved files, on the command line, and in the name of the wheel."""

__all__ = ["__version__"]

__version__ = "0.1.0"
