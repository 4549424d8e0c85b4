"""`penstock edit`: change a dataset into another one on the command line."""

import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli.conversion.results import conclude, print_datasets
from penstock.cli.groups import expand_groups
from penstock.cli.options import Json, Quiet, UrlGroup, parse_size
from penstock.cli.where import check_dataset
from penstock.core.errors import OptionError
from penstock.core.text import count
from penstock.files.stores.url import Url, is_url, parse_place

if TYPE_CHECKING:
    from penstock.convert.edit.edits import Edits

__all__ = ["edit"]


@dataclass(frozen=True, slots=True)
class _ItemGroup:
    PANEL: ClassVar[str] = "Items"

    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Keep the items that fulfil a condition over columns, such as \"subject == 'A' and quality > 0.5\".",
        ),
    ] = None
    merge: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR|URL", help="Append the items of another dataset with the same fields. Repeatable."),
    ] = None
    sort_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Write items in ascending order of a column.")
    ] = None
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME=FRACTION,…", help="Write one dataset per name, such as train=0.8,val=0.1,test=0.1."),
    ] = None
    split_by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="With --split: items with the same value, such as subject, stay in one part; items are divided one by "
            "one if not given.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="With --split: the seed of the random division.")] = 0


@dataclass(frozen=True, slots=True)
class _FieldGroup:
    PANEL: ClassVar[str] = "Fields"

    drop_fields: Annotated[
        list[str] | None, typer.Option("--drop-field", metavar="NAME", help="Leave a field out. Repeatable.")
    ] = None
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="Rename a field. Repeatable.")] = None
    add_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--add-field",
            metavar="NAME=MODULE:FUNCTION",
            help="Compute a field from each item, a dict of its fields. What is written has this field alone (a "
            "sidecar, to join with Zip), unless --copy is given. Repeatable.",
        ),
    ] = None
    copy: Annotated[
        bool, typer.Option("--copy", help="With --add-field: write the other fields of the items as well.")
    ] = False


@dataclass(frozen=True, slots=True)
class _ShardGroup:
    PANEL: ClassVar[str] = "Shards"

    reshard: Annotated[
        str | None,
        typer.Option(
            metavar="N|SIZE",
            help="Items per shard, such as 5000, or about how large a shard is, such as 256MB; as in SRC if not given.",
        ),
    ] = None

    def to_dict(self) -> dict[str, int]:
        """Return the size as Python takes it."""
        text = (self.reshard or "").strip()
        if not text:
            return {}
        is_count = text.lstrip("-").isdecimal()
        size = int(text) if is_count else parse_size(text)
        if size < 1:
            raise OptionError(f"--reshard must be a number of items >= 1, or a size such as 256MB, got {text}.")
        return {"shard_size" if is_count else "shard_bytes": size}


@dataclass(frozen=True, slots=True)
class _ExecutionGroup:
    PANEL: ClassVar[str] = "Execution"

    workers: Annotated[
        int, typer.Option("--workers", "-w", metavar="N", min=1, help="Number of shards written at once.")
    ] = 1
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted edit of the same datasets with the same options.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the dataset at the output once the new one is complete.")
    ] = False
    validate: Annotated[
        bool, typer.Option("--validate", help="Read every byte again and compare it with what was written.")
    ] = False


@dataclass(frozen=True, slots=True)
class _EditOptions:
    items: _ItemGroup
    fields: _FieldGroup
    shards: _ShardGroup
    execution: _ExecutionGroup
    url: UrlGroup

    def to_edits(self) -> "Edits":
        """Return what is changed."""
        from penstock.convert.edit.edits import Edits  # noqa: PLC0415  # imports numpy
        from penstock.convert.splits import parse_split  # noqa: PLC0415

        return Edits(
            self.items.where,
            tuple(self.fields.drop_fields or ()),
            dict(_parse_rename(text) for text in self.fields.rename or ()),
            self.items.sort_by,
            None if self.items.split is None else dict(parse_split(self.items.split)),
            self.items.split_by,
            self.items.seed,
            **self.shards.to_dict(),
            add_fields=dict(_parse_added(text) for text in self.fields.add_fields or ()),
            copy=self.fields.copy,
        )


@expand_groups
def edit(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="The folder or URL of a dataset; also as --input (-i). It does not change."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|URL",
            help="Folder or URL of the edited dataset; with --split, of one dataset per name. Required, except for the "
            "sidecar of --add-field, which is SRC-NAME if not given.",
        ),
    ] = None,
    *,
    options: _EditOptions,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the shards of a dataset again, edited.

    Keep, sort, split and merge items; drop and rename fields; change the size of shards. Conditions and columns name
    what `penstock inspect SRC` shows: fields with one value per item, and keys of metadata. Every byte that is read is
    verified. The edited dataset appears only when it is complete: after an error or Ctrl-C nothing is published, and
    --resume continues. Its manifest says what it was made of.
    """
    from penstock.convert.convert import existing_from_flags  # noqa: PLC0415  # imports numpy
    from penstock.convert.edit.edit_dataset import write_edited  # noqa: PLC0415
    from penstock.convert.engines import LocalEngine  # noqa: PLC0415
    from penstock.observe.progress import track_phases  # noqa: PLC0415

    sources, execution, store = [source, *(options.items.merge or ())], options.execution, options.url.options()
    for given in itertools.filterfalse(is_url, sources):
        check_dataset(given)
    sys.path.insert(0, str(Path.cwd()))  # where the modules of --add-field are looked for, as python -m does
    edits, began = options.to_edits(), time.monotonic()
    where = _choose_output(source, output, edits)
    how: dict[str, Any] = {
        "engine": LocalEngine(execution.workers),
        "existing": existing_from_flags(resume=execution.resume, overwrite=execution.overwrite),
    }
    with track_phases(show=not quiet) as bar:
        manifests = write_edited(sources, where, edits, on_progress=bar, store=store, **how)
    seconds = time.monotonic() - began
    if not as_json:
        print_datasets(manifests)
        typer.echo(f"Edited {count(len(sources), 'dataset')} in {seconds:,.1f} s")
    workers = execution.workers if execution.validate else None
    conclude(manifests, workers, store, show=not quiet, as_json=as_json)


def _choose_output(source: str, output: str | None, edits: "Edits") -> "Path | Url":
    if output is not None:
        return parse_place(output)
    if not edits.is_sidecar:
        raise OptionError("--output must be given: the folder or URL of the edited dataset.")
    beside = parse_place("-".join([source.rstrip("/"), *(edits.add_fields or ())]))
    if isinstance(beside, Url) and beside.is_http:
        raise OptionError("--output must be given: beside a dataset at a web address, nothing can be written.")
    return beside


def _parse_added(text: str) -> tuple[str, str]:
    name, equals, function = text.partition("=")
    if not equals or not name.strip() or not function.strip():
        raise OptionError(f"--add-field must be NAME=MODULE:FUNCTION, such as loud=features:loudness, got {text!r}.")
    return name.strip(), function.strip()


def _parse_rename(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old.strip() or not new.strip():
        raise OptionError(f"--rename must be OLD=NEW, such as spikes=counts, got {text!r}.")
    return old.strip(), new.strip()
