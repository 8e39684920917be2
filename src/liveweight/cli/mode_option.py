"""The option that names a transfer mode, for every command that has it."""

from __future__ import annotations

from typing import Any

import typer

from liveweight.transports.registry import TRANSPORTS


def mode_option(help_text: str) -> Any:
    """Check that the transfer mode exists."""
    return typer.Option(callback=_known, metavar="|".join(sorted(TRANSPORTS)), help=help_text)


def _known(mode: str | None) -> str | None:
    if mode is not None and mode not in TRANSPORTS:
        raise typer.BadParameter(f"{mode!r} is none of {', '.join(sorted(TRANSPORTS))}")
    return mode
