"""`liveweight undo`, `pause`, `resume`, `sleep` and `wakeup`: what operators tell running engines, by their URLs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from liveweight.cli.secrets import ControlKey, ControlKeyFile, key_of
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline

Urls: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="URL", help="Engines, such as http://127.0.0.1:8000.")
]
Url: TypeAlias = Annotated[
    str, typer.Argument(metavar="URL", help="An engine, such as http://127.0.0.1:8000.")
]
Timeout: TypeAlias = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that it may take.")]
Tag: TypeAlias = Annotated[
    Literal["weight", "kv_cache"] | None,
    typer.Option(help="Only weights, or only the cache; by default both."),
]
Mode: TypeAlias = Annotated[
    Literal["keep", "wait", "abort"],
    typer.Option(help="Running requests stand still, finish first, or end with what they have."),
]


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


def sleep(
    url: Url,
    tag: Tag = None,
    timeout: Timeout = 60.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Let an engine give the memory of its weights and its cache back; its requests stand still.

    For example: liveweight sleep http://127.0.0.1:8000 --tag kv_cache
    """
    _tell_nap(url, _client(url, control_key, control_key_file).sleep(_words(tag), timeout))


def wakeup(
    url: Url,
    tag: Tag = None,
    timeout: Timeout = 300.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Let an engine take its memory again; its requests go on when nothing is asleep any more.

    For example: liveweight wakeup http://127.0.0.1:8000
    """
    _tell_nap(url, _client(url, control_key, control_key_file).wakeup(_words(tag), timeout))


def _words(tag: str | None) -> list[str] | None:
    return None if tag is None else [tag]


def _tell_nap(url: str, told: Mapping[str, Any]) -> None:
    size_mb, asleep = told["size_bytes"] / 1e6, ", ".join(told["asleep"])
    moved = f" · {size_mb:.1f} MB in {told['took_s']:.2f} s" if told["changed"] else ""
    print(f"{url} is asleep: {asleep}{moved}" if asleep else f"{url} is awake{moved}")


def label_of(version: Mapping[str, Any] | None) -> str:
    """A version's label; while an engine swaps its weights it serves none."""
    return "nothing at this moment" if version is None else str(version["label"])


def _client(url: str, key: str | None, key_file: Path | None) -> EngineClient:
    return EngineClient(url, key_of(key, key_file, "control key"))
