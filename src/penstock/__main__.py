"""`python -m penstock` is `penstock`."""

from penstock.cli.app import app

app()
