"""`liveweight demo torn`: what is served after a trainer died in the middle of an update, in place and by liveweight."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from liveweight.cli.exit_codes import FAILED, INTERRUPTED
from liveweight.errors import MissingExtra

if TYPE_CHECKING:
    from liveweight.lab.torn_demo.result import TornResult

_NEEDED = ("fastapi", "jinja2", "tokenizers", "torch", "uvicorn")

Size = Annotated[Literal["tiny", "small"], typer.Option(help="Of the random weights.")]
Clients = Annotated[int, typer.Option(min=1, max=32, help="Clients that stream from each engine.")]
Tokens = Annotated[int, typer.Option(min=1, max=1000, help="Tokens of an answer.")]
Buckets = Annotated[int, typer.Option(min=2, help="Of the update in place; the trainer dies after half.")]
Pause = Annotated[
    bool, typer.Option("--pause/--no-pause", help="Whether the update in place pauses its engine meanwhile.")
]
Kill = Annotated[bool, typer.Option("--kill/--no-kill", help="Without it, both updates come to their end.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the weights.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the counts as one JSON object, and nothing else.")
]


def torn(
    size: Size = "tiny",
    clients: Clients = 4,
    tokens: Tokens = 64,
    buckets: Buckets = 8,
    pause: Pause = True,
    kill: Kill = True,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Kill a trainer in the middle of an update, twice: writing in place on the left, with liveweight on the right.

    Two engines serve the same model to the same requests. Every token that they send is replayed against the old version and the new
    one. The exit code is 0 if none of the right side's matches neither, and it serves the successor's version; else 1.

    For example: liveweight demo torn --no-pause
    """
    if any(find_spec(name) is None for name in _NEEDED):
        raise MissingExtra("the demo", "engine")
    from liveweight.cli.demo.torn_view import viewing
    from liveweight.lab.torn_demo.torn_demo import TornSettings, run_torn

    settings = TornSettings(
        size=size, clients=clients, tokens=tokens, buckets=buckets, paused=pause, kill=kill, seed=seed
    )
    try:
        with interruptible(), viewing(settings, silent=as_json) as view:
            result = run_torn(settings, view, publisher_main=publisher_main)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        print(verdict(result))
    if not result.holds:
        raise typer.Exit(FAILED)


def publisher_main(descriptor: int) -> None:
    """Run the right side's trainer, in a process of its own."""
    from liveweight.api import Publisher
    from liveweight.lab.torn_demo.publishing_trainer import main

    main(descriptor, Publisher)


def verdict(result: TornResult) -> str:
    """The result in two lines, one per side."""
    lines = []
    for name, side in (("in place", result.left), ("liveweight", result.right)):
        counts = side.counts
        neither = f"{counts.neither} of {counts.total} tokens match neither version"
        lines.append(
            f"{name + ':':12} {neither} ({counts.old} old, {counts.new} new); it says it serves {side.serving}"
        )
    return "\n".join(lines)


@contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the demo with everything released; later ones do not disturb that."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: object) -> NoReturn:
        del number, frame
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
