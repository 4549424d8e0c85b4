"""`scripts/convert_to_shards.py`: `penstock convert` with its inputs behind `--input`."""

import sys
from collections.abc import Sequence

from penstock.cli.app import app

__all__ = ["run_script", "script_arguments"]


def run_script() -> None:
    """Run `penstock convert` with the arguments of the script."""
    app(["convert", *script_arguments(sys.argv[1:])], prog_name="penstock")


def script_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `penstock convert` for those of the script, whose `--input` takes several values.

    Examples
    --------
    >>> script_arguments(["--input", "a.nwb", "b.nwb", "--output", "shards"])
    ['a.nwb', 'b.nwb', '--output', 'shards']
    """
    found: list[str] = []
    taking = False
    for argument in arguments:
        if argument in ("--input", "-i"):
            taking = True
        elif argument.startswith("--input="):
            found.append(argument.removeprefix("--input="))
        elif taking and not argument.startswith("-"):
            found.append(argument)
        else:
            taking = False
            found.append(argument)
    return found
