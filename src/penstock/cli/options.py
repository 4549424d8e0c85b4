"""Options that commands share, and the examples of their help."""

from collections.abc import Callable
from typing import Annotated, TypeAlias

import typer

__all__ = ["EXAMPLES", "Json", "Quiet", "Readers", "Where", "choices", "format_examples"]

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
