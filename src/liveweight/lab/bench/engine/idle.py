"""What live updates cost an idle engine: the time of a decode step, beside engines whose ranks synchronise in every step.

Four engines of the same model: without live updates, with them, with a gloo broadcast in every step, and with a broadcast and a barrier.
Differences are paired: the first engine has its turn right before or right after each of the others, by turns. Their median counts, with
the 95% interval of a bootstrap, so that one stall of the machine decides nothing. Engines that synchronise cost much, and need fewer pairs.
"""

from __future__ import annotations

import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.engine.serving.requests import Delta, Sampling
from liveweight.errors import DeadlineExceeded
from liveweight.lab.bench.engine.idle_rank import Sync

Name: TypeAlias = Literal["off", "on", "broadcast", "barrier"]
ENGINES: tuple[Name, ...] = ("off", "on", "broadcast", "barrier")
WAIT_S = 600.0
WARM = 2
RESAMPLES = 2000
SYNCHRONISED_EVERY = 5
"""Engines that synchronise in every step have a pair in every this many turns."""

Pairs: TypeAlias = dict[Name, list[tuple[float, float]]]
"""Seconds per step: of an engine, and of the engine without live updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSettings:
    """The model's size, the number of pairs of turns, and the steps of a turn. Short turns keep the pair close in time."""

    size: Literal["tiny", "small", "1b"] = "small"
    tp: int = 2
    requests: int = 4
    steps: int = 16
    turns: int = 300


def bench_idle(settings: IdleSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    pairs: Pairs = {name: [] for name in ENGINES[1:]}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-idle-")))
        init_model(directory / "model", SIZES["qwen3"][settings.size])
        engines = {name: stack.enter_context(_engine(name, directory, settings.tp)) for name in ENGINES}
        for turn in range(settings.turns + WARM):
            for name in (
                ENGINES[1:] if turn < WARM or (turn - WARM) % SYNCHRONISED_EVERY == 0 else ENGINES[1:2]
            ):
                pair = _pair(engines[name], engines["off"], settings, swapped=turn % 2 == 1)
                if turn >= WARM:
                    pairs[name].append(pair)
        for engine in engines.values():
            engine.stop()  # ranks write their counts when they end
        counts = {name: _counts(directory / name, settings.tp) for name in ENGINES}
    return _report(settings, pairs, counts)


def _engine(name: Name, directory: Path, tp: int) -> Engine:
    place = directory / name
    place.mkdir(mode=0o700)
    updates = None
    if name == "on":
        updates = Updates(address=f"ipc://{place}/engine.sock", secret_file=str(place / "secret"))
    config = EngineConfig(model=str(directory / "model"), tp=tp, prefix_cache=False, updates=updates)
    sync: Sync = name if name in ("broadcast", "barrier") else "never"
    return Engine(config, launch=_launching(place, tp, sync))


def _launching(place: Path, tp: int, sync: Sync) -> Launch:
    def launch(rank: int, end: socket.socket) -> RankProcess:
        given = f"parent={os.getpid()}, number={rank}, ranks={tp}, sync={sync!r}, place={str(place)!r}"
        code = f"from liveweight.lab.bench.engine.idle_rank import main; main({end.fileno()}, {given})"
        return subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[end.fileno()], stdin=subprocess.DEVNULL
        )

    return launch


def _pair(one: Engine, off: Engine, settings: IdleSettings, *, swapped: bool) -> tuple[float, float]:
    """Seconds per step of both engines; runs `off` first if swapped."""
    if swapped:
        beside = _turn(off, settings)
        return _turn(one, settings), beside
    return _turn(one, settings), _turn(off, settings)


def _turn(engine: Engine, settings: IdleSettings) -> float:
    """Seconds per decode step of all requests at once, from the first token to the last."""
    pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    sampling = Sampling(max_tokens=settings.steps + 1, temperature=0.0, ignore_eos=True)
    for number in range(settings.requests):
        engine.submit([4 + number, 9, 17, 33], sampling, pieces.put)
    began_s, left = 0.0, settings.requests
    while left:
        try:
            piece = pieces.get(timeout=WAIT_S)
        except queue.Empty:
            raise DeadlineExceeded("the engine's next token", WAIT_S) from None
        if piece.fault is not None:
            raise piece.fault
        began_s = began_s or time.perf_counter()
        left -= piece.last
    return (time.perf_counter() - began_s) / settings.steps


def _counts(place: Path, tp: int) -> dict[str, int]:
    """The counts of all ranks of an engine."""
    total: dict[str, int] = {}
    for rank in range(tp):
        for name, count in json.loads((place / f"counts-{rank}.json").read_text()).items():
            total[name] = total.get(name, 0) + count
    return total


def _report(settings: IdleSettings, pairs: Pairs, counts: dict[Name, dict[str, int]]) -> dict[str, Any]:
    off_s = statistics.median(off for found in pairs.values() for _, off in found)
    per_step = {name: collectives_per_step(count) for name, count in counts.items()}
    return {
        "model": f"qwen3 {settings.size}",
        "tp": settings.tp,
        "cores": os.cpu_count(),
        "turns": settings.turns,
        "step_s": {"off": off_s}
        | {name: statistics.median(one for one, _ in found) for name, found in pairs.items()},
        "collectives_per_step": per_step,
        "extra_collectives": per_step["on"] - per_step["off"],
        **{name: paired([one - off for one, off in found], off_s) for name, found in pairs.items()},
    }


def collectives_per_step(counts: dict[str, int]) -> float:
    """How many of a rank's calls, of any kind, belong to a step."""
    return sum(count for name, count in counts.items() if name != "steps") / counts["steps"]


def paired(differences: Sequence[float], step_s: float) -> dict[str, float]:
    """The median of paired differences and its 95% interval, as parts of a step."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(differences, k=len(differences))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return {
        "difference": statistics.median(differences) / step_s,
        "low": low / step_s,
        "high": high / step_s,
    }
