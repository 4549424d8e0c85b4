"""Options that are declared in groups: frozen dataclasses whose fields become the options of a command.

`expand_groups` replaces a parameter that is a group by one option per field of the group. A group may hold other
groups. `GroupedCommand` shows the groups as sections of the help.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.core import TyperCommand
from typer.models import ParameterInfo

__all__ = ["AppliesTo", "GroupedCommand", "expand_groups", "list_limited"]


_FORMATS = {
    "NWBInput": "NWB files",
    "NpyInput": "Arrays (npy, npz, zarr)",
    "NpzInput": "Arrays (npy, npz, zarr)",
    "ZarrInput": "Arrays (npy, npz, zarr)",
    "AudioInput": "Audio",
    "ClipInput": "Audio",
}


@dataclass(frozen=True, slots=True)
class AppliesTo:
    """Mark an option that applies only to some kinds of input, by the names of their classes."""

    inputs: tuple[str, ...]

    def panel(self, default: str) -> str:
        """Return the heading of the format of these inputs; `default` if they are of several formats."""
        found = {_FORMATS[name] for name in self.inputs}
        return found.pop() if len(found) == 1 else default


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each parameter that is a group replaced by the options of the group.

    The `PANEL` of a group is the heading of its options in the help.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        expanded = list(_list_options(hints[parameter.name])) if parameter.name in groups else [parameter]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in expanded]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {name: _build(group, values) for name, group in groups.items()}
        given = {name: values[name] for name in hints if name in values and name not in built}
        command(**given, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions accept attributes
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def list_limited(group: type) -> dict[str, tuple[str, ...]]:
    """Return the options of a group that apply only to some inputs, by parameter name, with these inputs."""
    found = {}
    for option in _list_options(group):
        for mark in get_args(option.annotation)[1:]:
            if isinstance(mark, AppliesTo):
                found[option.name] = mark.inputs
    return found


def _list_options(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _list_options(hint)
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_with_panel(hint, group.PANEL)
        )


def _with_panel(hint: Any, panel: str) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    kind, *marks = get_args(hint)
    copies = [copy.copy(mark) for mark in marks]
    panel = next((mark.panel(panel) for mark in marks if isinstance(mark, AppliesTo)), panel)
    for mark in copies:
        if isinstance(mark, ParameterInfo):
            mark.rich_help_panel = panel
    return Annotated[(kind, *copies)]


def _build(group: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(group)
    return group(
        **{
            field.name: _build(hints[field.name], values) if is_dataclass(hints[field.name]) else values[field.name]
            for field in fields(group)
        }
    )


class GroupedCommand(TyperCommand):
    """A command whose help shows one section per panel, and whose argument may follow `--input` or `-i`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; what `--input` introduces is an argument like any other, in the order given."""
        if any(parameter.param_type_name == "argument" for parameter in self.params):
            own = args[: args.index("--")] if "--" in args else args
            words = [word.removeprefix("--input=") for word in own if word not in ("--input", "-i")]
            args = [*words, *args[len(own) :]]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options without a panel, then those of each panel."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            heading, (label, text) = getattr(parameter, "rich_help_panel", None) or "Options", record
            if parameter.param_type_name == "argument":
                heading, label = "Arguments", label.partition(" <")[0]  # without the type, such as <list[str]>
            sections.setdefault(heading, []).append((label, text))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
