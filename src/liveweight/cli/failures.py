"""How commands fail: one line with the remedy, and an exit code; with --debug, the traceback as well."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from liveweight.cli.exit_codes import FAILED
from liveweight.errors import LiveWeightError, RoundFailed

Debug = Annotated[bool, typer.Option("--debug", help="After an error, print the traceback.")]
_SYSTEM = "see that the file, directory or address that it names is there, and that you may use it"
_UNEXPECTED = "run it again with --debug, and report what it says"


def error_line(error: BaseException, message: str | None = None) -> str:
    """Format an error as one line: what happened (or `message` instead), and what to do."""
    match error:
        case RoundFailed():  # its text begins with the code of its cause
            text, remedy = message or str(error), error.cause.remedy
        case LiveWeightError():
            text, remedy = message or f"{error.code} {error}", error.remedy
        case OSError():
            text, remedy = message or str(error), _SYSTEM
        case _:
            text, remedy = message or f"unexpected {type(error).__name__}: {error}", _UNEXPECTED
    return f"{' '.join(text.split()).removesuffix('.')}. What to do: {remedy}."


def reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command for typer: add --debug, and print its errors.

    A command that prints an error itself ends with `raise typer.Exit(code) from error`, so that --debug can print the traceback.
    """
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapped(*, debug: bool, **given: Any) -> None:
        try:
            command(**given)
        except typer.Exit as ending:
            if debug and ending.__cause__ is not None:
                traceback.print_exception(ending.__cause__)
            raise
        except Exception as error:
            if debug:
                traceback.print_exception(error)
            print(error_line(error), file=sys.stderr)
            raise typer.Exit(FAILED) from error

    added = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    described = own.replace(parameters=[*own.parameters.values(), added])
    wrapped.__signature__ = described  # type: ignore[attr-defined]
    wrapped.__annotations__ = {name: one.annotation for name, one in described.parameters.items()}
    return wrapped
