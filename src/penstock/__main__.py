"""`python -m penstock` is `penstock`."""

from penstock.cli import app

app()
