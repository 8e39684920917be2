"""The engine loop: the engine's thread, which sends steps, takes results and hands the pieces of answers on.

With overlap there is always one step more on its way than the ranks are working on, so that they never wait for this thread. Without
requests it only waits. Other threads use the scheduler under the lock, or leave work for the next turn.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from liveweight.engine.serving.rank_processes import Done, RankProcesses
from liveweight.engine.serving.scheduler import Deliveries, Scheduler
from liveweight.engine.serving.step_stream import (
    SleepEntry,
    SleepStepDone,
    StepDone,
    Swap,
    SwapDone,
    content_of,
)
from liveweight.engine.status import State
from liveweight.engine.updates.live_updates import DecisionInbox
from liveweight.errors import LiveWeightError, RankLost, Torn
from liveweight.rounds.boundary import Decision
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import KvPolicy

OnFailure: TypeAlias = Callable[[LiveWeightError], None]
StreamRequest: TypeAlias = tuple[SleepEntry, "Future[tuple[SleepStepDone, ...]]"]
"""An entry to put on the stream between two steps, and the ranks' answers."""


class EngineLoop:
    """One engine's thread. `lock` guards the scheduler and the public attributes; `quiet` is notified after every change."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: RankProcesses,
        inbox: DecisionInbox,
        *,
        depth: int,
        kv_policy: KvPolicy,
        in_place: bool = False,
        outlives_torn: bool = True,
        served: Callable[[], Version | None],
    ) -> None:
        """`served`: the version that the ranks hold after the last swap of which they were told the outcome.

        `in_place`: a swap may leave the ranks torn, and no step may follow it before its outcome is known. `outlives_torn`: the
        engine waits then for a round that heals it; else it fails, for others to take its place."""
        self.scheduler, self.ranks = scheduler, ranks
        self._in_place, self._outlives_torn = in_place, outlives_torn
        self.served = served
        self.torn: Torn | None = None
        """Why no weights may serve; None while the weights are whole."""
        self._inbox, self._depth, self._kv_policy = inbox, depth, kv_policy
        self.lock = threading.Lock()
        self.quiet = threading.Condition(self.lock)
        self.state: State = "running"
        self.fault: LiveWeightError | None = None
        self.closing = False
        self.cancelled: list[int] = []
        self.on_failure: list[OnFailure] = []
        self._swapping: Decision | None = None
        self._stream_requests: deque[StreamRequest] = deque()
        self._stream_request: StreamRequest | None = None

    def run(self, on_end: Callable[[], None]) -> None:
        """Run until `closing`, or until a rank is lost. `on_end` closes the engine's other resources."""
        try:
            while self._turn():
                pass
        except LiveWeightError as error:
            self._fail(error)
        except Exception as error:  # a bug must end requests, not leave them waiting
            logging.getLogger("liveweight").exception("the engine's thread failed")
            self._fail(LiveWeightError(f"{type(error).__name__}: {error}"))
        finally:
            self.ranks.close(at_once=self.fault is not None)
            self._fail_stream_requests()
            on_end()
            with self.lock:
                self.state = "stopped" if self.fault is None else "failed"
                self.quiet.notify_all()

    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def reported_state(self) -> State:
        """The state for callers: `torn` instead of `running` if no weights may serve."""
        return "torn" if self.torn is not None and self.state == "running" else self.state

    def check_not_torn(self) -> None:
        """Raise Torn if no weights may serve. While a swap is under way, requests wait for its outcome: the publisher may know it
        before this thread does."""
        if self.torn is not None and self._swapping is None:
            raise Torn(str(self.torn))

    def send_between(self, entry: SleepEntry) -> Future[tuple[SleepStepDone, ...]]:
        """Put an entry on the stream as soon as no step is in flight, and no step after it before all ranks have answered. Any thread."""
        answers: Future[tuple[SleepStepDone, ...]] = Future()
        with self.lock:
            if self.state in ("failed", "stopped"):
                raise RankLost(str(self.fault or "the engine has ended"))
            self._stream_requests.append((entry, answers))
        self.ranks.wake()
        return answers

    def _fail_stream_requests(self) -> None:
        """Fail the open stream requests: no rank will answer any more."""
        with self.lock:
            left = [*([] if self._stream_request is None else [self._stream_request]), *self._stream_requests]
            self._stream_requests.clear()
            self._stream_request = None
        for _, answers in left:
            answers.set_exception(RankLost(str(self.fault or "the engine was stopped")))

    def pause_settled(self) -> bool:
        """Whether a pause is in effect, or never will be."""
        there = self.scheduler.pausing == "paused" and not self.scheduler.in_flight and not self.cancelled
        return there or self.state in ("failed", "stopped")

    def _turn(self) -> bool:
        """End requests, send what can be sent, wait, take answers. False when the engine is to end."""
        self._end_requests()
        with self.lock:
            if self.closing:
                return False
            self._send()
        for answers in self.ranks.wait():
            self._take(answers)
        return True

    def _send(self) -> None:
        """Send what can be sent now. A decision goes before the next step; until its outcome is known, only steps follow it that are the
        same under either outcome."""
        if (
            self._stream_requests
            and self._stream_request is None
            and self._swapping is None
            and not self.scheduler.in_flight
        ):
            self._stream_request = self._stream_requests.popleft()
            self.ranks.send(self._stream_request[0])
        if self._stream_requests or self._stream_request is not None:
            return
        if self._swapping is None:
            self._swapping = self._inbox.take()
            if self._swapping is not None:
                decision = self._swapping
                self.ranks.send(Swap(decision.epoch, decision.undo, decision.timeout_s))
        crossing = self._swapping is not None
        if crossing and (self._in_place or self._policy() != "reuse"):
            return
        while self.scheduler.in_flight < self._depth:
            step = self.scheduler.schedule(crossing=crossing)
            if step is None:
                return
            self.ranks.send(step)

    def _end_requests(self) -> None:
        """End cancelled requests, or all. On this thread, so that every piece of an answer comes from one thread, in order."""
        with self.lock:
            deliveries = self.scheduler.end_all() if self.closing else []
            for request in self.cancelled:
                deliveries += self.scheduler.end(request)
            self.cancelled.clear()
            self.quiet.notify_all()
        _deliver(deliveries)

    def _take(self, answers: tuple[Done, ...]) -> None:
        first = answers[0]
        weights = {answer.weights for answer in answers}
        if len(weights) > 1:
            raise RankLost(f"the ranks hold {len(weights)} versions: {', '.join(sorted(weights))}")
        with self.lock:
            match first:
                case StepDone(number=number, rows=rows):
                    deliveries = self.scheduler.done(number, first.weights, rows)
                case SwapDone(torn=None):
                    deliveries, self.torn = self._swapped(first.weights), None
                    deliveries += self.scheduler.end_unmet(self.served())
                case SwapDone(torn=cause):
                    deliveries, self.torn, self._swapping = self.scheduler.end_all(), Torn(cause), None
                    self.scheduler.pool.forget()
                case SleepStepDone():
                    deliveries, stream_request, self._stream_request = [], self._stream_request, None
            self.quiet.notify_all()
        _deliver(deliveries)
        if isinstance(first, SleepStepDone) and stream_request is not None:
            stream_request[1].set_result(
                tuple(answer for answer in answers if isinstance(answer, SleepStepDone))
            )
        if self.torn is not None and not self._outlives_torn:
            raise self.torn

    def _swapped(self, weights: str) -> Deliveries:
        """All ranks know the outcome: the next step may go. Requests are affected only if the content of the weights changed."""
        policy, self._swapping = self._policy(), None
        if content_of(weights) == content_of(self.scheduler.weights):
            self.scheduler.weights = weights  # at most another name: keys and values are of the same content
            return []
        return self.scheduler.change(weights, policy)

    def _policy(self) -> KvPolicy:
        """The KV policy of the swap under way."""
        asked = None if self._swapping is None else self._swapping.kv_policy
        return self._kv_policy if asked is None else asked

    def _fail(self, error: LiveWeightError) -> None:
        with self.lock:
            self.fault, self.state = error, "failed"
            deliveries = self.scheduler.fail(error)
            callbacks, self.on_failure = self.on_failure, []
            self.quiet.notify_all()
        _deliver(deliveries)
        for callback in callbacks:
            callback(error)


def _deliver(deliveries: Deliveries) -> None:
    for sink, delta in deliveries:
        sink(delta)
