"""Options: those that commands share, and those that are fields of the dataclasses that Python takes.

A field is declared once, in its dataclass: its name, type, default and description are read from the source file, which
is not imported, so that help needs neither NumPy nor torch. An option that is not given leaves the default of Python.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from penstock.core.errors import OptionError
from penstock.files.regular import read_regular

if TYPE_CHECKING:
    from penstock.files.stores.options import StoreOptions

__all__ = [
    "EXAMPLES",
    "STORE",
    "Field",
    "Fields",
    "Json",
    "PenstockCommand",
    "Quiet",
    "Readers",
    "complete",
    "format_examples",
    "make_store",
    "parse_size",
    "take_fields",
]

_PACKAGE = Path(__file__).parents[1]

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Readers: TypeAlias = Annotated[
    int, typer.Option("--workers", "-w", metavar="N", min=1, help="Number of archives read at once.")
]

EXAMPLES = {
    "convert": (
        "penstock convert 'recordings/*.nwb' --output shards --workers 4",
        "penstock convert session.npz --output shards --sequence-length 100 --dry-run",
        "penstock convert 'recordings/*.nwb' -o shards --split train=0.8,val=0.2 --group-by subject",
        "penstock convert 's3://bucket/raw/**/*.nwb' -o s3://bucket/train --workers 4",
        "penstock convert shards -o good --where 'quality > 0.5' --drop-fields lfp --rename spikes=counts",
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
        "penstock inspect shards run.json --page report.html",
        "penstock inspect s3://bucket/train --cache 100GB",
        "penstock inspect --json > machine.json",
    ),
    "check": (
        "penstock check shards",
        "penstock check shards --all --workers 4",
        "penstock check s3://bucket/train --endpoint http://localhost:9000",
        "penstock check shards --json | jq '.findings[] | select(.level == \"problem\")'",
    ),
    "tune": (
        "penstock tune shards --batch-size 64 --step-ms 12",
        "penstock tune rows.npy --budget 60 --output tuned.json",
        "penstock tune s3://bucket/train --max-workers 32",
    ),
}
"""Examples by command. The first is shown with a usage error."""

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
class Field:
    """One field of a dataclass, as it is written."""

    name: str
    kind: str
    """Its annotation."""

    default: str
    help: str

    def parse(self, given: Any) -> Any:
        """Return the value of the dataclass for what a command line gives."""
        if isinstance(given, str) and self._is_list:
            names = tuple(given.replace(",", " ").split())
            if not names:
                raise OptionError(f"{self.name} must be one or more names, such as lfp,spikes, got {given!r}.")
            return names
        if isinstance(given, list | tuple):
            pairs = [text.partition("=") for text in given]
            for text, (key, equals, value) in zip(given, pairs, strict=True):
                if not equals or not key.strip() or not value.strip():
                    raise OptionError(f"{self.name} must be NAME=VALUE, such as a=b, got {text!r}.")
            values = {key.strip(): value.strip() for key, _, value in pairs}
            return {key: tuple(v.split(",")) for key, v in values.items()} if "Any" in self.kind else values
        return given

    def parameter(self, panel: str, metavar: str | None, *names: str) -> inspect.Parameter:
        """Return the parameter of a command: None, unless it is given."""
        kind: Any = str
        for name, each in {"int": int, "float": float, "bool": bool, "Path": Path}.items():
            kind = each if self.kind.removesuffix(" | None") == name else kind
        if "Mapping" in self.kind:
            kind = list[str]
        names = names or (f"--{self.name.replace('_', '-')}",)
        shown = {int: "N", float: "X", Path: "FILE", list[str]: "NAME=VALUE"}.get(
            kind, "A,B" if self._is_list else "TEXT"
        )
        is_set = self.default not in ("None", "()", "False", "")
        option = typer.Option(
            *names,
            metavar=None if kind is bool else metavar or self._choices or shown,
            help=f"{self.help} (default {ast.literal_eval(self.default)})" if is_set else self.help,
            rich_help_panel=panel,
            show_default=False,
            autocompletion=complete(*(metavar or self._choices).split("|"))
            if "|" in (metavar or self._choices)
            else None,
        )
        hint = Annotated[kind | None, option]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)

    @property
    def _is_list(self) -> bool:
        return self.kind.startswith(("tuple[str", "Sequence[str"))

    @property
    def _choices(self) -> str:
        return "|".join(re.findall(r"'(\w+)'", self.kind)) if "Literal" in self.kind else ""


def complete(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion of an option that has choices."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


@functools.cache
def _read_class(file: str, name: str) -> dict[str, Field]:
    """Return the fields of a dataclass, as its source file has them."""
    text = read_regular(_PACKAGE / file).decode()
    own = re.search(rf"^class {name}\b.*?(?=^    def |^    @|\Z)", text, re.M | re.S)
    assert own is not None, f"{file} has no class {name}"
    (node,) = ast.parse(own[0]).body  # its fields alone: whole files take long to parse
    assert isinstance(node, ast.ClassDef), "as was asked for"
    texts: dict[str, str] = {}
    about = (ast.get_docstring(node) or "").partition("Parameters\n----------\n")[2]
    for block in re.split(r"\n(?=\S)", about):
        names, _, text = block.partition("\n")
        texts |= dict.fromkeys(names.split(", "), " ".join(textwrap.dedent(text).split()))
    return {
        part.target.id: Field(
            part.target.id,
            ast.unparse(part.annotation),
            ast.unparse(part.value) if isinstance(part.value, ast.Constant) else "",
            _shorten(texts.get(part.target.id, "")),
        )
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


def _shorten(text: str) -> str:
    """Return the sentences of a description without the marks of code, as many as fit into a few lines."""
    sentences = re.split(r"(?<=[.:]) (?=[A-Z\"])", text.replace("`", ""))
    kept = ""
    for sentence in sentences:
        if kept and len(kept) + len(sentence) > 200:
            break
        kept = f"{kept} {sentence}".strip()
    kept = re.sub(r"\b[a-z]+_[a-z_]+\b(?!/)", lambda found: f"--{found[0].replace('_', '-')}", kept)
    return kept.rstrip(":").replace("None: ", "if not given, ").replace("None keeps", "if not given, keep")


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of a dataclass that are options of a command.

    Parameters
    ----------
    panel
        The heading of the options.
    names
        Their names, each with its metavar if its type does not say it; and other names of the option after it.
    """

    panel: str
    file: str
    cls: str
    names: Mapping[str, tuple[str, ...]]

    def parameters(self) -> Iterable[inspect.Parameter]:
        """Return the parameters of a command."""
        known = _read_class(self.file, self.cls)
        for name, (*metavar,) in self.names.items():
            yield known[name].parameter(self.panel, metavar[0] or None if metavar else None, *metavar[1:])

    def parse(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the dataclass that are given."""
        known = _read_class(self.file, self.cls)
        given = {name: values.get(name) for name in self.names}
        names = [name for name, value in given.items() if value is not None and value is not False and value != []]
        return {name: known[name].parse(values[name]) for name in names}


STORE = Fields(
    "URLs", "files/stores/options.py", "StoreOptions", {"endpoint": ("ADDRESS",), "region": ("NAME",), "anonymous": ()}
)


def make_store(values: Mapping[str, Any]) -> "StoreOptions | None":
    """Return how a URL is reached; None: by the environment."""
    given = STORE.parse(values)
    if not given:
        return None
    from penstock.files.stores.options import StoreOptions  # noqa: PLC0415  # for commands with a URL only

    return StoreOptions(**given)


def take_fields(*groups: Fields) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some fields; it takes their values as `**values`, None if not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        found = {parameter.name: parameter for group in reversed(groups) for parameter in group.parameters()}
        ordered = [found.pop(p.name) for group in groups for p in group.parameters() if p.name in found]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *ordered)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions accept attributes
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


class PenstockCommand(TyperCommand):
    """A command whose help shows one section per panel, and whose argument may follow `--input` or `-i`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; what `--input` introduces is an argument like any other, in the order given."""
        own = args[: args.index("--")] if "--" in args else args
        words = [word.removeprefix("--input=") for word in own if word not in ("--input", "-i")]
        return super().parse_args(ctx, [*words, *args[len(own) :]])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options without a panel, then those of each panel.

        Options with the same text, because one paragraph describes them all, share it.
        """
        sections: dict[str, dict[str, list[str]]] = {"Arguments": {}, "Options": {}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            heading, (label, text) = getattr(parameter, "rich_help_panel", None) or "Options", record
            if parameter.param_type_name == "argument":
                heading, label = "Arguments", label.partition(" <")[0]  # without the type, such as <list[str]>
            text = re.sub(r" \(default ", "\0", text)
            text, _, default = text.partition("\0")
            sections.setdefault(heading, {}).setdefault(text, []).append(f"{label}{default and f' ({default}'}")
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl([(", ".join(labels), text) for text, labels in records.items()])


def format_examples(command: str) -> str:
    """Return the examples at the end of the help of a command."""
    # A line with only a backspace keeps click from rewrapping the lines.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])])
