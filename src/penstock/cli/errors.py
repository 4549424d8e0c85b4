"""Error messages and exit codes, in one place for all commands.

1. A `PenstockError`: its message. An `OptionError` exits with 2, like a usage error of the parser; any other with 1.
2. An error of the operating system (a full disk, a file without permission): what failed and where, 1.
3. Ctrl-C: "Stopped.", 130. The reader of the output closed it (`| head`): no message, 141.
4. Anything else is a bug: what it is, how to see the traceback and how to report it, 70.

With `--json`, the error is also printed as one JSON document on stdout. With `--debug`, the traceback comes first.

Messages of the package name arguments of Python (`sequence_length=100`); those of commands name options
(`--sequence-length 100`).
"""

import ast
import contextlib
import difflib
import os
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.cli.options import EXAMPLES
from penstock.cli.screen import print_json
from penstock.core.errors import OptionError, PenstockError
from penstock.core.version import __version__

__all__ = ["EXIT_CODES", "Commands", "ProblemsFound", "name_options"]

_FAILED, _USAGE, _BUG, _STOPPED, _UNREAD = 1, 2, 70, 130, 141
EXIT_CODES = {
    0: "done",
    _FAILED: "the command failed, or found problems (damage, a difference)",
    _USAGE: "an invalid argument, or missing data",
    _BUG: "a bug in Penstock",
    _STOPPED: "stopped with Ctrl-C",
    _UNREAD: "the reader of the output closed it",
}

# Through a public name: some versions of typer bundle a copy of click, others depend on click.
_UsageError, _ClickException = typer.BadParameter.mro()[1:3]


class ProblemsFound(Exception):  # noqa: N818  # a result, not a failure
    """Ends a command with exit code 1. The problems have been printed."""


class _Raised(Exception):  # noqa: N818  # carries an error past the parser, which would convert it
    def __init__(self, error: BaseException, command: Any = None) -> None:
        super().__init__()
        self.error, self.command = error, command


class Commands(TyperGroup):
    """The group of commands, and the handling of their errors."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit."""
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        debug, as_json = "--debug" in own, "--json" in own
        # Accepted before and after the name of the command, without an option of every command.
        given = [word for word in own if word != "--debug"] + given[len(own) :]
        try:
            code = super().main(
                given,
                prog_name,
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            sys.stdout.flush()  # a closed pipe is noticed here, not at exit
        except _Raised as raised:
            code = _report(raised.error, raised.command, debug=debug, as_json=as_json)
        except ProblemsFound:
            code = _FAILED
        except Exception as error:
            code = _report(error, debug=debug, as_json=as_json)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the first sentence of its help; click would cut it off at the width."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError, EOFError, PenstockError) as error:
            raise _Raised(error, self.get_command(ctx, ctx.invoked_subcommand or "")) from error


def _report(error: BaseException, command: Any = None, *, debug: bool, as_json: bool) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, BrokenPipeError) and not isinstance(error, PenstockError):
        _discard_stdout()
        return _UNREAD
    kind, message, advice, code = _describe(error)
    if command is not None and isinstance(error, PenstockError):
        message = name_options(message, command)
    with contextlib.suppress(BrokenPipeError):
        if debug:
            typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        if as_json:
            print_json({"error": {"type": kind, "message": message}})
        # On a new line, after the ^C that the terminal shows.
        typer.echo(f"\n{message}" if code == _STOPPED else f"Error: {message}", err=True)
        for line in advice:
            typer.echo(line, err=True)
    return code


def _describe(error: BaseException) -> tuple[str, str, list[str], int]:
    """Return the type of an error, its message, further lines of advice, and the exit code."""
    kind = type(error).__name__
    if isinstance(error, PenstockError):
        return kind, str(error), [], _USAGE if isinstance(error, OptionError) else _FAILED
    if isinstance(error, _ClickException):
        return _describe_usage(error)
    if isinstance(error, KeyboardInterrupt):
        return "Stopped", "Stopped.", [], _STOPPED
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        return kind, f"{error.strerror}{where}.", [], _FAILED
    if isinstance(error, MemoryError):
        return kind, "Out of memory. Use fewer workers, or smaller batches or shards.", [], _FAILED
    advice = [
        "Run the same command with --debug to see the traceback, and report it together with the command, the output "
        f"of `penstock doctor --json` and this line: penstock {__version__}, Python {platform.python_version()}, "
        f"{platform.platform()}."
    ]
    return kind, f"This is a bug in Penstock: {kind}: {error}", advice, _BUG


def _describe_usage(error: BaseException) -> tuple[str, str, list[str], int]:
    """Return a usage error of the parser: what is wrong, the nearest option, and an example that works."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()  # type: ignore[attr-defined]  # all exceptions of click have it
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message, err=True)
        return "UsageError", "No command was given. Run `penstock --help` to see all of them.", [], _USAGE
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
        # Without the hyphens, which all of them have in common.
        names = {name.lstrip("-"): name for name in (*known, "--input", "--help", "--debug") if name.startswith("--")}
        near = difflib.get_close_matches(option.lstrip("-"), names, n=1)
        message = f"No such option: {option}.{f' Did you mean {names[near[0]]}?' if near else ''}"
    if context is None:
        return "UsageError", message, [], _USAGE
    examples = EXAMPLES.get(context.info_name or "", ())
    advice = [f"For example: {examples[0]}"] if examples else []
    return "UsageError", message, [*advice, f"Run '{context.command_path} --help' for all options."], _USAGE


_VALUE = r"\([^()]*\)|\[[^\[\]]*\]|'[^']*'|\.\.\.|[\w+-]+(?:\.\w+)?"
_OTHER_NAMES = {
    "on_bad": "skip_bad",
    "store": "anonymous",
    "shard_size": "reshard",
    "shard_bytes": "reshard",
}


def name_options(message: str, command: Any) -> str:
    """Return a message of the package with the options of a command in place of the arguments of Python.

    `shard_size must be`, `overwrite=True` and `fields=('a',)` become `--shard-size must be`, `--overwrite` and
    `--fields a`. Arguments that are no options of the command, and names in quotes, stay as they are.
    """
    options = {parameter.name: parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
    options |= {name: options[own] for name, own in _OTHER_NAMES.items() if name not in options and own in options}
    flags = {parameter.opts[0] for parameter in command.params if getattr(parameter, "is_flag", False)}
    if not options:
        return message
    name = rf"(?<![\w/.'-])({'|'.join(sorted(options, key=len, reverse=True))})"

    def write_option(found: re.Match[str]) -> str:
        option, value = options[found[1]], found[2]
        return option if value == "..." or option in flags else f"{option} {_write_value(value)}"

    message = re.sub(rf"StoreOptions\(({name}=(?:{_VALUE}))\)", r"\1", message)  # each of its fields is an option
    message = re.sub(rf"{name}=({_VALUE})", write_option, message)
    message = re.sub(r"(?<=, got )\([^()]*\)", lambda found: _write_value(found[0]), message)
    # A word with an underscore is a name. Any other is one only as the subject of "must" or "needs", or joined to
    # another.
    message = re.sub(rf"{name}\b(?!=)", lambda found: options[found[1]] if "_" in found[1] else found[0], message)
    begins = r"(?:(?<=^)|(?<=: )|(?<=\n  )|(?<=At most one of ))"
    message = re.sub(rf"{begins}{name}(?= must | needs | and )", lambda found: options[found[1]], message)
    message = re.sub(rf"(?<= and ){name}(?= must )", lambda found: options[found[1]], message)
    return message.replace("--format files", "--whole-files") if "whole_files" in options else message


def _write_value(value: str) -> str:
    """Return a literal of Python as a word of the command line."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return shlex.quote(",".join(map(str, read)) if isinstance(read, tuple | list) else str(read))


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that flushing it at exit prints no error."""
    with contextlib.suppress(OSError, ValueError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
