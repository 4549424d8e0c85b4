"""Options that commands share, and the examples of their help."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import typer

if TYPE_CHECKING:
    from penstock.files.stores.options import StoreOptions

__all__ = [
    "EXAMPLES",
    "ConvertUrlGroup",
    "CostGroup",
    "Json",
    "Quiet",
    "Readers",
    "UrlGroup",
    "Where",
    "choices",
    "format_examples",
    "parse_size",
]

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
        metavar="DIR|PATTERN|STORE|URL",
        help="A dataset (its folder, or the pattern it was indexed with, or the URL of one), or a zarr store; "
        "also as --input (-i).",
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


_Endpoint: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Server of s3://, gs:// and az:// URLs, such as http://localhost:9000; from the environment and the "
        "usual config files if not given, like credentials.",
    ),
]
_Region: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="Region of an S3 bucket.")]


@dataclass(frozen=True, slots=True)
class UrlGroup:
    """How a URL is reached."""

    PANEL: ClassVar[str] = "URLs"

    endpoint: _Endpoint = None
    region: _Region = None
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Send no credentials, as public buckets allow.")] = (
        False
    )

    def options(self) -> "StoreOptions | None":
        """Return them as Python takes them; None if none is given."""
        from penstock.files.stores.options import StoreOptions  # noqa: PLC0415  # for commands with a URL only

        if (self.endpoint, self.region, self.anonymous) == (None, None, False):
            return None
        return StoreOptions(endpoint=self.endpoint, region=self.region, anonymous=self.anonymous)


@dataclass(frozen=True, slots=True)
class ConvertUrlGroup:
    """How the URLs of inputs and of the output are reached."""

    PANEL: ClassVar[str] = "URLs"

    endpoint: _Endpoint = None
    region: _Region = None
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Read inputs without credentials, as public buckets allow.")
    ] = False
    cache: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep what is downloaded of inputs in this folder, for the next conversion."),
    ] = None
    cache_bytes: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_size, help="The most that --cache may hold, such as 100GB."),
    ] = None

    def to_store(self) -> "StoreOptions | None":
        """Return how URLs are reached; None: by the environment."""
        from penstock.files.stores.options import StoreOptions  # noqa: PLC0415  # for commands with a URL only

        return None if (self.endpoint, self.region) == (None, None) else StoreOptions(self.endpoint, self.region)

    def to_dict(self) -> dict[str, Any]:
        """Return how inputs are read, as `ReadOptions` takes it. Nobody writes without credentials."""
        from penstock.files.stores.options import StoreOptions  # noqa: PLC0415

        store = StoreOptions(self.endpoint, self.region, anonymous=True) if self.anonymous else None
        return {"store": store, "cache": self.cache, "cache_bytes": self.cache_bytes}


EXAMPLES = {
    "convert": (
        "penstock convert 'recordings/*.nwb' --output shards --workers 4",
        "penstock convert session.npz --output shards --sequence-length 100 --dry-run",
        "penstock convert 'recordings/*.nwb' -o shards --split train=0.8,val=0.2 --group-by subject",
        "penstock convert 's3://bucket/raw/**/*.nwb' -o s3://bucket/train --workers 4",
    ),
    "edit": (
        "penstock edit shards --output good --where 'quality > 0.5' --drop-field lfp --rename spikes=counts",
        "penstock edit shards -o parts --split train=0.8,val=0.2 --split-by subject --workers 4",
        "penstock edit monday -o week --merge tuesday --merge wednesday --sort-by time",
        "penstock edit shards -o larger --reshard 256MB",
        "penstock edit shards -o louder --add-field loudness=features:loudness --workers 4",
    ),
    "index": (
        "penstock index photos",
        "penstock index 'photos/train-{000000..000009}.tar' --workers 4",
        "penstock index 's3://bucket/train-{000000..000099}.tar'",
        "penstock index https://example.org/photos-{000..099}.tar --output photos-index",
    ),
    "inspect": (
        "penstock inspect shards",
        "penstock inspect recording.nwb",
        "penstock inspect shards --item 7 --png item.png",
        "penstock inspect shards --cache 100GB",
        "penstock inspect shards --json | jq .total_samples",
        "penstock inspect s3://bucket/train",
    ),
    "verify": (
        "penstock verify shards --workers 4",
        "penstock verify shards --json | jq '.problems[].shard'",
        "penstock verify recording.zarr",
        "penstock verify s3://bucket/train --endpoint http://localhost:9000 --workers 4",
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
        "penstock doctor s3://bucket/train",
        "penstock doctor shards --json > doctor.json",
        "penstock doctor shards --json | jq '.findings[] | select(.level == \"problem\")'",
    ),
}
"""Examples by command. The first is shown with a usage error."""


def format_examples(command: str) -> str:
    """Return the examples at the end of the help of a command."""
    # A line with only a backspace keeps click from rewrapping the lines.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])])


def choices(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion for an option. Values are checked where they are used, with their own message."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete
