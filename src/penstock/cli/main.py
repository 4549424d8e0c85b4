"""The command line, `penstock` and `python -m penstock`. Torch is imported only by commands that need it."""

import sys
from typing import Annotated

import typer

from penstock.cli.convert import convert, index
from penstock.cli.errors import EXIT_CODES, Commands
from penstock.cli.look import check, inspect, tune
from penstock.cli.options import PenstockCommand, format_examples
from penstock.core.version import __version__

__all__ = ["app", "run_script"]

app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Feed PyTorch training from scientific data that does not fit in memory: the same order on any machine, "
    "and exact resume.",
    epilog=f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text reads as well, and importing rich would double the time of --help
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Also works after the command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Feed PyTorch training from scientific data that does not fit in memory."""


for command in (convert, index, inspect, check, tune):
    app.command(cls=PenstockCommand, epilog=format_examples(command.__name__))(command)


def run_script() -> None:
    """Run `penstock convert` with the arguments of `scripts/convert_to_shards.py`."""
    app(["convert", *sys.argv[1:]], prog_name="penstock")
