"""Keys and secrets of commands: from an option, the environment, or a file that other users cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from liveweight.errors import EngineConfigInvalid

ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(envvar="LIVEWEIGHT_API_KEY", help="Clients must show it. Other users can see arguments."),
]
ApiKeyFile: TypeAlias = Annotated[Path | None, typer.Option(help="A file that holds the key.")]
ControlKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="LIVEWEIGHT_CONTROL_KEY", help="The key of the control routes; without one, the API key."
    ),
]
ControlKeyFile: TypeAlias = Annotated[Path | None, typer.Option(help="A file that holds the control key.")]
SecretFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="What publishers and engines share; by default this user's.")
]


def key_of(given: str | None, file: Path | None, what: str = "key") -> str | None:
    """Return the key from its option, the environment or a file. Refuses two of them, and an empty key."""
    if given is not None and file is not None:
        raise EngineConfigInvalid(f"the {what} is given twice, by itself and by a file")
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineConfigInvalid(f"the {what}'s file {file} cannot be read: {error}") from error
    if given is not None and not given.strip():
        raise EngineConfigInvalid(f"the {what} is empty")
    return given
