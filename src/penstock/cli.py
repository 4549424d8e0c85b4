"""The command line, `penstock` and `python -m penstock`. Torch is imported by commands that need it, not by --help."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock import __version__
from penstock.core.errors import PenstockError

__all__ = ["app"]

app = typer.Typer(
    name="penstock",
    help="Feed PyTorch training from scientific data that does not fit in memory: the same order everywhere, "
    "exact resume anywhere.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn what a user can mend into a message and an exit code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except PenstockError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo("\nStopped.", err=True)
        raise typer.Exit(130) from error


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
    """Feed PyTorch training from scientific data that does not fit in memory."""


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the files in this directory, which is new or empty.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data, the model and the order.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a first look.")] = False,
) -> None:
    """Train on data larger than the loader may hold, be killed, go on, and compare bit for bit."""
    with _errors_told():
        # Said before torch is imported, which takes a second or two.
        typer.echo("A training is killed, goes on in another process, and ends the same, bit for bit.\n")
        from penstock.recipes import demo as recipe  # noqa: PLC0415  # imports torch

        if not recipe.run(keep=keep, seed=seed, quick=quick):
            raise typer.Exit(1)
