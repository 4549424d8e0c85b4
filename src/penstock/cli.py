"""The command line: `penstock` and `python -m penstock`. Torch is imported by the commands that need it, not by --help."""

from typing import Annotated

import typer

from penstock import __version__

__all__ = ["app"]

app = typer.Typer(
    name="penstock",
    help="Feeds PyTorch training from scientific data that does not fit in memory: the same order everywhere, exact resume "
    "anywhere.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Feeds PyTorch training from scientific data that does not fit in memory."""
