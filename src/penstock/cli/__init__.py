"""The command line."""

from penstock.cli.main import app as app

__all__ = ["app"]
