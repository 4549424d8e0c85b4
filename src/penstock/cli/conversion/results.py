"""What a command that writes datasets prints about them, and their validation."""

from typing import TYPE_CHECKING

import typer

from penstock.cli.data import print_problems, problems_to_json
from penstock.cli.errors import ProblemsFound
from penstock.cli.screen import print_json, print_table, tables_on
from penstock.core.text import count

if TYPE_CHECKING:
    from penstock.files.stores.options import StoreOptions
    from penstock.shard.index_tars import Problem
    from penstock.shard.manifest import Manifest

__all__ = ["conclude", "print_datasets"]


def print_datasets(manifests: "dict[str, Manifest]") -> None:
    """Print size and fields of each dataset."""
    sizes = {name: sum(shard.stored_bytes for shard in manifest.shards) for name, manifest in manifests.items()}
    if tables_on():
        rows = [
            (
                name or str(manifest.folder),
                f"{manifest.n_items:,}",
                f"{len(manifest.shards):,}",
                f"{sizes[name] / 1e6:,.1f} MB",
                ", ".join(manifest.modalities),
            )
            for name, manifest in manifests.items()
        ]
        print_table(["Dataset", "Items", "Shards", "Size", "Fields"], rows)
    else:
        for name, manifest in manifests.items():
            where = f"{name}: " if name else ""
            typer.echo(
                f"{where}{count(manifest.n_items, 'item')} in {count(len(manifest.shards), 'shard')}, "
                f"{sizes[name] / 1e6:,.1f} MB: {', '.join(manifest.modalities)}"
            )


def conclude(
    manifests: "dict[str, Manifest]",
    workers: int | None,
    store: "StoreOptions | None",
    *,
    show: bool,
    as_json: bool,
) -> None:
    """Validate datasets with so many workers (None: do not), and print what was found.

    With `as_json`, the manifests are printed as well. Raises ProblemsFound if a dataset is damaged.
    """
    problems = None if workers is None else _validate(manifests, workers, store, show=show)
    if as_json:
        _print_manifests(manifests, problems)
    elif problems is not None:
        _print_validation(manifests, problems)
    if problems and any(problems.values()):
        raise ProblemsFound


def _print_manifests(manifests: "dict[str, Manifest]", problems: "dict[str, list[Problem]] | None") -> None:
    """Print the manifests, each with the problems that validation found."""
    from penstock.convert.to_shards import summaries  # noqa: PLC0415

    answer = summaries(manifests)
    for name, found in (problems or {}).items():
        summary = answer[name] if name else answer
        summary["problems"] = problems_to_json(found)
    print_json(answer)


def _validate(
    manifests: "dict[str, Manifest]", workers: int, store: "StoreOptions | None", *, show: bool
) -> "dict[str, list[Problem]]":
    """Read every shard again and return the problems found, by split."""
    from penstock.observe.progress import track_progress  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    problems = {}
    for name, manifest in manifests.items():
        total = sum(shard.stored_bytes for shard in manifest.shards)
        with track_progress("Validating", total, "bytes", show=show) as bar:
            _, problems[name] = verify_shards(manifest.folder, workers=workers, progress=bar.advance, store=store)
    return problems


def _print_validation(manifests: "dict[str, Manifest]", problems: "dict[str, list[Problem]]") -> None:
    """Print what validation found."""
    for name, manifest in manifests.items():
        if problems[name]:
            print_problems(problems[name])
            continue
        total = sum(shard.stored_bytes for shard in manifest.shards)
        typer.echo(f"{manifest.folder}: {total / 1e6:,.1f} MB read again, no problems")
