"""`liveweight update`: asks an engine to update to a version of its source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from liveweight.cli.commands.operate import Timeout, Url, label_of
from liveweight.cli.commands.push import Verify
from liveweight.cli.exit_codes import FAILED
from liveweight.cli.failures import error_line
from liveweight.cli.mode_option import mode_option
from liveweight.cli.progress import SEPARATOR
from liveweight.cli.secrets import ControlKey, ControlKeyFile, key_of
from liveweight.errors import LiveWeightError, OutcomeUnknown
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline

WantedVersion = Annotated[
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
    version: WantedVersion = None,
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
    request: dict[str, object] = {
        "version": version,
        "transfer_mode": transfer_mode,
        "verify_checksum": verify,
        "kv_policy": kv_policy,
        "pause": pause,
    }
    try:
        answer = client.update({name: value for name, value in request.items() if value is not None}, timeout)
    except LiveWeightError as error:
        print(error_line(error, _problem(error, before)), file=sys.stderr)
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
    """What went wrong, and which version serves: as the engine reports it, or, if nothing was begun, the version before."""
    text = f"{error.code} {error}".removesuffix(".")
    if isinstance(error, OutcomeUnknown) or "Still serving" in text or "It does not answer" in text:
        return f"{text}."
    return f"{text}. Still serving {label_of(before['version'])}."
