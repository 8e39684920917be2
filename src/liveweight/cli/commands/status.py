"""`liveweight status`: what engines serve, which of them are behind, and how their last rounds went; once, or repeatedly."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeAlias

import typer

from liveweight.cli.commands.operate import Timeout, Urls
from liveweight.cli.exit_codes import FAILED
from liveweight.cli.failures import error_line
from liveweight.cli.secrets import ControlKey, ControlKeyFile, key_of
from liveweight.errors import LiveWeightError
from liveweight.server.admin.fleet_status import with_behind
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON in place of a table; with --watch, a line each time.")
]
Watch: TypeAlias = Annotated[
    float | None,
    typer.Option(min=0.1, max=3600, help="Look again every so many seconds, until Ctrl-C."),
]
_COLUMNS = (
    *("engine", "model", "version", "number", "digest", "behind", "state"),
    *("requests", "round", "last round", "stall"),
)
_FROM_THE_TOP = "\x1b[H\x1b[J"


def status(
    urls: Urls,
    as_json: AsJson = False,
    watch: Watch = None,
    timeout: Timeout = 10.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Tell what engines serve, and which of them are behind the newest version. The exit code is 1 if one of them does not answer.

    For example: liveweight status http://127.0.0.1:8000 http://127.0.0.1:8001 --watch 1
    """
    key, pause = key_of(control_key, control_key_file, "control key"), threading.Event()
    with ThreadPoolExecutor(len(urls)) as pool:
        while True:
            deadline = Deadline.after(timeout)
            answers = list(pool.map(partial(_get_status, key=key, deadline=deadline), urls))
            errors = [error for _, error in answers if error is not None]
            statuses = with_behind([one for one, _ in answers])
            _print(statuses, errors, as_json=as_json, again=watch is not None)
            if watch is None:
                break
            pause.wait(watch)
    if errors:
        raise typer.Exit(FAILED) from errors[0]


def _get_status(
    url: str, key: str | None, deadline: Deadline
) -> tuple[dict[str, Any], LiveWeightError | None]:
    """Get an engine's status, or the error that prevents it."""
    try:
        return {"url": url, **EngineClient(url, key).weights(deadline)}, None
    except LiveWeightError as error:
        return {"url": url, "error": f"{error.code} {error}"}, error


def _print(
    statuses: Sequence[Mapping[str, Any]], errors: Sequence[LiveWeightError], *, as_json: bool, again: bool
) -> None:
    if as_json:
        print(json.dumps(statuses, indent=None if again else 2), flush=True)
    else:
        if again and sys.stdout.isatty():
            print(_FROM_THE_TOP, end="")
        _show([_COLUMNS, *(_row(answer) for answer in statuses)])
    for error in errors:
        print(error_line(error), file=sys.stderr, flush=True)


def _row(answer: Mapping[str, Any]) -> Sequence[str]:
    if "error" in answer:
        return (answer["url"], *("-" for _ in _COLUMNS[1:]))
    version, rounds = answer["version"] or {"label": "-", "digest": None, "number": None}, answer["rounds"]
    last, stall = "-", "-"
    if rounds:
        last = f"{rounds[-1]['version']} {rounds[-1]['outcome']} {rounds[-1]['took_s']:.2f} s"
        stalls = [one["stall_s"] for one in rounds if one["stall_s"] is not None]
        stall = f"{stalls[-1] * 1e3:.1f} ms" if stalls else "-"
    behind = "-" if answer["behind"] is None else str(answer["behind"])
    number = "-" if version.get("number") is None else str(version["number"])
    columns = (str(version["label"]), number, (version["digest"] or "-")[:12], behind, _state(answer))
    round_id = "-" if answer["round"] is None else answer["round"]
    return (answer["url"], answer["model"], *columns, answer["paused"], round_id, last, stall)


def _state(answer: Mapping[str, Any]) -> str:
    state: str = answer["state"]
    return state if answer.get("pending") is None else f"{state}, waits for a publisher"


def _show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()
