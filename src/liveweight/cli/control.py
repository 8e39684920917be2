"""`liveweight status`, `undo`, `pause` and `resume`: what operators ask of running engines, by their URLs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from liveweight.cli.exits import FAILED
from liveweight.cli.failing import line_of
from liveweight.cli.keys import ControlKey, ControlKeyFile, key_of
from liveweight.control.client import EngineClient
from liveweight.errors import LiveWeightError
from liveweight.spec.deadline import Deadline

Urls: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="URL", help="Engines, such as http://127.0.0.1:8000.")
]
Url: TypeAlias = Annotated[
    str, typer.Argument(metavar="URL", help="An engine, such as http://127.0.0.1:8000.")
]
Timeout: TypeAlias = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that it may take.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
Mode: TypeAlias = Annotated[
    Literal["keep", "wait", "abort"],
    typer.Option(help="Running requests stand still, finish first, or end with what they have."),
]
_COLUMNS = ("engine", "model", "version", "digest", "state", "requests", "round", "last round")


def status(
    urls: Urls,
    as_json: AsJson = False,
    timeout: Timeout = 10.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Tell what engines serve. The exit code is 1 if one of them does not answer.

    For example: liveweight status http://127.0.0.1:8000 http://127.0.0.1:8001 --json
    """
    key, deadline = key_of(control_key, control_key_file, "control key"), Deadline.after(timeout)
    errors: list[LiveWeightError] = []
    said = [_asked(url, key, deadline, errors) for url in urls]
    if as_json:
        print(json.dumps(said, indent=2))
    else:
        _show([_COLUMNS, *(_row(answer) for answer in said)])
    for error in errors:
        print(line_of(error), file=sys.stderr)
    if errors:
        raise typer.Exit(FAILED) from errors[0]


def undo(
    url: Url, timeout: Timeout = 60.0, control_key: ControlKey = None, control_key_file: ControlKeyFile = None
) -> None:
    """Take an engine back to the version before.

    For example: liveweight undo http://127.0.0.1:8000
    """
    client, deadline = _client(url, control_key, control_key_file), Deadline.after(timeout)
    print(f"{url} serves {label_of(client.undo(deadline)['version'])}")


def pause(
    url: Url,
    mode: Mode = "keep",
    timeout: Timeout = 60.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Let an engine's requests stand still.

    For example: liveweight pause http://127.0.0.1:8000 --mode wait
    """
    client, deadline = _client(url, control_key, control_key_file), Deadline.after(timeout)
    print(f"{url} is {client.pause(mode, deadline)['state']}")


def resume(
    url: Url, timeout: Timeout = 60.0, control_key: ControlKey = None, control_key_file: ControlKeyFile = None
) -> None:
    """Let an engine's requests go on.

    For example: liveweight resume http://127.0.0.1:8000
    """
    client, deadline = _client(url, control_key, control_key_file), Deadline.after(timeout)
    print(f"{url} is {client.resume(deadline)['state']}")


def label_of(version: Mapping[str, Any] | None) -> str:
    """A version's label; while an engine exchanges its weights it serves none."""
    return "nothing at this moment" if version is None else str(version["label"])


def _client(url: str, key: str | None, key_file: Path | None) -> EngineClient:
    return EngineClient(url, key_of(key, key_file, "control key"))


def _asked(url: str, key: str | None, deadline: Deadline, errors: list[LiveWeightError]) -> dict[str, Any]:
    """What an engine says, or why it says nothing, which is also added to the errors."""
    try:
        return {"url": url, **EngineClient(url, key).weights(deadline)}
    except LiveWeightError as error:
        errors.append(error)
        return {"url": url, "error": f"{error.code} {error}"}


def _row(answer: Mapping[str, Any]) -> Sequence[str]:
    if "error" in answer:
        return (answer["url"], *("-" for _ in _COLUMNS[1:]))
    version, rounds = answer["version"] or {"label": "-", "digest": None}, answer["rounds"]
    last = (
        "-" if not rounds else f"{rounds[-1]['version']} {rounds[-1]['outcome']} {rounds[-1]['took_s']:.2f} s"
    )
    digest = (version["digest"] or "-")[:12]
    round_id = "-" if answer["round"] is None else answer["round"]
    behind = (answer.get("recovery") or {}).get("behind")
    state = answer["state"] if behind is None else f"{answer['state']}, behind {behind['label']}"
    told = (answer["model"], str(version["label"]), digest, state, answer["paused"], round_id, last)
    return (answer["url"], *told)


def _show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
