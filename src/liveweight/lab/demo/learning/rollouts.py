"""Rollouts: engines answer questions all the time, while the trainer learns from the answers so far.

Owns the threads that send requests, the groups that wait for a step, and the count for the staleness bound. Commits land inside running
requests: nobody waits for requests to end.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from liveweight.errors import ChannelClosed, DeadlineExceeded
from liveweight.lab.demo.learning import samples as reading
from liveweight.lab.demo.learning.rollout_client import Completions
from liveweight.lab.demo.learning.samples import SampleGroup
from liveweight.lab.demo.learning.staleness import StalenessBound
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.lab.demo.stopping import RunStopped, Stop
from liveweight.spec.deadline import Deadline

BATCH_S = 120.0
POLL_S = 1.0
AGAIN_S = 0.1
"""How soon a request to a lost engine is repeated."""


class Endpoint(Protocol):
    """An engine's URL; None while the engine is not running."""

    @property
    def url(self) -> str | None:
        """Its URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How requests are sent: threads per engine, questions per request, answers per question (`group`)."""

    threads: int = 4
    questions: int = 4
    group: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """A step's groups, how many groups were dropped as too old, and how many tokens came since the last step."""

    groups: list[SampleGroup]
    dropped: int
    tokens: int


class Rollouts:
    """Sends requests for the length of the `with`. `take` is for the trainer; `offers` and `serves` are for any thread."""

    def __init__(
        self,
        engines: Sequence[Endpoint],
        task: SortDigits,
        bound: StalenessBound,
        settings: RolloutSettings,
        stop: Stop,
    ) -> None:
        self._task, self._bound, self._settings, self._stop = task, bound, settings, stop
        self._changed = threading.Condition()
        self._groups: deque[SampleGroup] = deque()
        self._requested = self._tokens = self._served = self._offered = 0
        self._ending = False
        self._problem: Exception | None = None
        self._clients: set[Completions] = set()
        self._threads = [
            threading.Thread(target=self._work, args=(engine, f"{settings.seed} {place} {number}"))
            for place, engine in enumerate(engines)
            for number in range(settings.threads)
        ]
        stop.call(self._wake)

    def serves(self, version: int) -> None:
        """All engines serve that version now, or a later one."""
        with self._changed:
            self._served = max(self._served, version)
            self._changed.notify_all()

    def offers(self, version: int) -> None:
        """An engine has begun to read that version."""
        with self._changed:
            self._offered = max(self._offered, version)
            self._changed.notify_all()

    def take(self, count: int, version: int, meanwhile: Callable[[], bool] = lambda: False) -> StepSamples:
        """Wait for `count` groups that are fresh enough for these weights. Drops groups that are too old.

        Calls `meanwhile` regularly while waiting; if it returns True, the deadline starts anew.
        """
        deadline, fresh, dropped = Deadline.after(BATCH_S), list[SampleGroup](), 0
        while True:
            with self._changed:
                while self._groups and len(fresh) < count:
                    group = self._groups.popleft()
                    if self._bound.fresh(group.oldest, version):
                        fresh.append(group)
                    else:
                        dropped += 1
                        self._give_back(1)
                if len(fresh) == count:
                    tokens, self._tokens = self._tokens, 0
                    return StepSamples(groups=fresh, dropped=dropped, tokens=tokens)
                self._wait_for_more(deadline, count - len(fresh))
            if meanwhile():
                deadline = Deadline.after(BATCH_S)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._wake()
        for thread in self._threads:
            thread.join()

    def _wait_for_more(self, deadline: Deadline, missing: int) -> None:
        """Check before waiting: the end of the run and problems are set under the same lock."""
        self._stop.check()
        if self._problem is not None:
            raise self._problem
        if deadline.over:
            raise deadline.exceeded(f"{missing} groups of rollouts")
        self._changed.wait(deadline.within(POLL_S).remaining_s())

    def _wake(self) -> None:
        """Wake all waiting threads; at the end of the run, also those that wait for an engine's answer."""
        with self._changed:
            self._changed.notify_all()
            for client in self._clients if self._ending or self._stop.requested else ():
                client.interrupt()

    def _give_back(self, count: int) -> None:
        """`count` groups will not come: others may be requested in their place."""
        self._requested -= count
        self._changed.notify_all()

    def _work(self, engine: Endpoint, seed: str) -> None:
        chance, client = random.Random(seed), Completions()
        try:
            with self._changed:
                self._clients.add(client)
            while self._await_turn():
                questions = [self._task.question(chance) for _ in range(self._settings.questions)]
                self._request(client, engine.url, questions)
        except RunStopped:
            return
        except Exception as error:  # of any kind: `take` raises it in the trainer
            with self._changed:
                self._problem = error
                self._changed.notify_all()
        finally:
            client.close()

    def _await_turn(self) -> bool:
        """Wait until the bound allows a request. False at the end of the run."""
        with self._changed:
            while not (self._ending or self._stop.requested):
                if self._bound.may_request(
                    self._requested + self._settings.questions - 1, self._served, self._offered
                ):
                    self._requested += self._settings.questions
                    return True
                self._changed.wait()
        return False

    def _request(self, client: Completions, url: str | None, questions: list[str]) -> None:
        """Send one request. If the engine is gone, wait a little: it is being restarted."""
        count, group = len(questions), self._settings.group
        came: list[SampleGroup] = []
        try:
            if url is not None:
                answer = client.complete(url, reading.request(questions, self._task, group=group))
                came = reading.read(answer.body, questions, self._task, group=group, served=answer.served)
        except (ChannelClosed, DeadlineExceeded):
            came = []
        with self._changed:
            self._groups += came
            self._tokens += sum(len(sample.tokens) for one in came for sample in one.samples)
            self._give_back(count - len(came))
        if not came and not self._ending:
            self._stop.wait(AGAIN_S)
