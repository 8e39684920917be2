"""What live updates cost a serving engine: the stall at a commit, the lost throughput, the gaps between tokens.

One run, one engine, one trainer process. Periods without updates and with them take turns; in both, the same number of requests decodes
all the time. The stall is the gap at a commit minus the gaps that follow it, since a shared machine is not equally fast all the time. It is
compared with one plain copy of the weights by as many processes as there are ranks.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.serving.requests import Delta, Sampling
from liveweight.lab.bench.child_process import BenchProcess, JsonSocket
from liveweight.lab.bench.engine.live_trainer import WAIT_S
from liveweight.lab.bench.engine.live_trainer import main as trainer_main
from liveweight.spec.deadline import Deadline
from liveweight.wire.messages.values import KvPolicy

AFTER = 10
"""How many gaps after a commit give the usual gap at that time."""
SETTLED = 3
"""After this many tokens a request is decoding, and no longer being recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """What to measure. `commits` are spread over stretches that take turns with as long ones without updates."""

    model: Path | None = None
    size: Literal["tiny", "small", "1b"] = "1b"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tp: int = 2
    requests: int = 8
    commits: int = 20
    every_s: float = 10.0
    offer: Literal["frozen", "live"] = "frozen"
    stretches: int = 4
    policies: tuple[KvPolicy, ...] = ("reuse", "recompute")


@dataclass(slots=True)
class _Stretch:
    """Arrival times of tokens, by request, with the weights they came from."""

    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    tokens: list[list[tuple[float, str]]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / (self.ended_s - self.began_s)

    def gaps(self) -> list[float]:
        return [b[0] - a[0] for row in self.tokens for a, b in itertools.pairwise(row)]

    def crossings(self) -> dict[str, list[tuple[float, float]]]:
        """By the weights that came: each request's gap between its last token of before and its first after, and its usual gap then."""
        found: dict[str, list[tuple[float, float]]] = {}
        for row in self.tokens:
            pairs = list(itertools.pairwise(row))
            gaps = [after[0] - before[0] for before, after in pairs]
            for index, (before, after) in enumerate(pairs):
                following = gaps[index + 1 : index + 1 + AFTER]
                if before[1] != after[1] and following:
                    found.setdefault(after[1], []).append((gaps[index], statistics.median(following)))
        return found


class _Load:
    """Requests that decode all the time: one that ends is followed by the next."""

    def __init__(self, engine: Engine, requests: int) -> None:
        self._engine, self._requests = engine, requests
        self._lock = threading.Condition()
        self._stretch: _Stretch | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin all requests."""
        for number in range(self._requests):
            self._submit(number)

    def measure(self) -> _Stretch:
        """Record tokens from now on."""
        with self._lock:
            self._stretch = _Stretch(tokens=[[] for _ in range(self._requests)])
            return self._stretch

    def settle(self) -> None:
        """Wait until every request decodes: work left by the last commit must not count in the next period."""
        stretch, deadline = self.measure(), Deadline.after(WAIT_S)
        with self._lock:
            if not self._lock.wait_for(lambda: min(map(len, stretch.tokens)) >= SETTLED, WAIT_S):
                raise deadline.exceeded("every request to decode")

    def stop(self) -> None:
        """Start no further request, and end the running ones."""
        self._stopped = True
        self._engine.abort_requests()

    def _submit(self, number: int) -> None:
        prompt = [(number * 37 + position * 11) % 400 + 4 for position in range(16)]
        room = self._engine.context - len(prompt)
        sampling = Sampling(max_tokens=room, temperature=0.0, ignore_eos=True)
        self._engine.submit(prompt, sampling, lambda delta: self._on_delta(number, delta))

    def _on_delta(self, number: int, delta: Delta) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._stretch is not None:
                self._stretch.tokens[number] += [(now_s, token.weights) for token in delta.tokens]
                self._lock.notify_all()
        if delta.last and not self._stopped:
            threading.Thread(target=self._submit, args=(number,)).start()  # a sink must not submit


def bench_live(settings: LiveSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-bench-")))
        model = settings.model
        if model is None:
            model = directory / "model"
            init_model(model, SIZES["qwen3"][settings.size], dtype=settings.dtype)
        updates = Updates(address=f"ipc://{directory}/engine.sock", secret_file=str(directory / "secret"))
        engine = stack.enter_context(
            Engine(EngineConfig(model=str(model), tp=settings.tp, updates=updates, overlap=True))
        )
        config = {"model": str(model), "address": updates.address, "directory": str(directory)}
        trainer = stack.enter_context(BenchProcess(trainer_main, config))
        trainer.line.receive(Deadline.after(WAIT_S))
        weights_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        copy_s = _plain_copy(weights_bytes, settings.tp)
        load = _Load(engine, settings.requests)
        load.start()
        _publish(trainer.line, settings.offer, "reuse")  # the first round faults the shadow in
        figures = {policy: _compare(load, trainer.line, settings, policy) for policy in settings.policies}
        load.stop()
        trainer.line.send(do="stop")
        trainer.line.receive(Deadline.after(WAIT_S))
    return {
        "model": str(settings.model or f"qwen3 {settings.size} {settings.dtype}"),
        "bytes": weights_bytes,
        "tp": settings.tp,
        "cores": os.cpu_count(),
        "requests": settings.requests,
        "every_s": settings.every_s,
        "offer": settings.offer,
        "copy_s": copy_s,
        **{policy: _figures(found, copy_s) for policy, found in figures.items()},
    }


def _publish(line: JsonSocket, offer: str, policy: KvPolicy) -> dict[str, Any]:
    line.send(do="publish", offer=offer, kv_policy=policy)
    return line.receive(Deadline.after(WAIT_S))


def _compare(
    load: _Load, line: JsonSocket, settings: LiveSettings, policy: KvPolicy
) -> list[tuple[_Stretch, _Stretch, list[dict[str, Any]]]]:
    """Stretches without updates and with them, in turns; what the rounds took."""
    per_stretch = -(-settings.commits // settings.stretches)
    found = []
    for _ in range(settings.stretches):
        load.settle()
        quiet = load.measure()
        _wait_until(time.monotonic() + per_stretch * settings.every_s)
        quiet.ended_s = time.monotonic()
        busy, rounds = load.measure(), []
        for number in range(per_stretch):
            rounds.append(_publish(line, settings.offer, policy))
            _wait_until(busy.began_s + (number + 1) * settings.every_s)
        busy.ended_s = time.monotonic()
        found.append((quiet, busy, rounds))
    return found


def _wait_until(moment_s: float) -> None:
    threading.Event().wait(max(0.0, moment_s - time.monotonic()))


def _figures(found: list[tuple[_Stretch, _Stretch, list[dict[str, Any]]]], copy_s: float) -> dict[str, float]:
    quiet_gaps = [gap for quiet, _, _ in found for gap in quiet.gaps()]
    busy_gaps = [gap for _, busy, _ in found for gap in busy.gaps()]
    usual_s = statistics.median(quiet_gaps)
    crossings = [some for _, busy, _ in found for some in busy.crossings().values()]
    at_commits = [statistics.median(gap for gap, _ in some) for some in crossings]
    stalls = [statistics.median(gap - usual for gap, usual in some) for some in crossings]
    rounds = [one for _, _, some in found for one in some]
    stall_s = statistics.median(stalls)
    return {
        "commits": len(rounds),
        "usual_gap_s": usual_s,
        "stall_s": stall_s,
        "stall_ratio": stall_s / copy_s,
        "stall_beside_quiet_s": statistics.median(at_commits) - usual_s,
        "swap_s": statistics.median(one["stall_s"] for one in rounds),
        "round_s": statistics.median(one["took_s"] for one in rounds),
        "tokens_per_s": statistics.mean(busy.rate for _, busy, _ in found),
        "tokens_per_s_without": statistics.mean(quiet.rate for quiet, _, _ in found),
        "goodput": statistics.mean(b.rate for _, b, _ in found)
        / statistics.mean(q.rate for q, _, _ in found),
        "gap_p99_ratio": _p99(busy_gaps) / _p99(quiet_gaps),
    }


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _plain_copy(size_bytes: int, ranks: int) -> float:
    """As many processes as ranks each copy their share at once, warm: from the first's start to the last's end, best of five."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(BenchProcess(_copier, {"size": size_bytes // ranks})) for _ in range(ranks)
        ]
        deadline = Deadline.after(WAIT_S)
        for child in children:
            child.line.receive(deadline)
        spans = []
        for _ in range(5):
            for child in children:
                child.line.send(do="copy")
            answers = [child.line.receive(deadline)["span"] for child in children]
            spans.append(max(end for _, end in answers) - min(start for start, _ in answers))
        for child in children:
            child.line.send(do="stop")
    return float(min(spans))


def _copier(line: JsonSocket, config: dict[str, Any]) -> None:
    import numpy as np

    source = np.ones(config["size"], dtype=np.uint8)
    target = np.zeros_like(source)
    np.copyto(target, source)
    line.send(ready=True)
    while line.receive(Deadline.after(WAIT_S))["do"] == "copy":
        began_s = time.monotonic()
        np.copyto(target, source)
        line.send(span=(began_s, time.monotonic()))
