"""`scripts/convert_to_shards.py`: `penstock convert` with the inputs after `--input`."""

import sys
from collections.abc import Sequence

from penstock.cli.main import app

__all__ = ["run_script", "script_arguments"]


def run_script() -> None:
    """Run `penstock convert` with the arguments of the script."""
    app(["convert", *script_arguments(sys.argv[1:])], prog_name="penstock")


def script_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `penstock convert` for those of the script, in which `--input` takes several values.

    Examples
    --------
    >>> script_arguments(["--input", "a.nwb", "b.nwb", "--output", "shards"])
    ['a.nwb', 'b.nwb', '--output', 'shards']
    """
    found: list[str] = []
    after_input = False
    for argument in arguments:
        if argument in ("--input", "-i"):
            after_input = True
        elif argument.startswith("--input="):
            found.append(argument.removeprefix("--input="))
        elif after_input and not argument.startswith("-"):
            found.append(argument)
        else:
            after_input = False
            found.append(argument)
    return found
