"""The engine loop: the engine's thread, which sends steps, takes results and hands the pieces of answers on.

With overlap there is always one step more on its way than the ranks are working on, so that they never wait for this thread. Without
requests it waits and does nothing else. What other threads want of the scheduler they do under the lock, or leave for the next turn.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from liveweight.engine.serving.rank_processes import Done, RankProcesses
from liveweight.engine.serving.scheduler import Said, Scheduler
from liveweight.engine.serving.step_stream import Nap, SleepStepDone, StepDone, Swap, SwapDone, content_of
from liveweight.engine.status import State
from liveweight.engine.updates.live_updates import DecisionInbox
from liveweight.errors import LiveWeightError, RankLost, Torn
from liveweight.rounds.boundary import Decision
from liveweight.wire.messages.values import KvPolicy

OnFailure: TypeAlias = Callable[[LiveWeightError], None]
Errand: TypeAlias = tuple[Nap, "Future[tuple[SleepStepDone, ...]]"]
"""An entry that somebody wants on the stream between two steps, and the ranks' answers."""


class EngineLoop:
    """One engine's thread. `lock` guards the scheduler and what is said here in public; `quiet` is notified after every change."""

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
    ) -> None:
        """`in_place`: a swap may leave the ranks torn, and no step may follow it before its outcome is known. `outlives_torn`: the
        engine waits then for a round that heals it; else it fails, for others to take its place."""
        self.scheduler, self.ranks = scheduler, ranks
        self._in_place, self._outlives_torn = in_place, outlives_torn
        self.torn: Torn | None = None
        """Why there are no weights that may serve, if that is so."""
        self._inbox, self._depth, self._kv_policy = inbox, depth, kv_policy
        self.lock = threading.Lock()
        self.quiet = threading.Condition(self.lock)
        self.state: State = "running"
        self.fault: LiveWeightError | None = None
        self.closing = False
        self.cancelled: list[int] = []
        self.on_failure: list[OnFailure] = []
        self._swapping: Decision | None = None
        self._stream_requests: deque[Errand] = deque()
        self._stream_request: Errand | None = None

    def run(self, finished: Callable[[], None]) -> None:
        """Until `closing`, or until a rank is lost. `finished` lets go of what the engine holds beside the ranks."""
        try:
            while self._turn():
                pass
        except LiveWeightError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours must end requests, not leave them waiting
            logging.getLogger("liveweight").exception("the engine's thread failed")
            self._fail(LiveWeightError(f"{type(error).__name__}: {error}"))
        finally:
            self.ranks.close(at_once=self.fault is not None)
            self._leave_stream_requests()
            finished()
            with self.lock:
                self.state = "stopped" if self.fault is None else "failed"
                self.quiet.notify_all()

    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def word(self) -> State:
        """How the engine is."""
        return "torn" if self.torn is not None and self.state == "running" else self.state

    def check_whole(self) -> None:
        """Raise Torn where there are no weights that may serve. While a round is about to bring some, requests wait for its outcome: its
        publisher may hear of it before we do."""
        if self.torn is not None and self._swapping is None:
            raise Torn(str(self.torn))

    def send_between(self, entry: Nap) -> Future[tuple[SleepStepDone, ...]]:
        """Put an entry on the stream as soon as no step is in flight, and no step after it before all ranks have answered. Any thread."""
        answers: Future[tuple[SleepStepDone, ...]] = Future()
        with self.lock:
            if self.state in ("failed", "stopped"):
                raise RankLost(str(self.fault or "the engine has ended"))
            self._stream_requests.append((entry, answers))
        self.ranks.wake()
        return answers

    def _leave_stream_requests(self) -> None:
        """Nobody will answer any more."""
        with self.lock:
            left = [*([] if self._stream_request is None else [self._stream_request]), *self._stream_requests]
            self._stream_requests.clear()
            self._stream_request = None
        for _, answers in left:
            answers.set_exception(RankLost(str(self.fault or "the engine was stopped")))

    def still(self) -> bool:
        """Whether a pause has come into effect, or never will."""
        there = self.scheduler.pausing == "paused" and not self.scheduler.in_flight and not self.cancelled
        return there or self.state in ("failed", "stopped")

    def _turn(self) -> bool:
        """End what is to be ended, send what can be sent, wait, take what came. False when the engine is to end."""
        self._end_some()
        with self.lock:
            if self.closing:
                return False
            self._send()
        for answers in self.ranks.wait():
            self._take(answers)
        return True

    def _send(self) -> None:
        """What can be sent now. A decision goes before the next step; until its outcome is known, only steps follow it that are the same
        whatever it is."""
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

    def _end_some(self) -> None:
        """Requests that were cancelled, or all. Here, so that every piece of an answer comes from one thread, in order."""
        with self.lock:
            said = self.scheduler.end_all() if self.closing else []
            for request in self.cancelled:
                said += self.scheduler.end(request)
            self.cancelled.clear()
            self.quiet.notify_all()
        _deliver(said)

    def _take(self, answers: tuple[Done, ...]) -> None:
        spoken = answers[0]
        weights = {answer.weights for answer in answers}
        if len(weights) > 1:
            raise RankLost(f"the ranks hold {len(weights)} versions: {', '.join(sorted(weights))}")
        with self.lock:
            match spoken:
                case StepDone(number=number, rows=rows):
                    said = self.scheduler.done(number, spoken.weights, rows)
                case SwapDone(torn=None):
                    said, self.torn = self._swapped(spoken.weights), None
                case SwapDone(torn=cause):
                    said, self.torn, self._swapping = self.scheduler.end_all(), Torn(cause), None
                    self.scheduler.pool.forget()
                case SleepStepDone():
                    said, stream_request, self._stream_request = [], self._stream_request, None
            self.quiet.notify_all()
        _deliver(said)
        if isinstance(spoken, SleepStepDone) and stream_request is not None:
            stream_request[1].set_result(
                tuple(answer for answer in answers if isinstance(answer, SleepStepDone))
            )
        if self.torn is not None and not self._outlives_torn:
            raise self.torn

    def _swapped(self, weights: str) -> Said:
        """All ranks know the outcome: the next step may go. Requests feel it only if the weights are other ones now."""
        policy, self._swapping = self._policy(), None
        if content_of(weights) == content_of(self.scheduler.weights):
            self.scheduler.weights = weights  # at most another name: keys and values are of the same content
            return []
        return self.scheduler.change(weights, policy)

    def _policy(self) -> KvPolicy:
        """What the swap under way means for requests that run."""
        asked = None if self._swapping is None else self._swapping.kv_policy
        return self._kv_policy if asked is None else asked

    def _fail(self, error: LiveWeightError) -> None:
        with self.lock:
            self.fault, self.state = error, "failed"
            said = self.scheduler.fail(error)
            callbacks, self.on_failure = self.on_failure, []
            self.quiet.notify_all()
        _deliver(said)
        for callback in callbacks:
            callback(error)


def _deliver(said: Said) -> None:
    for sink, delta in said:
        sink(delta)
