"""The options of `penstock convert`, in groups, and the objects of the package that they stand for.

Each option is declared once: its name, type, default, help, and the inputs that it applies to.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli.conversion.split_options import ColumnGroup, SplitGroup
from penstock.cli.groups import AppliesTo
from penstock.cli.options import ConvertUrlGroup, choices
from penstock.core.errors import OptionError

if TYPE_CHECKING:
    from penstock.convert.convert import Existing
    from penstock.convert.formats import ReadOptions
    from penstock.convert.scan import ConvertOptions

__all__ = ["ConversionOptions"]

_FORMATS = ("auto", "nwb", "npz", "npy", "zarr", "audio", "files", "shards")
_NWB, _ROWS = ("NWBInput",), ("NpyInput", "NpzInput", "ZarrInput")
_AUDIO, _CLIPS = ("AudioInput",), ("ClipInput",)


@dataclass(frozen=True, slots=True)
class _InputGroup:
    PANEL: ClassVar[str] = "Input"

    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="Format of the inputs: auto (from their names), nwb, npz, npy, zarr, audio, files or shards.",
            autocompletion=choices(*_FORMATS),
        ),
    ] = "auto"
    fields: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="npz, zarr: names of the arrays to convert; all if not given."),
        AppliesTo(("NpzInput", "ZarrInput")),
    ] = None
    whole_files: Annotated[
        bool,
        typer.Option(
            "--whole-files",
            help="Each file, or each set of files with the same stem (a.png, a.txt), is one item; as --format files.",
        ),
    ] = False
    axis: Annotated[
        int, typer.Option(metavar="N", help="zarr: the axis along which items lie."), AppliesTo(("ZarrInput",))
    ] = 0

    @property
    def kind(self) -> str:
        """The format of the inputs."""
        if self.whole_files and self.format not in ("auto", "files"):
            raise OptionError(f"--whole-files must be given without --format, got --format {self.format}.")
        return "files" if self.whole_files else self.format


@dataclass(frozen=True, slots=True)
class _WindowGroup:
    PANEL: ClassVar[str] = "Windows"

    sequence_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="NWB: bins per item; 100 if not given. npy, npz, zarr: rows per item; single rows if not given.",
        ),
        AppliesTo((*_NWB, *_ROWS)),
    ] = None
    overlap: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Fraction of a window that the next one repeats, >= 0 and < 1. If not given, 0.5 for NWB and 0 for "
            "other inputs.",
        ),
        AppliesTo((*_NWB, *_ROWS, *_AUDIO)),
    ] = None
    window_seconds: Annotated[
        float, typer.Option(metavar="S", help="Length of an item in seconds."), AppliesTo(_AUDIO)
    ] = 1.0
    rate_hz: Annotated[
        float | None,
        typer.Option(metavar="HZ", help="NWB, audio: resample series and audio to this rate."),
        AppliesTo((*_NWB, *_AUDIO, *_CLIPS)),
    ] = None
    mono: Annotated[bool, typer.Option("--mono", help="Mix all channels into one."), AppliesTo((*_AUDIO, *_CLIPS))] = (
        False
    )
    clips: Annotated[
        bool,
        typer.Option("--clips", help="Each file is one item instead of windows."),
        AppliesTo(_CLIPS),
    ] = False
    clip_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="With --clips: length of an item in seconds; longer clips are cropped, shorter ones padded with "
            "zeros. If not given, each keeps its own length.",
        ),
        AppliesTo(_CLIPS),
    ] = None
    min_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Skip files that are shorter, and count them."),
        AppliesTo((*_AUDIO, *_CLIPS)),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the window options that were given; all others have different defaults for each kind of input."""
        given = {"sequence_length": self.sequence_length, "overlap": self.overlap}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _NWBGroup:
    PANEL: ClassVar[str] = "NWB files"

    modalities: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="What to convert: spikes, lfp, behavior, stimulus, ophys, or names or paths of series. If not given, "
            "spikes,lfp,behavior, or with --field none.",
        ),
        AppliesTo(_NWB),
    ] = None
    named_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=PATH",
            help="A further field, from any series, table, column of a table or image in the file, such as "
            "wheel=acquisition/wheel or choice=intervals/trials/choice. May be repeated.",
        ),
        AppliesTo(_NWB),
    ] = None
    bin_size_ms: Annotated[
        float, typer.Option(metavar="MS", help="Width of a bin in milliseconds."), AppliesTo(_NWB)
    ] = 10.0
    missing: Annotated[
        str,
        typer.Option(
            metavar="refuse|skip|allow",
            help="What to do if a file lacks a modality: refuse, skip it in all files, or allow it: fill it in, with a "
            "mask has_<field>.",
            autocompletion=choices("refuse", "skip", "allow"),
        ),
        AppliesTo(_NWB),
    ] = "refuse"
    units: Annotated[
        str,
        typer.Option(
            metavar="refuse|intersect|pad",
            help="What to do if files have different units or columns of behavior: refuse, keep those that all files "
            "have, or fill in those that a file lacks. Units are matched by id.",
            autocompletion=choices("refuse", "intersect", "pad"),
        ),
        AppliesTo(_NWB),
    ] = "refuse"
    fill: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="With --missing allow, --units pad and --unobserved mask: what to fill in; NaN if not given.",
        ),
        AppliesTo(_NWB),
    ] = None
    unobserved: Annotated[
        str,
        typer.Option(
            metavar="mask|drop|keep",
            help="What to do with units outside their obs_intervals: mask them (NaN, and False in spikes_valid), drop "
            "the window, or keep the counts. Windows that overlap invalid_times are left out, unless kept.",
            autocompletion=choices("mask", "drop", "keep"),
        ),
        AppliesTo(_NWB),
    ] = "mask"
    unit_filter: Annotated[
        list[str] | None,
        typer.Option(
            "--unit-filter",
            metavar="COLUMN=VALUE,…",
            help="Keep only units with one of these values, such as quality=good or location=CA1,CA3. May be repeated.",
        ),
        AppliesTo(_NWB),
    ] = None
    align: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE", help="Cut one window around each event of a table, such as trials, instead of a grid."
        ),
        AppliesTo(_NWB),
    ] = None
    align_event: Annotated[
        str, typer.Option(metavar="COLUMN", help="With --align: the column of event times."), AppliesTo(_NWB)
    ] = "start_time"
    pre_ms: Annotated[
        float, typer.Option(metavar="MS", help="With --align: milliseconds before the event."), AppliesTo(_NWB)
    ] = 0.0
    post_ms: Annotated[
        float, typer.Option(metavar="MS", help="With --align: milliseconds after the event."), AppliesTo(_NWB)
    ] = 1000.0

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `NWBOptions`, without windows and rate."""
        around = {"align": self.align, "align_event": self.align_event, "pre_ms": self.pre_ms, "post_ms": self.post_ms}
        if "=" in self.units:
            raise OptionError(
                f"--units must be one of refuse, intersect, pad, got {self.units!r}. Use --unit-filter {self.units} to "
                "select units."
            )
        return {
            "modalities": _split_names("--modalities", self.modalities) if self.modalities is not None else None,
            "fields": tuple(_parse_field(text) for text in self.named_fields or ()),
            "bin_size_ms": self.bin_size_ms,
            "missing": self.missing,
            "units": self.units,
            "fill": self.fill,
            "unobserved": self.unobserved,
            "unit_filter": tuple(_parse_filter(text) for text in self.unit_filter or ()),
            **(around if self.align else {}),
        }


@dataclass(frozen=True, slots=True)
class _ShardGroup:
    PANEL: ClassVar[str] = "Shards"

    shard_size: Annotated[int, typer.Option(metavar="N", help="Items per shard.")] = 1000
    compression: Annotated[
        str,
        typer.Option(
            metavar="none|gz|bz2|xz",
            help="Compression of whole shards.",
            autocompletion=choices("none", "gz", "bz2", "xz"),
        ),
    ] = "none"
    layout: Annotated[
        str,
        typer.Option(
            metavar="samples|columns|auto",
            help="How items lie in a shard: each by itself, as columns of many (small items), or as suits their size.",
            autocompletion=choices("samples", "columns", "auto"),
        ),
    ] = "samples"


@dataclass(frozen=True, slots=True)
class _ExecutionGroup:
    PANEL: ClassVar[str] = "Execution"

    workers: Annotated[
        int, typer.Option("--workers", "-w", metavar="N", min=1, help="Number of shards written at once.")
    ] = 1
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate items, bytes and time from a slice; write nothing.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted conversion of the same inputs and options.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the dataset in DIR once the new one is complete.")
    ] = False
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip inputs that cannot be read, and list them at the end.")
    ] = False
    validate: Annotated[
        bool, typer.Option("--validate", help="Read every byte again and compare it with what was written.")
    ] = False

    @property
    def existing(self) -> "Existing":
        """What to do with a dataset or an unfinished conversion in the output folder."""
        from penstock.convert.convert import existing_from_flags  # noqa: PLC0415

        return existing_from_flags(resume=self.resume, overwrite=self.overwrite)


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """All options of `penstock convert` that come in groups."""

    input: _InputGroup
    windows: _WindowGroup
    nwb: _NWBGroup
    columns: ColumnGroup
    split: SplitGroup
    shards: _ShardGroup
    execution: _ExecutionGroup
    url: ConvertUrlGroup

    def to_read_options(self) -> "ReadOptions":
        """Return how inputs are read."""
        from penstock.convert.formats import ReadOptions  # noqa: PLC0415
        from penstock.convert.nwb.input import NWBOptions  # noqa: PLC0415

        rate_hz, windows = self.windows.rate_hz, self.windows.to_dict()
        return ReadOptions(
            nwb=NWBOptions(**self.nwb.to_dict(), **windows, rate_hz=rate_hz),
            fields=_split_names("--fields", self.input.fields) if self.input.fields else None,
            axis=self.input.axis,
            window_seconds=self.windows.window_seconds,
            rate_hz=rate_hz,
            channels="mono" if self.windows.mono else "keep",
            clips=self.windows.clips,
            clip_seconds=self.windows.clip_seconds,
            min_seconds=self.windows.min_seconds,
            **windows,
            **self.url.to_dict(),
        )

    def to_convert_options(self) -> "ConvertOptions":
        """Return how shards are written."""
        from penstock.convert.columns import Columns  # noqa: PLC0415
        from penstock.convert.scan import ConvertOptions  # noqa: PLC0415
        from penstock.convert.splits import Split, parse_split  # noqa: PLC0415
        from penstock.shard.outputs.write_options import WriteOptions  # noqa: PLC0415

        split: Any = {"group_by": self.split.group_by}  # checked by Split
        if self.split.split:
            split["shares"] = parse_split(self.split.split)
        shards = self.shards
        writing: Any = {"shard_size": shards.shard_size, "compression": shards.compression, "layout": shards.layout}
        return ConvertOptions(
            WriteOptions(**writing),
            Split(**split),
            "skip" if self.execution.skip_bad else "fail",
            Columns(self.columns.name_pattern, self.columns.table, self.columns.key, self.columns.label),
        )


def _split_names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").split())
    if not names:
        raise OptionError(f"{option} must be one or more names, such as lfp,spikes, got {text!r}.")
    return names


def _parse_field(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path.strip():
        raise OptionError(f"--field must be NAME=PATH, such as wheel=acquisition/wheel, got {text!r}.")
    return name.strip(), path.strip()


def _parse_filter(text: str) -> tuple[str, tuple[str, ...]]:
    column, equals, values = text.partition("=")
    if not equals or not column or not values:
        raise OptionError(
            f"--unit-filter must be COLUMN=VALUE, such as quality=good or location=CA1,CA3, got {text!r}."
        )
    return column.strip(), tuple(value.strip() for value in values.split(","))
