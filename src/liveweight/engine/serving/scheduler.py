"""The scheduler: which sequences run, what the next step holds, what its results mean. Pure: no sockets, no clock, no threads.

Steps go out in one order and ranks carry them out in that order. So a page may go to another sequence as soon as that is decided: its
next writer comes later in the stream. The scheduler may be one step ahead of what it knows: a sequence that draws is bounded by
what it can have grown to, and what a step draws for a sequence that ended meanwhile is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Literal

from liveweight.engine.serving.counters import SchedulerCounts, SchedulerLimits
from liveweight.engine.serving.kv_blocks import BlockPool, root_key
from liveweight.engine.serving.requests import Delta, Sink
from liveweight.engine.serving.sequence import Sequence
from liveweight.engine.serving.step_stream import Drawn, Fill, Next, Step, content_of
from liveweight.engine.status import Pausing
from liveweight.errors import LiveWeightError, MessageInvalid, QueueFull, RequestInvalid
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import KvPolicy

Deliveries = list[tuple[Sink, Delta]]
"""Pieces of answers, each with the sink that it goes to."""


class Scheduler:
    """Decides for one replica. Used by one thread."""

    def __init__(self, limits: SchedulerLimits, *, weights: str, ends: frozenset[int]) -> None:
        self.limits, self.counts, self.weights = limits, SchedulerCounts(), weights
        self.pool = BlockPool(limits.blocks, caching=limits.caching)
        self._root = root_key(content_of(weights))
        self._ends = ends
        self._known: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._sent: deque[tuple[int, list[Sequence]]] = deque()
        self._pause: Literal["freeze", "drain"] | None = None

    @property
    def running(self) -> int:
        """Sequences with pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Steps that were sent and not answered."""
        return len(self._sent)

    @property
    def pausing(self) -> Pausing:
        """Whether steps are made, made only for what runs already, or not made."""
        if self._pause is None:
            return "running"
        return "draining" if self._pause == "drain" and self._running else "paused"

    def pause(self, *, drain: bool) -> None:
        """Make no more steps; with `drain`, not until what runs has finished."""
        self._pause = "drain" if drain else "freeze"

    def resume(self) -> None:
        """Make steps again."""
        self._pause = None

    def numbers(self, *, running: bool = False) -> list[int]:
        """The requests that are there, or only those that run."""
        return [sequence.id for sequence in (self._running if running else self._known.values())]

    def add(self, sequence: Sequence) -> None:
        """Take a request. QueueFull, or RequestInvalid for one that could never run."""
        limits, length = self.limits, sequence.prompt_length + sequence.sampling.max_tokens
        if length > limits.context:
            raise RequestInvalid(
                f"{sequence.prompt_length} prompt tokens and max_tokens {sequence.sampling.max_tokens} are more than "
                f"the context of {limits.context}"
            )
        if self._pages(length + limits.width) > limits.blocks:
            raise RequestInvalid(f"{length} tokens do not fit into a cache of {limits.blocks} pages")
        if len(self._known) >= limits.max_running + limits.max_waiting:
            raise QueueFull(f"{self.running} requests run and {self.waiting} wait already")
        self._waiting.append(sequence)
        self._known[sequence.id] = sequence

    def end(self, number: int) -> Deliveries:
        """End a request with what it has. Nothing, if it is not there any more."""
        found = self._known.get(number)
        return [] if found is None else [self._finish(found, found.aborted())]

    def end_all(self) -> Deliveries:
        """End every request with what it has."""
        return [self._finish(sequence, sequence.aborted()) for sequence in list(self._known.values())]

    def fail(self, error: LiveWeightError) -> Deliveries:
        """End everything with an error."""
        return [self._finish(sequence, Delta(fault=error)) for sequence in list(self._known.values())]

    def change(self, weights: str, policy: KvPolicy) -> Deliveries:
        """Other weights serve from here on in the stream; steps in flight come after it. What that means for requests is the policy's."""
        self.weights, self._root = weights, root_key(content_of(weights))
        deliveries: Deliveries = []
        for sequence in reversed(list(self._running)):
            match policy:
                case "recompute":
                    self._preempt(sequence)
                case "reuse":
                    sequence.stale = True
                case "drop":
                    deliveries.append(self._finish(sequence, sequence.aborted()))
        for sequence in self._known.values():
            sequence.keys.clear()
            sequence.reused |= sequence.stale or sequence.in_flight > 0  # also one that lost its pages since
        return deliveries

    def end_unmet(self, serving: Version | None) -> Deliveries:
        """That version serves from here on: end requests without a token whose demand it does not meet."""
        return [
            self._finish(sequence, Delta(fault=sequence.demand.refusal(serving)))
            for sequence in list(self._known.values())
            if sequence.demand is not None and not sequence.generated and not sequence.demand.met_by(serving)
        ]

    # The next step.

    def schedule(self, *, crossing: bool = False) -> Step | None:
        """The next step, if there is anything to do that does not wait for a result. Drawing goes before filling.

        `crossing`: it comes after a swap whose outcome is not known. Then it only draws: what fills pages says now which weights
        they are of.
        """
        if self._pause == "freeze":
            return None
        rows: list[Fill | Next] = []
        users: list[Sequence] = []
        budget = self.limits.batch_tokens
        for sequence in list(self._running):
            if sequence.slot < 0 or sequence.filling or not self._may_draw(sequence):
                continue
            row = self._next(sequence)
            if row is not None:
                rows.append(row)
                users.append(sequence)
                budget -= self.limits.width
        for sequence in () if crossing else self._to_fill():
            if budget <= 0:
                break
            chunk = self._fill(sequence, budget)
            rows.append(chunk)
            users.append(sequence)
            budget -= len(chunk.tokens)
        if not rows:
            return None
        for sequence in users:
            sequence.in_flight += 1
        self.counts.steps += 1
        self._sent.append((self.counts.steps, users))
        return Step(self.counts.steps, tuple(rows))

    def _may_draw(self, sequence: Sequence) -> bool:
        """Whether one more draw can be of use, and has room, whatever the draws in flight bring."""
        width = self.limits.width
        longest = len(sequence.tokens) + sequence.pending * width
        more = sequence.generated + sequence.pending < sequence.sampling.max_tokens
        return more and longest + width - 1 <= self.limits.context

    def _next(self, sequence: Sequence) -> Next | None:
        """A drawing row, with the pages it needs; None if the sequence itself was preempted."""
        width = self.limits.width
        need = self._pages(len(sequence.tokens) + sequence.pending * width + width - 1) - len(sequence.blocks)
        blocks: list[int] = []
        while need > 0:
            taken = self.pool.take(need)
            if taken is not None:
                blocks = taken
                break
            victim = self._running[-1]  # rows come in order of admission: it has none in this step
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.blocks += blocks
        sequence.pending += 1
        return Next(sequence.slot, tuple(blocks))

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's pages. It is filled again, with all its tokens, once its steps in flight are known."""
        self._leave(victim)
        self._waiting.appendleft(victim)
        self.counts.preemptions += 1

    def _to_fill(self) -> Iterator[Sequence]:
        """Sequences with tokens to compute: those that began, then those that can be admitted."""
        yield from [sequence for sequence in self._running if sequence.filling]
        while self._waiting and self._slots and self._admit(self._waiting[0]):
            yield self._running[-1]

    def _admit(self, sequence: Sequence) -> bool:
        """Give the first in the queue a slot and pages for all it has, or let it wait."""
        if self._pause is not None and not sequence.generated:
            return False  # only what had begun is brought to its end
        if sequence.in_flight:
            return False  # taken back from a step whose tokens are not known yet
        known, block_tokens = len(sequence.tokens), self.limits.block_tokens
        hits: list[int] = []
        if not sequence.sampling.routing:  # else every token must be computed: its experts are wanted
            hits = self.pool.find(sequence.keys_until(known - 1, self._root, block_tokens))
        taken = self.pool.take(self._pages(known + self.limits.width) - len(hits))
        if taken is None:
            self.pool.release(hits)
            return False
        self._waiting.popleft()
        sequence.slot, sequence.blocks = self._slots.pop(), hits + taken
        sequence.filled, sequence.target = len(hits) * block_tokens, known
        sequence.kept, sequence.pending, sequence.fresh, sequence.stale = len(hits), 0, True, False
        sequence.routing.clear()
        if not sequence.generated:
            sequence.cached = sequence.filled
            self.counts.prompt_tokens += known
            self.counts.cached_tokens += sequence.filled
        self._running.append(sequence)
        return True

    def _fill(self, sequence: Sequence, budget: int) -> Fill:
        start, fresh = sequence.filled, sequence.fresh
        end = min(sequence.target, start + budget)
        done = end == sequence.target
        sequence.filled, sequence.fresh = end, False
        sequence.pending += done
        self._remember(sequence, end)
        return Fill(
            sequence.slot,
            start,
            tuple(sequence.tokens[start:end]),
            tuple(sequence.blocks) if fresh else (),
            None if done else sequence.tokens[end],
            sequence.draw() if fresh else None,
        )

    def _remember(self, sequence: Sequence, count: int) -> None:
        """The sequence's first `count` tokens are in its pages, or will be for every step that comes after."""
        if sequence.stale:
            return  # its first pages are of other weights
        keys = sequence.keys_until(count, self._root, self.limits.block_tokens)
        for index in range(sequence.kept, len(keys)):
            self.pool.remember(sequence.blocks[index], keys[index])
        sequence.kept = max(sequence.kept, len(keys))

    # Results.

    def done(self, number: int, weights: str, rows: Rows[Drawn]) -> Deliveries:
        """The oldest step in flight was carried out by all ranks, under these weights; what its rows drew."""
        sent, users = self._sent.popleft()
        if sent != number or len(rows) != len(users):
            raise MessageInvalid(
                f"results of step {number} with {len(rows)} rows, not of {sent} with {len(users)}"
            )
        deliveries: Deliveries = []
        for sequence, drawn in zip(users, rows, strict=True):
            sequence.in_flight -= 1
            if sequence.finished:
                continue
            sequence.pending -= bool(drawn.tokens) and sequence.pending > 0
            delta = sequence.take(drawn, weights, self._ends)
            self._count(drawn, delta)
            if delta is None:
                continue
            if delta.last:
                deliveries.append(self._finish(sequence, delta))
                continue
            deliveries.append((sequence.sink, delta))
            if sequence.slot >= 0 and not sequence.filling:
                self._remember(sequence, len(sequence.tokens) - 1)
        return deliveries

    def _count(self, drawn: Drawn, delta: Delta | None) -> None:
        counts = self.counts
        counts.drafted_tokens += drawn.drafted
        counts.accepted_tokens += max(0, len(drawn.tokens) - 1)
        counts.generated_tokens += 0 if delta is None else len(delta.tokens)

    def _finish(self, sequence: Sequence, delta: Delta) -> tuple[Sink, Delta]:
        """Release everything of a sequence; results in flight for it are dropped when they come."""
        sequence.finished = True
        del self._known[sequence.id]
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        reason = "error" if delta.finish is None else delta.finish
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        return sequence.sink, delta

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.blocks = -1, []
        sequence.filled = sequence.target = sequence.kept = sequence.pending = 0

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)
