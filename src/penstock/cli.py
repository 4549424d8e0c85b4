"""The command line, `penstock` and `python -m penstock`. Torch is imported by commands that need it, not by --help."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli_convert import convert
from penstock.cli_tune import tune
from penstock.core.errors import OptionError, PenstockError

__all__ = ["app"]

app = typer.Typer(
    name="penstock",
    help="Feed PyTorch training from scientific data that does not fit in memory: the same order everywhere, "
    "exact resume anywhere.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    # Elsewhere than on a terminal, plain text, without the time that importing rich takes.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)


@contextmanager
def _errors_told(failed: int = 2) -> Iterator[None]:
    """Turn what a user can mend into a message and an exit code; anything else is a bug and keeps its traceback.

    An argument that cannot work is 2; `failed` is for what goes wrong at work.
    """
    try:
        yield
    except PenstockError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, OptionError) else failed) from error
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


app.command()(_errors_told(failed=1)(convert))
app.command()(_errors_told()(tune))


@app.command()
def index(
    where: Annotated[
        str,
        typer.Argument(metavar="DIR|PATTERN", help="A folder of tars, or for example 'train-{000000..000009}.tar'."),
    ],
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Archives read at once.")] = 2,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Take items that lack a member which others have.")
    ] = False,
) -> None:
    """Give tars that others wrote an index, without changing them: random access, exact length, exact resume."""
    with _errors_told():
        from penstock.report.progress import progress  # noqa: PLC0415  # numpy comes with what it is used for
        from penstock.shard.foreign import expanded, index_archives  # noqa: PLC0415

        total = sum(path.stat().st_size for path in expanded(where))
        with progress("Indexing", total, "bytes") as told:
            manifest, problems = index_archives(
                where, workers=workers, allow_missing=allow_missing, progress=told.advance
            )
        if manifest is None:
            _list_problems(problems)
            typer.echo("Nothing was written. Mend the archives, or use --allow-missing for items that lack members.")
            raise typer.Exit(1)
        typer.echo(f"{manifest.n_items:,} items in {len(manifest.shards):,} shards: {', '.join(manifest.fields)}")


@app.command()
def verify(
    where: Annotated[str, typer.Argument(metavar="DIR|PATTERN", help="A data set.")],
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Shards read at once.")] = 2,
) -> None:
    """Read every byte of a data set and compare it with what was written; exit 1 and list what is wrong."""
    with _errors_told():
        from penstock.report.progress import progress  # noqa: PLC0415
        from penstock.shard.manifest import Manifest, manifest_path  # noqa: PLC0415
        from penstock.shard.verify import verify_shards  # noqa: PLC0415

        total = sum(shard.stored_bytes for shard in Manifest.read(manifest_path(where)).shards)
        with progress("Verifying", total, "bytes") as told:
            manifest, problems = verify_shards(where, workers=workers, progress=told.advance)
        if problems:
            _list_problems(problems)
            raise typer.Exit(1)
        typer.echo(f"{manifest.n_items:,} items in {len(manifest.shards):,} shards, {total / 1e6:,.1f} MB: all healthy")


@app.command()
def inspect(
    where: Annotated[str, typer.Argument(metavar="DIR|PATTERN", help="A data set.")],
    item: Annotated[int, typer.Option(min=0, help="Which item to show.")] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the item into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as JSON.")] = False,
) -> None:
    """Show what a data set holds: totals, fields, bytes, health, and one item."""
    with _errors_told():
        from penstock.recipes import dataset_info  # noqa: PLC0415  # imports numpy

        info = dataset_info.ShardedDatasetInfo(where)
        if as_json:
            typer.echo(json.dumps(info.get_summary(), indent=1))
        else:
            info.print_summary()
            typer.echo(f"\nItem {item}")
            for line in dataset_info.described_item(where, item):
                typer.echo(f"  {line}")
        if png is not None:
            dataset_info.draw(where, item, png)
            typer.echo(f"Drawn into {png}", err=as_json)


def _list_problems(problems: Sequence[object]) -> None:
    for problem in problems:
        typer.echo(str(problem), err=True)
    typer.echo(f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}", err=True)
