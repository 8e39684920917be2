"""`liveweight torture`: kills, stops, corrupts and cuts off an engine's updates, and checks every token that it serves."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from liveweight.cli.bench.group import JsonTo
from liveweight.cli.demo.demo import VllmPython, vllm_launching
from liveweight.cli.demo.torn import interruptible
from liveweight.cli.exit_codes import FAILED, INTERRUPTED
from liveweight.errors import MissingExtra

if TYPE_CHECKING:
    from liveweight.lab.torture.targets.target import TortureTarget
    from liveweight.lab.torture.torture import TortureResult

_NEEDED = ("torch", "tokenizers")
PROGRAM = "liveweight.cli.fork_server"

Goal = Annotated[
    Literal["embedded", "vllm", "in-place"],
    typer.Option(
        help="The embedded engine, a server of vLLM, or an engine whose live weights a trainer writes, as most peers do."
    ),
]
Kills = Annotated[int, typer.Option(min=1, help="How many rounds are struck.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the strikes and the weights.")]
Clients = Annotated[int, typer.Option(min=1, max=32, help="Clients that stream all the time.")]
Tokens = Annotated[int, typer.Option(min=1, max=1000, help="Tokens of an answer.")]


def torture(
    target: Goal = "embedded",
    kills: Kills = 100,
    seed: Seed = 0,
    clients: Clients = 4,
    tokens: Tokens = 48,
    vllm_python: VllmPython = None,
    json_to: JsonTo = None,
) -> None:
    """Kill, stop, corrupt and cut off trainers, ranks and servers at random moments of rounds, under load, and replay every token.

    The exit code is 0 if no token is torn, no wait went past its deadline, nothing leaked and no engine was lost; else 1. Of the
    in-place target it is 0 if torn tokens were found: they are there.

    For example: liveweight torture --kills 1000 --seed 1 --json torture.json
    """
    _check(target, vllm_python)
    from liveweight.lab.torture.torture import TortureSettings, torture

    settings = TortureSettings(
        program=PROGRAM,
        target=target,
        kills=kills,
        seed=seed,
        clients=clients,
        tokens=tokens,
        vllm=None if vllm_python is None else vllm_launching(vllm_python),
    )
    try:
        with interruptible():
            result = torture(settings, _progress)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    text = json.dumps(result.to_dict(), indent=2)
    if json_to is not None and json_to != "-":
        Path(json_to).write_text(text + "\n", encoding="utf-8")
    print(text if json_to == "-" else verdict(result))
    if not result.holds:
        raise typer.Exit(FAILED)


def _check(target: str, vllm_python: Path | None) -> None:
    """Refuse a missing extra or option before anything is started."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise MissingExtra("the torture", "engine")
    if target == "vllm" and vllm_python is None:
        raise typer.BadParameter("--target vllm needs --vllm-python, such as .venv-vllm/0.32.0/bin/python")


def verdict(result: TortureResult) -> str:
    """The result in a few lines."""
    lines = [
        f"{result.target}: {result.kills} strikes at {result.rounds} rounds in {result.took_s:.0f} s; "
        f"{result.committed} committed, {result.restarts} restarts, {result.tokens} tokens replayed",
        f"torn tokens {result.torn_tokens}, late waits {result.late_waits}, leaks {result.leaks}, "
        f"engines lost {result.lost}",
        *result.found,
    ]
    return "\n".join(lines)


def _progress(number: int, target: TortureTarget) -> None:
    """On a terminal, rewrite one line of counts."""
    if sys.stderr.isatty():
        counts = target.counts
        text = f"\r{number} strikes, {counts.committed} committed, {counts.restarts} restarts"
        print(text, end="", file=sys.stderr, flush=True)
