"""The command `penstock tune`. It imports torch when it runs; --help does not."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from penstock.cli.errors import name_options
from penstock.cli.groups import expand_groups
from penstock.cli.options import Json, Quiet
from penstock.cli.screen import print_facts, print_json, print_table, tables_on
from penstock.cli.where import check_dataset, check_exists, is_source

if TYPE_CHECKING:
    from penstock.recipes.tune.tuning import Tuning

__all__ = ["tune"]


@dataclass(frozen=True, slots=True)
class _SearchGroup:
    PANEL: ClassVar[str] = "Search"

    batch_size: Annotated[int, typer.Option("--batch-size", "-b", metavar="N", min=1, help="Items per batch.")] = 32
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="About how long the search may take.")] = (
        20.0
    )
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", metavar="MS", min=0, help="Duration of one training step in milliseconds."),
    ] = None
    max_workers: Annotated[
        int | None,
        typer.Option("--max-workers", metavar="N", min=0, help="Most workers to try; 8 per CPU if not given."),
    ] = None


@expand_groups
def tune(  # noqa: PLR0917  # one parameter per option
    context: typer.Context,
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PATTERN|FILE|URL",
            help="A dataset: a folder of shards, a pattern, a zarr store, the URL of one, or an npy file; "
            "also as --input (-i).",
        ),
    ],
    search: _SearchGroup,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the result to this file, for Tuning.load(FILE)."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find fast loader settings for a dataset, and the order that fits its storage.

    Measures how fast the storage reads in sequence and at random, and says which order fits it. Then tries executors,
    workers and prefetch with Shuffle, recommends settings, and says whether training will wait for data.
    """
    _check_source(where)
    from penstock.feed.loader import Loader  # noqa: PLC0415  # imports torch
    from penstock.plan.orders import Shuffle  # noqa: PLC0415
    from penstock.plan.plan import Plan  # noqa: PLC0415
    from penstock.recipes.tune.search import tune as run_search  # noqa: PLC0415
    from penstock.recipes.tune.storage import look_at_storage  # noqa: PLC0415
    from penstock.source.find_source import open_source  # noqa: PLC0415

    source = open_source(where)
    look = look_at_storage(where, source, batch_size=search.batch_size, show=not quiet)  # before the trials read it
    plan = Plan(source.index, Shuffle(), min(search.batch_size, max(1, len(source.index))))
    with Loader(source, plan) as loader:
        found = run_search(
            loader,
            budget=search.budget,
            step_seconds=None if search.step_ms is None else search.step_ms / 1000,
            max_workers=search.max_workers,
            show=not quiet,
        )
    if output is not None:
        found.save(output)
    if as_json:
        print_json({**found.to_dict(), **look.to_dict()})
        return
    verdict = name_options(found.verdict, context.command)
    if tables_on():
        _print_trials(found)
        typer.echo(f"\n{verdict}")
    else:
        typer.echo(f"{found.table}\n\n{verdict}")
    typer.echo()
    print_facts(look.rows)
    if output is not None:
        typer.echo(f"Wrote {output}. Use it: Loader(source, plan, **Tuning.load({str(output)!r}).loader_kwargs())")


def _check_source(where: str) -> None:
    """Raise SourceError if there is nothing to read, before torch is imported."""
    path = Path(where)
    if path.suffix in (".npy", ".zarr") or any((path / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup")):
        check_exists(where)
    elif not is_source(where):
        check_dataset(where)


def _print_trials(found: "Tuning") -> None:
    trials = sorted(found.trials, key=lambda trial: trial.setting)
    rows = [
        (
            str(trial.setting),
            f"{1000 * trial.seconds_per_batch:,.3f}",
            f"{trial.startup_seconds:,.2f}",
            "chosen" if trial is found.chosen else "",
        )
        for trial in trials
    ]
    print_table(["Setting", "ms per batch", "s to start", ""], rows)
