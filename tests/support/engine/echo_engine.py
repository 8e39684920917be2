"""An engine without a model: it answers with the prompt, again and again. A real thread, real sinks, real limits.

The same seed, prompt and sampling give the same tokens. Gates and faults make moments that a model has only by chance.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from liveweight.engine.config import EngineConfig
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.serving.counters import SchedulerCounts
from liveweight.engine.serving.requests import Delta, Finish, Sampling, Sink, Token
from liveweight.engine.serving.sleeping import TAGS, SleepResult, Tag
from liveweight.engine.serving.step_stream import weights_text
from liveweight.engine.status import PauseMode, Pausing, State, Status
from liveweight.engine.text import TextStream, Tokenizer
from liveweight.engine.updates.leader_client import UpdateStatus
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult, UpdateTimes
from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.errors import (
    EngineStopping,
    LiveWeightError,
    QueueFull,
    RankLost,
    RequestInvalid,
    VersionNotOffered,
    WrongState,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.spec.version_demand import VersionDemand
from liveweight.wire.messages.values import RankTimes
from tests.support.engine.echo_weights import HELD, verify_held

BLOCK = 16
PADDING = 5
LAYERS, CHOSEN = 2, 3


@dataclass(slots=True)
class Row:
    """A request: running if it has a slot."""

    number: int
    prompt: Sequence[int]
    sampling: Sampling
    sink: Sink
    text: TextStream
    generated: int = 0
    cached: int = 0

    @property
    def blocks(self) -> int:
        return -(-(len(self.prompt) + self.generated) // BLOCK)


class EchoEngine:
    """The whole facade. `pace_s` is the time of a step; `gate` lets steps run; `switch` maps a token's index to new weights.

    `reported` is its update status, `offers` what its source has, and `objection` what an undo, an update or a
    verification is refused with; `damaged` weights are not what was installed.
    """

    def __init__(
        self, config: EngineConfig, *, context: int = 256, pace_s: float = 0.0, sparse: bool = True
    ) -> None:
        self.config, self.context = config, context
        self.tokenizer = Tokenizer.load(Path(config.model))
        self.name = config.served_name or "echo"
        self.vocab = self.tokenizer.size + PADDING
        self.spec = _spec(self.vocab, sparse=sparse)
        self.gate = threading.Event()
        self.gate.set()
        self.switch: dict[int, str] = {}
        self.start = Version(run="start", label="initial", digest="0" * 32)
        self.reported = UpdateStatus(
            state="serving initial", serving=self.start, undo=None, round=None, rounds=()
        )
        self.objection: LiveWeightError | None = None
        self.verify_requests: list[VerificationRequest] = []
        self.damaged = False
        self.asleep: frozenset[Tag] = frozenset()
        self.offers: list[Version] = []
        self.update_requests: list[RequestedVersion] = []
        self.total_blocks = 4096
        self._held: set[int] | None = None  # while paused: the requests that still run
        self._pace_s = pace_s
        self._changed = threading.Condition()
        self._rows: dict[int, Row] = {}
        self._numbers = itertools.count(1)
        self._state: State = "running"
        self._fault: LiveWeightError | None = None
        self._closing = False
        self._cancelled: set[int] = set()
        self._counts = SchedulerCounts()
        self._callbacks: list[Callable[[LiveWeightError], None]] = []
        self._seen: set[tuple[int, ...]] = set()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def check_demand(self, demand: VersionDemand | None) -> None:
        if demand is not None:
            demand.check(self.reported.serving)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        sink: Sink,
        demand: VersionDemand | None = None,
    ) -> int:
        self.check_demand(demand)
        if not prompt or any(not 0 <= token < self.vocab for token in prompt):
            raise RequestInvalid("no tokens, or tokens outside the vocabulary")
        if len(prompt) + sampling.max_tokens > self.context:
            raise RequestInvalid("longer than the context")
        with self._changed:
            if self._fault is not None:
                raise RankLost(str(self._fault))
            if self._state != "running":
                raise EngineStopping("the engine is being stopped")
            if len(self._rows) >= self.config.max_running + self.config.max_waiting:
                raise QueueFull(f"{self.config.max_waiting} requests wait already")
            row = Row(next(self._numbers), prompt, sampling, sink, TextStream(self.tokenizer, sampling.stop))
            key = tuple(prompt)
            row.cached = (len(prompt) - 1) // BLOCK * BLOCK if key in self._seen else 0
            self._seen.add(key)
            self._rows[row.number] = row
            self._counts.prompt_tokens += len(prompt)
            self._counts.cached_tokens += row.cached
            self._changed.notify_all()
        return row.number

    def cancel(self, request: int) -> None:
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify_all()

    def status(self) -> Status:
        with self._changed:
            running = list(self._rows.values())[: self.config.max_running]
            return Status(
                state=self._state,
                running=len(running),
                waiting=len(self._rows) - len(running),
                blocks_total=self.total_blocks,
                blocks_free=self.total_blocks - sum(row.blocks for row in running),
                fault=self._fault,
                weights=weights_text(self.start),
                paused=self.paused,
                asleep=tuple(tag for tag in TAGS if tag in self.asleep),
                counts=self._counts.copy(),
            )

    @property
    def address(self) -> str | None:
        return None if self.config.updates is None else self.config.updates.address

    @property
    def paused(self) -> Pausing:
        with self._changed:
            if self._held is None:
                return "running"
            return "draining" if self._held & set(self._rows) else "paused"

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        with self._changed:
            running = set(list(self._rows)[: self.config.max_running]) if self._held is None else self._held
            self._held = running if mode != "keep" else set()
            if mode == "abort":
                self._cancelled |= running
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.paused == "paused", timeout_s):
                raise deadline.exceeded("running requests to finish")

    def resume(self) -> None:
        with self._changed:
            self._held = None
            self._changed.notify_all()

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        return self._nap(frozenset(tags) - self.asleep, self.asleep | frozenset(tags), timeout_s)

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        return self._nap(frozenset(tags) & self.asleep, self.asleep - frozenset(tags), timeout_s)

    def drop_cache(self, timeout_s: float) -> int:
        del timeout_s
        return self.total_blocks * BLOCK

    def _nap(self, changed: frozenset[Tag], asleep: frozenset[Tag], timeout_s: float) -> SleepResult:
        if self.objection is not None:
            raise self.objection
        self.asleep = asleep
        size_bytes = 1000 * len(changed)
        return SleepResult(
            asleep=tuple(tag for tag in TAGS if tag in asleep),
            changed=tuple(tag for tag in TAGS if tag in changed),
            size_bytes=size_bytes,
            took_s=min(0.5, timeout_s),
        )

    def abort_requests(self, requests: Sequence[int] | None = None) -> int:
        with self._changed:
            ended = set(self._rows) & set(self._rows if requests is None else requests)
            self._cancelled |= ended
            self._changed.notify_all()
            return len(ended)

    def update_status(self) -> UpdateStatus:
        if self.config.updates is None:
            raise WrongState("started without live updates", "a question about live updates")
        return self.reported

    def undo(self, timeout_s: float) -> Version | None:
        del timeout_s
        if self.config.updates is None:
            raise WrongState("started without live updates", "an undo")
        if self.objection is not None:
            raise self.objection
        back = self.reported.undo
        if back is None:
            raise WrongState("serving, without an undo", "undo")
        self.reported = UpdateStatus(
            state="serving", serving=back, undo=None, round=None, rounds=self.reported.rounds
        )
        return back

    def verify(self, request: VerificationRequest) -> VerificationResult:
        if self.config.updates is None:
            raise WrongState("started without live updates", "a verification")
        if self.objection is not None:
            raise self.objection
        self.verify_requests.append(request)
        source = request.against == "source"
        offered = [version for version in self.offers if request.version in (None, version.label)]
        if source and not offered:
            raise VersionNotOffered(str(request.version), [str(version) for version in self.offers])
        answer = verify_held(
            replace(request, manifest=HELD) if source else request,
            self.reported.serving or self.start,
            damaged=self.damaged,
        )
        return replace(answer, compared_with=offered[-1]) if source else answer

    def update_weights(self, request: RequestedVersion) -> UpdateResult:
        if self.config.updates is None or self.config.updates.source is None:
            raise WrongState("started without a source (--weights-from)", "an update that is asked for")
        self.update_requests.append(request)
        if self.objection is not None:
            raise self.objection
        labels = [str(version.label) for version in self.offers]
        wanted = labels[-1] if labels and request.version is None else str(request.version)
        if wanted not in labels:
            raise VersionNotOffered(wanted, labels)
        version = self.offers[labels.index(wanted)]
        unchanged = self.reported.serving == version
        self.reported = UpdateStatus(
            state=f"serving {version}", serving=version, undo=None, round=None, rounds=()
        )
        times = [0.0] * 8 if unchanged else [0.25, 1.5, 0.5, 0.0, 0.01, 0.02, 0.002, 2.5]
        ranks = tuple(RankTimes(rank=rank) if unchanged else _times(rank) for rank in range(self.config.tp))
        return UpdateResult(
            version=version,
            outcome="unchanged" if unchanged else "committed",
            round=None if unchanged else "boot/1",
            mode="ipc",
            verified=request.verify and not unchanged,
            tensors=46,
            kept=(),
            steps=UpdateTimes(**dict(zip(UpdateTimes.__slots__, times, strict=True))),
            ranks=ranks,
        )

    def on_failure(self, callback: Callable[[LiveWeightError], None]) -> None:
        with self._changed:
            self._callbacks.append(callback)

    def fail(self, error: LiveWeightError) -> None:
        """A rank is lost."""
        with self._changed:
            self._fault, self._state = error, "failed"
            rows, self._rows = list(self._rows.values()), {}
            self._counts.finished["error"] = self._counts.finished.get("error", 0) + len(rows)
            self._changed.notify_all()
        for row in rows:
            row.sink(Delta(fault=error))
        for callback in self._callbacks:
            callback(error)

    def stop(self, timeout_s: float = 0.0) -> None:
        with self._changed:
            if self._state == "running":
                self._state = "stopping"
            self._changed.wait_for(lambda: not self._rows or self._closing, timeout_s)
            self._closing = True
            self._cancelled |= set(self._rows)
            self._changed.notify_all()
        self._thread.join()

    def wait_for(self, holds: Callable[[Status], bool], within_s: float = 10.0) -> Status:
        """The first status of which it holds."""
        with self._changed:
            if not self._changed.wait_for(lambda: holds(self.status()), within_s):
                raise TimeoutError(f"still {self.status()}")
            return self.status()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._cancelled or self._closing)
                deliveries = [(row, self._ended(row, "abort")) for row in self._take_cancelled()]
                if self._closing and not self._rows:
                    self._deliver(deliveries)
                    self._state = "stopped" if self._fault is None else "failed"
                    return
                if self.gate.is_set():
                    deliveries += self._step()
                if not deliveries:
                    self._changed.wait(0.005)
                self._changed.notify_all()
            self._deliver(deliveries)
            if self._pace_s:
                threading.Event().wait(self._pace_s)

    def _deliver(self, deliveries: list[tuple[Row, Delta]]) -> None:
        for row, delta in deliveries:
            row.sink(delta)

    def _take_cancelled(self) -> list[Row]:
        found = [self._rows.pop(number) for number in self._cancelled if number in self._rows]
        self._cancelled.clear()
        return found

    def _step(self) -> list[tuple[Row, Delta]]:
        running = list(self._rows.values())[: self.config.max_running]
        if self._held is not None:
            running = [row for row in running if row.number in self._held]
        self._counts.steps += bool(running)
        return [(row, self._next(row)) for row in running]

    def _next(self, row: Row) -> Delta:
        token, sampling = self._token(row), row.sampling
        row.generated += 1
        self._counts.generated_tokens += 1
        if token.id in sampling.stop_token_ids or (token.id in self.spec.eos_ids and not sampling.ignore_eos):
            return self._ended(row, "stop", (token,))
        text, stopped = row.text.push(token.id)
        if stopped:
            return self._ended(row, "stop", (token,), text)
        if row.generated == sampling.max_tokens:
            return self._ended(row, "length", (token,), text)
        return Delta(tokens=(token,), text=text, cached_tokens=row.cached)

    def _ended(self, row: Row, finish: Finish, tokens: tuple[Token, ...] = (), text: str = "") -> Delta:
        self._rows.pop(row.number, None)
        self._counts.finished[finish] = self._counts.finished.get(finish, 0) + 1
        through = len(row.prompt) + max(0, row.generated - 1)
        routing = bytes(2 * through * LAYERS * CHOSEN) if row.sampling.routing else None
        text += row.text.finish()
        return Delta(tokens=tokens, text=text, finish=finish, routing=routing, cached_tokens=row.cached)

    def _token(self, row: Row) -> Token:
        sampling, at = row.sampling, row.generated
        shift = 0 if sampling.temperature == 0 else sampling.seed
        chosen = row.prompt[(at + shift) % len(row.prompt)]
        since = [index for index in self.switch if index <= at]
        weights = self.switch[max(since)] if since else weights_text(self.start)
        if sampling.logprobs is None:
            return Token(id=chosen, weights=weights)
        top = tuple(((chosen + n) % self.tokenizer.size, -0.5 - n) for n in range(sampling.logprobs))
        return Token(id=chosen, weights=weights, logprob=-0.5, top=top)


def _times(rank: int) -> RankTimes:
    return RankTimes(rank=rank, staged_bytes=100, stage_s=1.0 + rank, verify_s=0.5, swap_s=0.25)


def _spec(vocab: int, *, sparse: bool) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3MoeForCausalLM" if sparse else "Qwen3ForCausalLM",
        hidden=8,
        layers=LAYERS,
        heads=1,
        kv_heads=1,
        head_dim=8,
        intermediate=8,
        vocab=vocab,
        experts=8 if sparse else 0,
        experts_per_token=CHOSEN if sparse else 0,
        expert_intermediate=8 if sparse else 0,
    )
