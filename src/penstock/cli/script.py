"""`scripts/convert_to_shards.py`: `penstock convert` with the inputs after `--input`."""

import sys

from penstock.cli.main import app

__all__ = ["run_script"]


def run_script() -> None:
    """Run `penstock convert` with the arguments of the script."""
    app(["convert", *sys.argv[1:]], prog_name="penstock")
