"""`liveweight update`: an engine is asked to take a version from its source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from liveweight.cli.commands.operate import Timeout, Url, label_of
from liveweight.cli.commands.push import Verify
from liveweight.cli.exit_codes import FAILED
from liveweight.cli.failures import line_of
from liveweight.cli.mode_option import mode_option
from liveweight.cli.progress import SEPARATOR
from liveweight.cli.secrets import ControlKey, ControlKeyFile, key_of
from liveweight.errors import LiveWeightError, OutcomeUnknown
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline

Wanted = Annotated[
    str | None, typer.Option("--version", help="A version that its source offers; by default the newest.")
]


Mode = Annotated[
    str | None,
    mode_option("Refuse what is offered over any other; by default as the engine is set, else the source's."),
]
Kv = Annotated[
    Literal["recompute", "reuse", "drop"] | None,
    typer.Option(help="What the commit does to running requests; by default as the engine is set."),
]
Pause = Annotated[
    Literal["keep", "wait", "abort"] | None,
    typer.Option(help="Let running requests stand still, finish or end before the commit; none is needed."),
]


def update(
    url: Url,
    version: Wanted = None,
    transfer_mode: Mode = None,
    verify: Verify = True,
    kv_policy: Kv = None,
    pause: Pause = None,
    timeout: Timeout = 60.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Ask an engine to take a version from the source that it was started with (serve --weights-from).

    For example: liveweight update http://127.0.0.1:8000 --version step_100
    """
    client = EngineClient(url, key_of(control_key, control_key_file, "control key"))
    before = client.weights(Deadline.after(timeout))
    wish: dict[str, object] = {
        "version": version,
        "transfer_mode": transfer_mode,
        "verify_checksum": verify,
        "kv_policy": kv_policy,
        "pause": pause,
    }
    try:
        answer = client.update({name: value for name, value in wish.items() if value is not None}, timeout)
    except LiveWeightError as error:
        print(line_of(error, _problem(error, before)), file=sys.stderr)
        raise typer.Exit(FAILED) from error
    print(SEPARATOR.join(_steps(answer, before["tp"])))
    print(f"{url} serves {label_of(answer['version'])}, digest {answer['version']['digest']}")


def _steps(answer: Mapping[str, Any], ranks: int) -> list[str]:
    tensors, results = answer["tensors"], answer["results"]
    steps = [f"open {tensors}/{tensors}"]
    steps += [] if answer["draft"] is None else ["draft kept"]
    if answer["outcome"] == "unchanged":
        return [*steps, "installed already"]
    staged = sum(result["staged_bytes"] for result in results)
    verified = f"verified {ranks}/{ranks}" if answer["verified"] else "not verified"
    commit = f"commit {answer['steps']['stall_s'] * 1e3:.1f} ms"
    return [*steps, f"staged {staged / 1e6:.1f} MB", verified, f"voted {ranks}/{ranks}", commit]


def _problem(error: LiveWeightError, before: Mapping[str, Any]) -> str:
    """What went wrong, and what serves: as the engine says it, or, where nothing was begun, as it was before."""
    text = f"{error.code} {error}".removesuffix(".")
    if isinstance(error, OutcomeUnknown) or "Still serving" in text:
        return f"{text}."
    return f"{text}. Still serving {label_of(before['version'])}."
