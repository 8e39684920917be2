"""`liveweight undo`, `pause`, `resume`, `sleep` and `wakeup`: commands to running engines, by their URLs."""

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
    """Pause an engine's requests.

    For example: liveweight pause http://127.0.0.1:8000 --mode wait
    """
    client, deadline = _client(url, control_key, control_key_file), Deadline.after(timeout)
    print(f"{url} is {client.pause(mode, deadline)['state']}")


def resume(
    url: Url, timeout: Timeout = 60.0, control_key: ControlKey = None, control_key_file: ControlKeyFile = None
) -> None:
    """Resume an engine's requests.

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
    """Let an engine release the memory of its weights and its cache; its requests pause.

    For example: liveweight sleep http://127.0.0.1:8000 --tag kv_cache
    """
    _print_sleep(url, _client(url, control_key, control_key_file).sleep(_tags(tag), timeout))


def wakeup(
    url: Url,
    tag: Tag = None,
    timeout: Timeout = 300.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Let an engine allocate its memory again; its requests go on once nothing is asleep.

    For example: liveweight wakeup http://127.0.0.1:8000
    """
    _print_sleep(url, _client(url, control_key, control_key_file).wakeup(_tags(tag), timeout))


def _tags(tag: str | None) -> list[str] | None:
    return None if tag is None else [tag]


def _print_sleep(url: str, result: Mapping[str, Any]) -> None:
    size_mb, asleep = result["size_bytes"] / 1e6, ", ".join(result["asleep"])
    moved = f" · {size_mb:.1f} MB in {result['took_s']:.2f} s" if result["changed"] else ""
    print(f"{url} is asleep: {asleep}{moved}" if asleep else f"{url} is awake{moved}")


def label_of(version: Mapping[str, Any] | None) -> str:
    """A version's label. An engine that is swapping its weights serves no version."""
    return "nothing at this moment" if version is None else str(version["label"])


def _client(url: str, key: str | None, key_file: Path | None) -> EngineClient:
    return EngineClient(url, key_of(key, key_file, "control key"))
