"""Error messages and exit codes, in one place for all commands.

1. A `PenstockError`: its message. An `OptionError` exits with 2, like a usage error of the parser; any other with 1.
2. An error of the operating system (a full disk, a file without permission): what failed and where, 1.
3. Ctrl-C: "Stopped.", 130. The reader of the output closed it (`| head`): no message, 141.
4. Anything else is a bug: what it is, how to see the traceback and how to report it, 70.

With `--json`, the error is also printed as one JSON document on stdout. With `--debug`, the traceback comes first.
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


_VALUE = r"\([^()]*\)|\[[^\[\]]*\]|'[^']*'|\.\.\.|[\w+-]+(?:\.\w+)?"


def name_options(message: str, command: Any) -> str:
    """Return a message with the options of a command in place of the arguments of Python of the same name.

    `shard_size must be`, `overwrite=True`, `fields=('a',)` become `--shard-size must be`, `--overwrite`, `--fields a`.
    """
    message = message.replace("on_bad='skip'", "--skip-bad")
    message = re.sub(r"StoreOptions\(((?:endpoint|region|anonymous)=[^()]*)\)", r"\1", message)
    for parameter in command.params if command is not None else ():
        name, option = parameter.name or "", next((opt for opt in parameter.opts if opt.startswith("--")), "")
        if option:
            plain = rf"(?<![\w/.'-]){name}"
            message = re.sub(rf"{plain}=(?:True|\.\.\.)(?!\w)", option, message)
            message = re.sub(rf"{plain}=({_VALUE})", lambda found: f"\0 {_write(found[1])}", message)
            message = message.replace("\0", option)
            subject = r"\b(?!=)" if "_" in name else r"(?= must | needs | and [\w-]+ must )"
            message = re.sub(rf"{plain}{subject}", option, message)
    return message


def _write(value: str) -> str:
    """Return a literal of Python as a word of the command line."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return shlex.quote(",".join(map(str, read)) if isinstance(read, tuple | list) else str(read))


def _report(error: BaseException, command: Any = None, *, debug: bool, as_json: bool) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, BrokenPipeError) and not isinstance(error, PenstockError):
        with contextlib.suppress(OSError, ValueError):  # so that flushing stdout at exit prints no error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    kind, message, advice, code = _describe(error)
    if isinstance(error, PenstockError):
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
        f"of `penstock inspect --json` and this line: penstock {__version__}, Python {platform.python_version()}, "
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
