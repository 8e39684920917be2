"""`liveweight push`: publishes a checkpoint directory to running engines."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liveweight.cli.commands.operate import Timeout, Urls, label_of
from liveweight.cli.exit_codes import FAILED
from liveweight.cli.failures import error_line
from liveweight.cli.mode_option import mode_option
from liveweight.cli.progress import ProgressLine, ProgressReplica
from liveweight.cli.secrets import ControlKey, ControlKeyFile, SecretFile, key_of
from liveweight.errors import Refused
from liveweight.observe.events import OfferKind
from liveweight.server.client import EngineClient, leader_of
from liveweight.spec.deadline import Deadline

if TYPE_CHECKING:
    from liveweight.rounds.report import Report

Source = Annotated[Path, typer.Argument(metavar="DIR", help="An HF checkpoint directory.")]
Label = Annotated[str, typer.Option("--version", help="What the engines are to call it, such as step_100.")]
Run = Annotated[
    str | None,
    typer.Option(help="The run that the version belongs to; by default a new one with every push."),
]
Offer = Annotated[OfferKind, typer.Option(help="How the weights are held ready.")]
Mode = Annotated[
    str, mode_option("How the engines' ranks read them; gdr and rdma reach engines on other hosts.")
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare what arrived with the source.")]


def push(
    directory: Source,
    urls: Urls,
    version: Label,
    run: Run = None,
    offer: Offer = "frozen",
    transfer_mode: Mode = "ipc",
    verify: Verify = True,
    timeout: Timeout = 60.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
    secret_file: SecretFile = None,
) -> None:
    """Put a checkpoint's weights into running engines: verified, all or nothing, while they serve.

    For example: liveweight push ./new http://127.0.0.1:8000 --version step_100
    """
    from liveweight.api import Publisher
    from liveweight.rounds.replica import WireReplica
    from liveweight.spec.label import checked_label
    from liveweight.wire.credentials import load_or_create_secret
    from liveweight.wire.default_paths import default_secret_file

    label = checked_label(version)
    key, deadline = key_of(control_key, control_key_file, "control key"), Deadline.after(timeout)
    before = {url: EngineClient(url, key).weights(deadline) for url in urls}
    secret = load_or_create_secret(default_secret_file() if secret_file is None else secret_file)
    lines = {url: ProgressLine(url, _write, alone=len(before) == 1) for url in before}
    engines = [
        ProgressReplica(
            WireReplica(leader_of(url, weights), secret), lines[url], ranks=weights["tp"], verify=verify
        )
        for url, weights in before.items()
    ]
    how: dict[str, Any] = {"offer": offer, "transfer_mode": transfer_mode, "verify": verify}
    with (
        _ending_lines(before, lines.values()),
        Publisher(directory, engines=engines, secret=secret, run=run, timeout_s=timeout, **how) as publisher,
    ):
        report = publisher.publish(label)
    _show(list(before), report)


@contextmanager
def _ending_lines(before: Mapping[str, Mapping[str, Any]], lines: Collection[ProgressLine]) -> Iterator[None]:
    """End the lines. After a refusal, also print what the engines still serve."""
    try:
        yield
    except Refused as error:
        serving = ", ".join(dict.fromkeys(label_of(weights["version"]) for weights in before.values()))
        _end_lines(lines)
        print(error_line(error, f"{error.code} {error}. Still serving {serving}."), file=sys.stderr)
        raise typer.Exit(FAILED) from error
    finally:
        _end_lines(lines)


def _end_lines(lines: Collection[ProgressLine]) -> None:
    for line in lines:
        line.end()


def _show(urls: Sequence[str], report: Report) -> None:
    for url, replica in zip(urls, report.replicas, strict=True):
        print(f"{url} serves {replica.serving}, digest {report.version.digest}")


def _write(text: str) -> None:
    print(text, end="", flush=True)
