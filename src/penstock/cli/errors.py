"""What the command line says when something goes wrong, and the exit code it ends with: in one place for all commands.

1. A `PenstockError`: its message. An `OptionError` is 2, as what the parser refuses; all else failed at work, 1.
2. What the system refuses (a disk that is full, a file that may not be read): what and where, 1.
3. Ctrl-C: "Stopped.", 130. A reader of the output that went away (`| head`): nothing, 141.
4. Anything else is a bug: what it is, how to see the traceback and how to report it, 70.

With `--json`, the same is also one JSON document on stdout. With `--debug`, the traceback comes first.
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
    _FAILED: "the work failed, or found what it looks for (damage, a difference)",
    _USAGE: "an argument that cannot work, or data that is not there",
    _BUG: "a bug in Penstock",
    _STOPPED: "stopped with Ctrl-C",
    _UNREAD: "the reader of the output went away",
}

# By way of a public name: typer brings a copy of click in some versions, and needs click in others.
_UsageError, _ClickException = typer.BadParameter.mro()[1:3]


class ProblemsFound(Exception):  # noqa: N818  # a result, not a mishap
    """Ends a command with 1: what it found has been said."""


class _Raised(Exception):  # noqa: N818  # carries an error past the parser, which would turn it into another one
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Commands(TyperGroup):
    """The commands, and what becomes of their errors."""

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
        # Taken before and after the name of the command, without an option of every command.
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
            sys.stdout.flush()  # here a reader that went away is noticed, not at exit
        except _Raised as raised:
            code = _told(raised.error, debug=debug, as_json=as_json)
        except ProblemsFound:
            code = _FAILED
        except Exception as error:
            code = _told(error, debug=debug, as_json=as_json)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError, EOFError) as error:
            raise _Raised(error) from error


def _told(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Say what happened, and return the exit code."""
    if isinstance(error, BrokenPipeError) and not isinstance(error, PenstockError):
        _hush()
        return _UNREAD
    kind, message, advice, code = _described(error)
    with contextlib.suppress(BrokenPipeError):
        if debug:
            typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        if as_json:
            print_json({"error": {"type": kind, "message": message}})
        # After the ^C that the terminal shows, a line of its own.
        typer.echo(f"\n{message}" if code == _STOPPED else f"Error: {message}", err=True)
        for line in advice:
            typer.echo(line, err=True)
    return code


def _described(error: BaseException) -> tuple[str, str, list[str], int]:
    """Return the kind of an error, its message, further lines for a person, and the exit code."""
    kind = type(error).__name__
    if isinstance(error, PenstockError):
        return kind, str(error), [], _USAGE if isinstance(error, OptionError) else _FAILED
    if isinstance(error, _ClickException):
        return _usage(error)
    if isinstance(error, KeyboardInterrupt):
        return "Stopped", "Stopped.", [], _STOPPED
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        return kind, f"{error.strerror}{where}.", [], _FAILED
    if isinstance(error, MemoryError):
        return kind, "There is not enough memory. Use fewer workers, or smaller batches or shards.", [], _FAILED
    advice = [
        "Run the same command with --debug for the traceback, and report it with that, with what you ran, and with "
        f"this line: penstock {__version__}, Python {platform.python_version()}, {platform.platform()}."
    ]
    return kind, f"This is a bug in Penstock: {kind}: {error}", advice, _BUG


def _usage(error: BaseException) -> tuple[str, str, list[str], int]:
    """Return what the parser refuses: what is wrong, what may have been meant, and an example that works."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()  # type: ignore[attr-defined]  # of every exception of click
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:  # where rich has not printed it
            typer.echo(message, err=True)
        return "UsageError", "No command was given. To see what Penstock does, run: penstock demo", [], _USAGE
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
        near = difflib.get_close_matches(option, [*known, "--help", "--debug"], n=1)
        message = f"No such option: {option}.{f' Did you mean {near[0]}?' if near else ''}"
    if context is None:
        return "UsageError", message, [], _USAGE
    examples = EXAMPLES.get(context.info_name or "", ())
    advice = [f"For example: {examples[0]}"] if examples else []
    return "UsageError", message, [*advice, f"Run '{context.command_path} --help' for more."], _USAGE


def _hush() -> None:
    """Let what is still to be written to stdout go nowhere, so that the end of the process says nothing either."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
