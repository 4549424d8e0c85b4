"""`penstock doctor`: print what an examination found, and what to do about it."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.errors import ProblemsFound
from penstock.cli.groups import expand_groups
from penstock.cli.options import Json, Quiet, UrlGroup
from penstock.cli.screen import print_json, print_report
from penstock.cli.where import check_exists
from penstock.core.errors import OptionError
from penstock.core.text import count
from penstock.files.stores.url import is_url

if TYPE_CHECKING:
    from penstock.doctor.finding import Examination

__all__ = ["doctor"]

_AREAS = {"installation": "Installation", "machine": "Machine", "storage": "Storage", "data": "Data"}


@expand_groups
def doctor(
    url: UrlGroup,
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|PATTERN|URL",
            help="A folder to examine, too: of a dataset, of several, of a run, a zarr store; or the URL of a dataset "
            "or a zarr store; also as --input (-i).",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Examine this installation, this machine and a folder of data, and say what to do.

    Shows versions and missing packages, the CPU and the code that it runs, limits on CPUs, memory and open files,
    shared memory, worker processes, clocks, and the speed of the storage. Of a folder: the manifest, sizes and some
    checksums, files that do not belong to it, locks, and what programs that were stopped have left, with the command
    that removes it. Of a URL: whether its server answers, how fast, and whether all shards are there.

    Nothing is changed, and it takes some seconds. Each finding is ok, a note, a warning (it works, but look at it) or
    a problem (it does not work, or data are at risk); with a problem, the exit code is 1. Attach the output of --json
    to a bug report; it names paths and versions, and no data.
    """
    from penstock.doctor.examination import examine  # noqa: PLC0415  # takes some time to import
    from penstock.observe.progress import track_phases  # noqa: PLC0415

    if where is not None:
        check_exists(where)
    if url.options() is not None and (where is None or not is_url(where)):
        raise OptionError("--endpoint, --region and --anonymous are for URLs, and none was given. Leave them out.")
    with track_phases(show=not quiet) as bar:
        found = examine(where, store=url.options(), on_progress=bar)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, where)
    if found.count("problem"):
        raise ProblemsFound


def _print(found: "Examination", where: str | None) -> None:
    sections = {
        title: [
            (finding.level, finding.found, "" if finding.level == "ok" else finding.advice, finding.command)
            for finding in found.findings
            if finding.area == area
        ]
        for area, title in _AREAS.items()
    }
    print_report(sections)
    typer.echo(_summarize(found))
    typer.echo(f"For a bug report: penstock doctor {'' if where is None else f'{shlex.quote(where)} '}--json")


def _summarize(found: "Examination") -> str:
    bad = [count(number, level) for level in ("problem", "warning", "note") if (number := found.count(level))]
    return f"{', '.join(bad) or 'No problems'}; {found.count('ok')} ok."
