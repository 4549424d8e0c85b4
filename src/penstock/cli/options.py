"""Options that commands share, and the examples of their help."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import typer

__all__ = ["EXAMPLES", "CostGroup", "Json", "Quiet", "Readers", "Where", "choices", "format_examples", "parse_size"]

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Readers: TypeAlias = Annotated[
    int,
    typer.Option(
        "--workers", "-w", metavar="N", min=1, help="Number of archives, or chunks of a zarr store, read at once."
    ),
]
Where: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="DIR|PATTERN|STORE",
        help="A dataset (its folder, or the pattern it was indexed with), or a zarr store; also as --input (-i).",
    ),
]

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("", 1000), ("ib", 1024))
}


def parse_size(text: str) -> int:
    """Return a number of bytes that is written as 100GB, 1.5TB, 512MiB or 1000000.

    Examples
    --------
    >>> parse_size("100GB"), parse_size("1.5 MiB"), parse_size("42")
    (100000000000, 1572864, 42)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise typer.BadParameter(f"must be a size such as 100GB, 1.5TB or 512MiB, got {text!r}.")
    return round(float(found[1]) * _UNITS[found[2].lower()])


@dataclass(frozen=True, slots=True)
class CostGroup:
    """What an epoch over a dataset costs in an object store."""

    PANEL: ClassVar[str] = "Costs in an object store"

    cache: Annotated[
        int | None,
        typer.Option(
            "--cache",
            metavar="SIZE",
            parser=parse_size,
            help="Show what epochs download with a cache of this size, such as 100GB; 0: without a cache.",
        ),
    ] = None
    request_price: Annotated[
        float, typer.Option(metavar="USD", min=0, help="Price of 1,000 requests; an example is set.")
    ] = 0.0004
    transfer_price: Annotated[
        float, typer.Option(metavar="USD", min=0, help="Price of a GB; 0 within a region, about 0.09 to the internet.")
    ] = 0.0


EXAMPLES = {
    "convert": (
        "penstock convert 'recordings/*.nwb' --output shards --workers 4",
        "penstock convert session.npz --output shards --sequence-length 100 --dry-run",
        "penstock convert 'recordings/*.nwb' -o shards --split train=0.8,val=0.2 --group-by subject --stats",
    ),
    "index": (
        "penstock index photos",
        "penstock index 'photos/train-{000000..000009}.tar' --workers 4",
        "penstock index recording.zarr",
    ),
    "inspect": (
        "penstock inspect shards",
        "penstock inspect recording.nwb",
        "penstock inspect shards --item 7 --png item.png",
        "penstock inspect shards --cache 100GB",
        "penstock inspect shards --json | jq .total_samples",
    ),
    "verify": (
        "penstock verify shards --workers 4",
        "penstock verify shards --json | jq '.problems[].shard'",
        "penstock verify recording.zarr",
    ),
    "tune": (
        "penstock tune shards --batch-size 64 --step-ms 12",
        "penstock tune rows.npy --budget 60 --output tuned.json",
    ),
    "report": (
        "penstock report shards",
        "penstock report shards --output shards.html",
    ),
    "doctor": (
        "penstock doctor",
        "penstock doctor shards",
        "penstock doctor shards --json > doctor.json",
        "penstock doctor shards --json | jq '.findings[] | select(.level == \"problem\")'",
    ),
    "demo": (
        "penstock demo",
        "penstock demo --quick --keep demo-files",
    ),
}
"""Examples by command. The first is shown with a usage error."""


def format_examples(command: str, *, rich: bool) -> str:
    """Return the examples at the end of the help of a command."""
    lines = ["Examples:", *(f"  {line}" for line in EXAMPLES[command])]
    # A line with only a backspace keeps click from rewrapping the lines; rich leaves them as they are.
    return "\n".join(lines if rich else ["\b", *lines])


def choices(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion for an option. Values are checked where they are used, with their own message."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete
