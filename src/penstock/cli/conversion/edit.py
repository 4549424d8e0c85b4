"""`penstock edit`: change a dataset into another one on the command line."""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli.conversion.results import conclude, print_datasets
from penstock.cli.groups import expand_groups
from penstock.cli.options import Json, Quiet, UrlGroup, parse_size
from penstock.cli.where import check_dataset
from penstock.core.errors import OptionError, SourceError
from penstock.core.text import count, did_you_mean
from penstock.files.stores.url import Url, is_url, parse_place

if TYPE_CHECKING:
    from penstock.core.protocols import Source, Transform

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
            help="Add a field that a function computes from each item, a dict of its fields. Repeatable.",
        ),
    ] = None


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

    def choose(self, sources: "list[Any]") -> "Source | dict[str, Source]":
        """Return the items to write; with a split, those of each part."""
        from penstock.convert.splits import parse_split  # noqa: PLC0415  # imports numpy
        from penstock.source.combine import Concat, Renamed  # noqa: PLC0415

        items, dropped = self.items, [*(self.fields.drop_fields or ())]
        names = dict(_parse_rename(text) for text in self.fields.rename or ())
        if items.split_by is not None and items.split is None:
            raise OptionError(
                f"split_by needs a split, got split_by={items.split_by!r} without one. Give split=... too."
            )
        _check_names(sources, dropped, names)
        each = [source.with_fields([name for name in source.fields if name not in dropped]) for source in sources]
        if any(one.fields.keys() != each[0].fields.keys() for one in each):  # they may be the same under other names
            own = [{old: new for old, new in names.items() if old in one.fields} for one in each]
            each, names = [Renamed(one, its) for one, its in zip(each, own, strict=True)], {}
        chosen: Any = each[0] if len(each) == 1 else Concat(each)
        if items.where is not None:
            total, chosen = count(len(chosen.index), "item"), chosen.where(items.where)
            if not len(chosen.index):
                raise SourceError(f"There must be items to write, but where={items.where!r} keeps none of {total}.")
        found = {"": chosen}
        if items.split is not None:
            found = chosen.split(by=items.split_by, seed=items.seed, **dict(parse_split(items.split)))
        if items.sort_by is not None:
            found = {name: part.sort_by(items.sort_by) for name, part in found.items()}
        if names:
            found = {name: Renamed(part, names) for name, part in found.items()}
        return found if items.split is not None else found[""]

    def transform(self) -> "Transform | None":
        """Return what adds fields; None if there are none."""
        from penstock.convert.add_field import AddField  # noqa: PLC0415
        from penstock.transform.compose import Compose  # noqa: PLC0415

        added = [AddField(*_parse_added(text)) for text in self.fields.add_fields or ()]
        return added[0] if len(added) == 1 else Compose(added) if added else None


@expand_groups
def edit(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="The folder or URL of a dataset; also as --input (-i). It does not change."),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|URL",
            help="Folder or URL of the edited dataset; with --split, of one dataset per name.",
        ),
    ],
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
    from penstock.convert.engines import LocalEngine  # noqa: PLC0415
    from penstock.convert.write import write_chosen  # noqa: PLC0415
    from penstock.observe.progress import track_phases  # noqa: PLC0415
    from penstock.source.tar.source import TarSource  # noqa: PLC0415

    given, execution, store = [source, *(options.items.merge or ())], options.execution, options.url.options()
    for place in itertools.filterfalse(is_url, given):
        check_dataset(place)
    places = [parse_place(place) if is_url(place) else Path(place).resolve() for place in given]
    for place in (place for place in places if places.count(place) > 1):
        raise OptionError(f"Every dataset must be given once, got {place} twice. Its items would be there twice.")
    sys.path.insert(0, str(Path.cwd()))  # where the modules of --add-field are looked for, as python -m does
    began, where = time.monotonic(), parse_place(output)
    sources = [TarSource(place, store=store if is_url(place) else None) for place in given]
    how: dict[str, Any] = {
        "engine": LocalEngine(execution.workers),
        "existing": existing_from_flags(resume=execution.resume, overwrite=execution.overwrite),
        "store": store if isinstance(where, Url) else None,
    }
    with track_phases(show=not quiet) as bar:
        chosen, transform = options.choose(sources), options.transform()
        how |= {"transform": transform, **options.shards.to_dict()}
        manifests = write_chosen(chosen, where, on_progress=bar, **how)
    seconds = time.monotonic() - began
    if not as_json:
        print_datasets(manifests)
        typer.echo(f"Edited {count(len(sources), 'dataset')} in {seconds:,.1f} s")
    workers = execution.workers if execution.validate else None
    conclude(manifests, workers, store, show=not quiet, as_json=as_json)


def _check_names(sources: "Sequence[Source]", dropped: Sequence[str], names: Mapping[str, str]) -> None:
    """Raise OptionError unless each field to drop or rename is in one of the datasets."""
    known = list(dict.fromkeys(name for source in sources for name in source.fields if name != "metadata"))
    for what, given in (("drop", dropped), ("rename", names)):
        for name in (name for name in given if name not in known):
            hint = " Metadata stay with their items." if name == "metadata" else did_you_mean(name, known)
            raise OptionError(f"The field to {what} must be one of {', '.join(map(repr, known))}, got {name!r}.{hint}")
    if set(known) <= set(dropped):
        raise OptionError(f"drop_fields must leave at least one field, but drops all of {', '.join(known)}.")


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
