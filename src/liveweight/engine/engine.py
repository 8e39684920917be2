"""The engine: one thread that schedules, sends steps, takes results and hands the pieces of answers on.

Requests come from any thread. With overlap there is always one step more on its way than the ranks are working on, so that they never wait
for this thread. An idle engine waits for a request and does nothing else.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeAlias

from liveweight.engine.account import Counts, Limits
from liveweight.engine.config import EngineConfig
from liveweight.engine.models.spec import ModelSpec
from liveweight.engine.ranks import Done, Launch, Ranks, launch
from liveweight.engine.requests import Sampling, Sink
from liveweight.engine.scheduler import Said, Scheduler
from liveweight.engine.sequence import Sequence as Running
from liveweight.engine.sizes import cache_blocks, context_of
from liveweight.engine.stream import Exchanged, StepDone
from liveweight.engine.text.stream import TextStream
from liveweight.engine.text.tokenizer import Tokenizer
from liveweight.engine.updates import Inbox, lead
from liveweight.errors import EngineStopping, LiveWeightError, RankLost, RequestInvalid
from liveweight.observe.bus import Bus
from liveweight.worker.leader import Leader

State: TypeAlias = Literal["running", "stopping", "failed", "stopped"]
OnFailure: TypeAlias = Callable[[LiveWeightError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the engine is, at one moment."""

    state: State
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    fault: LiveWeightError | None
    weights: str
    counts: Counts = field(default_factory=Counts)


class Engine:
    """A running engine. Its methods may be called from any thread; sinks are called on its own."""

    def __init__(self, config: EngineConfig, *, launch: Launch = launch, bus: Bus | None = None) -> None:
        directory = Path(config.model)
        self.config, self.spec = config, ModelSpec.read(directory)
        self.tokenizer = Tokenizer.load(directory)
        self.name = config.served_name or directory.resolve().name
        self.context, self.vocab = context_of(config, self.spec), self.spec.vocab
        blocks = cache_blocks(config, self.spec, self.context)
        self._inbox = Inbox(self._woken)
        with ExitStack() as stack:
            self._leader = self._lead(bus or Bus(), stack)
            self._ranks = Ranks(config, blocks=blocks, context=self.context, launch=launch)
            self._resources = stack.pop_all()
        self._draft = config.draft and self.spec.draft_layers > 0
        self._scheduler = Scheduler(
            Limits(
                blocks=blocks,
                block_tokens=config.block_tokens,
                context=self.context,
                max_running=config.max_running,
                max_waiting=config.max_waiting,
                batch_tokens=config.batch_tokens,
                width=2 if self._draft else 1,
                caching=config.prefix_cache,
            ),
            weights=self._ranks.ready[0].weights,
            ends=frozenset(self.spec.eos_ids),
        )
        self._exchanging = False
        self._depth = 2 if config.overlap else 1
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._state: State = "running"
        self._fault: LiveWeightError | None = None
        self._closing = False
        self._cancelled: list[int] = []
        self._on_failure: list[OnFailure] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str | None:
        """Where publishers reach it; None without live updates."""
        return None if self._leader is None else self._leader.address

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the ranks."""
        return self._ranks.pids

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """Take a request; its answer goes to `sink`, piece by piece. Returns the number to cancel it by.

        RequestInvalid, QueueFull, EngineStopping or RankLost, when it is not taken.
        """
        if not prompt:
            raise RequestInvalid("the prompt is empty")
        if not all(0 <= token < self.vocab for token in prompt):
            raise RequestInvalid(f"the prompt has token ids outside the vocabulary of {self.vocab}")
        if sampling.routing and not self.spec.sparse_layers:
            raise RequestInvalid("routed experts were asked for, and the model has none")
        number = next(self._numbers)
        sequence = Running(number, list(prompt), sampling, sink, TextStream(self.tokenizer, sampling.stop))
        with self._lock:
            self._check_open()
            self._scheduler.add(sequence)
        self._ranks.wake()
        return number

    def cancel(self, request: int) -> None:
        """End a request with what it has, soon. Nothing happens if it ended already."""
        with self._lock:
            self._cancelled.append(request)
        self._ranks.wake()

    def status(self) -> Status:
        """How the engine is now."""
        with self._lock:
            scheduler = self._scheduler
            return Status(
                state=self._state,
                running=scheduler.running,
                waiting=scheduler.waiting,
                blocks_total=scheduler.pool.count,
                blocks_free=scheduler.pool.free,
                fault=self._fault,
                weights=scheduler.weights,
                counts=scheduler.counts.copy(),
            )

    def on_failure(self, callback: OnFailure) -> None:
        """Call back, on the engine's thread, when a rank was lost; at once if that has happened."""
        with self._lock:
            fault = self._fault
            if fault is None:
                self._on_failure.append(callback)
        if fault is not None:
            callback(fault)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no new requests, let the others finish for that long, end the rest with what they have, then end all processes."""
        with self._lock:
            if self._state == "running":
                self._state = "stopping"
            self._quiet.wait_for(lambda: self._state != "stopping" or not self._busy(), timeout_s)
            self._closing = True
        self._ranks.wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except LiveWeightError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours must end requests, not leave them waiting
            logging.getLogger("liveweight").exception("the engine's thread failed")
            self._fail(LiveWeightError(f"{type(error).__name__}: {error}"))
        finally:
            self._ranks.close()
            self._resources.close()
            with self._lock:
                self._state = "stopped" if self._fault is None else "failed"
                self._quiet.notify_all()

    def _turn(self) -> bool:
        """End what is to be ended, send what can be sent, wait, take what came. False when the engine is to end."""
        self._end_some()
        with self._lock:
            if self._closing:
                return False
            self._send()
        for answers in self._ranks.wait():
            self._take(answers)
        return True

    def _send(self) -> None:
        """What can be sent now. A decision goes before the next step, and no step follows it until its outcome is known."""
        if self._exchanging:
            return
        exchange = self._inbox.take()
        if exchange is not None:
            self._exchanging = True
            self._ranks.send(exchange)
            return
        while self._scheduler.in_flight < self._depth:
            step = self._scheduler.schedule()
            if step is None:
                return
            self._ranks.send(step)

    def _end_some(self) -> None:
        """Requests that were cancelled, or all. Here, so that every piece of an answer comes from one thread, in order."""
        with self._lock:
            said = self._scheduler.end_all() if self._closing else []
            for request in self._cancelled:
                said += self._scheduler.end(request)
            self._cancelled.clear()
            self._quiet.notify_all()
        _deliver(said)

    def _take(self, answers: tuple[Done, ...]) -> None:
        spoken = answers[0]
        weights = {answer.weights for answer in answers}
        if len(weights) > 1:
            raise RankLost(f"the ranks hold {len(weights)} versions: {', '.join(sorted(weights))}")
        with self._lock:
            match spoken:
                case StepDone(number=number, rows=rows):
                    said = self._scheduler.done(number, spoken.weights, rows)
                case Exchanged():
                    said = self._exchanged(spoken.weights)
            if not self._busy():
                self._quiet.notify_all()
        _deliver(said)

    def _exchanged(self, weights: str) -> Said:
        """All ranks know the outcome: the next step may go. Requests feel it only if the weights are other ones now."""
        self._exchanging = False
        updates = self.config.updates
        if updates is None or weights == self._scheduler.weights:
            return []
        return self._scheduler.change(weights, updates.kv_policy)

    def _fail(self, error: LiveWeightError) -> None:
        with self._lock:
            self._fault, self._state = error, "failed"
            said = self._scheduler.fail(error)
            callbacks, self._on_failure = self._on_failure, []
            self._quiet.notify_all()
        _deliver(said)
        for callback in callbacks:
            callback(error)

    def _lead(self, bus: Bus, stack: ExitStack) -> Leader | None:
        updates = self.config.updates
        if updates is None:
            return None
        leader = lead(updates, world=self.config.tp, replica=self.name, bus=bus, inbox=self._inbox)
        stack.callback(leader.close)
        return leader

    def _woken(self) -> None:
        """A decision waits. (One that comes before the ranks are there is found by the first turn.)"""
        ranks: Ranks | None = getattr(self, "_ranks", None)
        if ranks is not None:
            ranks.wake()

    def _busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _check_open(self) -> None:
        if self._fault is not None:
            raise RankLost(str(self._fault)) from self._fault
        if self._state != "running":
            raise EngineStopping("the engine is being stopped")


def _deliver(said: Said) -> None:
    for sink, delta in said:
        sink(delta)
