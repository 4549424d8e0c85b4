"""`penstock convert`: convert recordings to shards on the command line."""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.conversion.estimate import estimate, print_notes
from penstock.cli.conversion.options import ConversionOptions
from penstock.cli.conversion.results import conclude, print_datasets
from penstock.cli.errors import name_options
from penstock.cli.groups import expand_groups, list_limited
from penstock.cli.options import Json, Quiet
from penstock.cli.where import check_input
from penstock.core.errors import OptionError
from penstock.core.text import count, list_some, name_once
from penstock.files.stores.url import is_url, parse_place

if TYPE_CHECKING:
    from penstock.convert.inputs.protocol import Input
    from penstock.shard.manifest import Manifest

__all__ = ["convert"]

_MOST_LINES = 20


@expand_groups
def convert(
    context: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Files, patterns in quotes, zarr stores, folders of audio, images or shards, or URLs of them; also as "
            "--input (-i).",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|URL",
            help="Folder or URL of the dataset; with --split, of one dataset per name.",
        ),
    ],
    *,
    options: ConversionOptions,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert recordings to tar shards.

    Inputs are NWB files, npz, npy, zarr stores, audio, images, other whole files, or other shards. The bytes are the
    same for any number of workers. A dataset appears only when it is complete: after an error or Ctrl-C nothing is
    published, and --resume continues. Of NWB files at a URL, only what is needed is downloaded.
    """
    from penstock.convert.engines import LocalEngine  # noqa: PLC0415
    from penstock.convert.formats import inputs_of  # noqa: PLC0415  # imports numpy

    reading, writing, execution = options.to_read_options(), options.to_convert_options(), options.execution
    where, store = parse_place(output), options.url.to_store()
    for given in itertools.filterfalse(is_url, inputs):
        check_input(given)
    engine = LocalEngine(execution.workers)
    found = inputs_of(inputs, options.input.kind, reading, store)  # type: ignore[arg-type]  # checked there
    _check_used(context, found)
    if execution.dry_run:
        estimate(found, where, writing, engine, context.command, show=not quiet, as_json=as_json)
        return
    from penstock.convert.convert import convert as convert_inputs  # noqa: PLC0415
    from penstock.convert.to_shards import choose_store  # noqa: PLC0415
    from penstock.observe.progress import track_phases  # noqa: PLC0415

    began = time.monotonic()
    how: dict[str, Any] = {"engine": engine, "store": choose_store(store, inputs, where)}
    with track_phases(show=not quiet) as bar:
        manifests = convert_inputs(found, where, writing, existing=execution.existing, on_progress=bar, **how)
    seconds = time.monotonic() - began
    if not as_json:
        _print_result(context, manifests, len(found), seconds)
    workers = execution.workers if execution.validate else None
    conclude(manifests, workers, how["store"], show=not quiet, as_json=as_json)


def _check_used(context: typer.Context, inputs: "Sequence[Input]") -> None:
    """Raise OptionError for an option that applies to none of the inputs."""
    kinds = {type(given).__name__ for given in inputs}
    limited = list_limited(ConversionOptions)
    for parameter in context.command.params:
        applies_to = limited.get(parameter.name or "")
        source = context.get_parameter_source(parameter.name or "")
        if applies_to is not None and source is not None and source.name == "COMMANDLINE" and not kinds & {*applies_to}:
            if kinds == {"ClipInput"} and "AudioInput" in applies_to:
                raise OptionError(f"{parameter.opts[-1]} does not apply to whole clips. Leave it or --clips out.")
            names = dict.fromkeys(kind.removesuffix("Input").replace("Clip", "Audio") for kind in applies_to)
            shown = " or ".join(name if name.isupper() else name.lower() for name in names)
            raise OptionError(f"{parameter.opts[-1]} applies only to {shown} inputs, and there are none. Leave it out.")


def _print_result(context: typer.Context, manifests: "dict[str, Manifest]", n_inputs: int, seconds: float) -> None:
    print_datasets(manifests)
    from penstock.convert.to_shards import list_notes  # noqa: PLC0415

    about = next(iter(manifests.values())).metadata["conversion"]
    print_notes(list_notes(manifests), context.command)
    _print_skipped([{**entry, "reason": name_options(entry["reason"], context.command)} for entry in about["skipped"]])
    typer.echo(f"Converted {n_inputs - len(about['skipped']):,} of {count(n_inputs, 'input')} in {seconds:,.1f} s")


def _print_skipped(skipped: Sequence[dict[str, str]]) -> None:
    """Print which inputs were skipped, those with the same reason on one line, on at most 20 lines."""
    files: dict[str, list[str]] = {}
    for entry in skipped:
        files.setdefault(entry["reason"].partition("\n")[0], []).append(entry["file"])
    for reason, names in list(files.items())[:_MOST_LINES]:
        one = len(names) == 1
        shown = name_once(names[0], reason) if one else f"{list_some(names, 'input')}: {reason}"
        typer.echo(f"Skipped{':' if one else ''} {shown}", err=True)
    rest = sum(map(len, list(files.values())[_MOST_LINES:]))
    if rest:
        typer.echo(f"Skipped {rest:,} more; the manifest has all of them.", err=True)
