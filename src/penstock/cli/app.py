"""The command line, `penstock` and `python -m penstock`. Torch is imported by commands that need it, not by --help."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.convert import convert
from penstock.cli.data import index, inspect, verify
from penstock.cli.errors import EXIT_CODES, Commands, ProblemsFound
from penstock.cli.options import Json, Quiet, examples
from penstock.cli.report import report
from penstock.cli.screen import print_json
from penstock.cli.tune import tune
from penstock.core.version import __version__
from penstock.observe.progress import on_terminal

__all__ = ["app"]

# Elsewhere than on a terminal, plain text, without the time that importing rich takes.
_RICH = on_terminal(sys.stdout)

app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Feed PyTorch training from scientific data that does not fit in memory: the same order everywhere, "
    "exact resume anywhere.",
    epilog=f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if _RICH else None,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors. Also taken after the command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Feed PyTorch training from scientific data that does not fit in memory."""


def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the files in this directory, which is new or empty.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data, the model and the order.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a first look.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """See what Penstock does, on data that is made up for it: convert, train, be killed, go on, find damage.

    Exits with 1 where something differs from what is promised.
    """
    from penstock.demo import run as recipe  # noqa: PLC0415  # imports numpy

    found = recipe.run(keep=keep, seed=seed, quick=quick, quiet=quiet or as_json)
    if as_json:
        checks = [{"what": what, "holds": holds, "how": how} for what, holds, how in found.checks]
        measured = {"seconds": found.seconds, "folder": found.folder, "report": found.report, "figures": found.figures}
        print_json({"holds": found.holds, "checks": checks, **measured})
    if not found:
        raise ProblemsFound


for command in (convert, index, inspect, verify, tune, report, demo):
    app.command(epilog=examples(command.__name__, rich=_RICH))(command)
