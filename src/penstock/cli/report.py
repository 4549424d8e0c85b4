"""The command `penstock report`. It imports torch when it runs; --help does not."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Json
from penstock.cli.screen import print_json
from penstock.cli.where import check_dataset
from penstock.files.stores.url import is_url

__all__ = ["report"]


def report(  # noqa: PLR0917  # one parameter per option
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PATTERN|URL|RUN",
            help="A dataset or the URL of one, the folder of a conversion with --split, or a run file of Watch.save; "
            "also as --input (-i).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="DIR|PATTERN|URL", help="With a run file: the dataset to include."),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option("--title", metavar="TEXT", help="Title of the page; the name of the dataset or run if not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a dataset or a watched run.

    It shows the content, how well the order shuffles it, and whether training waited for data.
    """
    from penstock.core.errors import OptionError  # noqa: PLC0415
    from penstock.observe.run_file import is_run_file  # noqa: PLC0415  # imports numpy

    if output.exists() and not overwrite:
        raise OptionError(f"{output} exists already. Replace it with --overwrite, or name another file with --output.")
    is_run = not is_url(where) and is_run_file(Path(where))
    if dataset is not None and not is_run:
        raise OptionError(f"--dataset needs a run file, but {where} is not one. Give only one of the two.")
    if not is_run and not is_url(where) and Path(where).suffix == ".json":
        raise OptionError(f"{where} is not a run file. Give a file that Watch.save wrote, or the folder of a dataset.")
    shards = dataset if is_run else where
    if shards is not None and (is_url(shards) or not _has_splits(Path(shards))):
        check_dataset(shards)
    from penstock.observe.page import gather_report, save_report  # noqa: PLC0415  # imports torch

    found = gather_report(dataset=shards, run=where if is_run else None, title=title)
    save_report(output, found)
    if as_json:
        print_json({"page": str(output.absolute()), **found.to_dict()})
    else:
        typer.echo(f"Wrote {output}. Open it in any browser.")


def _has_splits(path: Path) -> bool:
    """Return whether a folder holds the splits of a conversion."""
    from penstock.shard.manifest import MANIFEST  # noqa: PLC0415  # imports numpy

    return path.is_dir() and any(path.glob(f"*/{MANIFEST}"))
