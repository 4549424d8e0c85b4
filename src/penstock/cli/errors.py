"""Error messages and exit codes, in one place for all commands.

1. A `PenstockError`: its message. An `OptionError` exits with 2, like a usage error of the parser; any other with 1.
2. An error of the operating system (a full disk, a file without permission): what failed and where, 1.
3. Ctrl-C: "Stopped.", 130. The reader of the output closed it (`| head`): no message, 141.
4. Anything else is a bug: what it is, how to see the traceback and how to report it, 70.

With `--json`, the error is also printed as one JSON document on stdout. With `--debug`, the traceback comes first.
"""

import contextlib
import difflib
import os
import platform
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

__all__ = ["EXIT_CODES", "Commands", "ProblemsFound"]

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
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


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
            code = _report(raised.error, debug=debug, as_json=as_json)
        except ProblemsFound:
            code = _FAILED
        except Exception as error:
            code = _report(error, debug=debug, as_json=as_json)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError, EOFError) as error:
            raise _Raised(error) from error


def _report(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, BrokenPipeError) and not isinstance(error, PenstockError):
        _discard_stdout()
        return _UNREAD
    kind, message, advice, code = _describe(error)
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
        "Run the same command with --debug to see the traceback, and report it together with the command and this "
        f"line: penstock {__version__}, Python {platform.python_version()}, {platform.platform()}."
    ]
    return kind, f"This is a bug in Penstock: {kind}: {error}", advice, _BUG


def _describe_usage(error: BaseException) -> tuple[str, str, list[str], int]:
    """Return a usage error of the parser: what is wrong, the nearest option, and an example that works."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()  # type: ignore[attr-defined]  # all exceptions of click have it
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:  # unless rich has printed it
            typer.echo(message, err=True)
        return "UsageError", "No command was given. Run `penstock demo` to see what Penstock does.", [], _USAGE
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
        near = difflib.get_close_matches(option, [*known, "--help", "--debug"], n=1)
        message = f"No such option: {option}.{f' Did you mean {near[0]}?' if near else ''}"
    if context is None:
        return "UsageError", message, [], _USAGE
    examples = EXAMPLES.get(context.info_name or "", ())
    advice = [f"For example: {examples[0]}"] if examples else []
    return "UsageError", message, [*advice, f"Run '{context.command_path} --help' for all options."], _USAGE


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that flushing it at exit prints no error."""
    with contextlib.suppress(OSError, ValueError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
