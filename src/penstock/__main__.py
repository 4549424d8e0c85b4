"""`python -m penstock` is `penstock`."""

from penstock.cli.main import app

app()
