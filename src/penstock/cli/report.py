"""The command `penstock report`. Torch is imported when it runs, not by --help."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Json
from penstock.cli.screen import print_json
from penstock.cli.where import check_data_set

__all__ = ["report"]


def report(  # noqa: PLR0917  # the options of a command
    where: Annotated[
        str,
        typer.Argument(metavar="DIR|PATTERN|RUN", help="A data set, or a run file that Watch.save wrote."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="DIR|PATTERN", help="With a run file: its data set, too.")
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", help="Of the page; as a rule, the name of what it is of.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a data set or a watched run: what is in it, how it mixes, whether training waited."""
    from penstock.core.errors import OptionError  # noqa: PLC0415
    from penstock.observe.run_file import is_run_file  # noqa: PLC0415  # imports numpy

    if output.exists() and not overwrite:
        raise OptionError(f"There is a file {output}; replace it with --overwrite, or name another with --output.")
    is_run = is_run_file(Path(where))
    if dataset is not None and not is_run:
        raise OptionError(f"--dataset goes with a run file, and {where} is none; give one of the two alone.")
    if not is_run and Path(where).suffix == ".json":
        raise OptionError(f"{where} is no run file; give one that Watch.save wrote, or the folder of a data set.")
    shards = dataset if is_run else where
    if shards is not None and not _has_splits(Path(shards)):
        check_data_set(shards)
    from penstock.report.build import gathered, save  # noqa: PLC0415  # imports torch

    found = gathered(dataset=shards, run=where if is_run else None, title=title)
    save(output, found)
    if as_json:
        print_json({"page": str(output.absolute()), **found.to_dict()})
    else:
        typer.echo(f"The report is in {output}: open it in any browser.")


def _has_splits(path: Path) -> bool:
    """Return whether the folders in a folder are the splits of a conversion."""
    from penstock.shard.manifest import MANIFEST  # noqa: PLC0415  # imports numpy

    return path.is_dir() and any(path.glob(f"*/{MANIFEST}"))
