"""Rollouts: engines answer questions all the time, while the trainer learns from what has come.

Owns the threads that ask, the groups that wait for a step, and the count behind the staleness bound. Commits land wherever they land:
nobody waits for requests to end.
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
LOOK_S = 1.0
AGAIN_S = 0.1
"""How soon an engine that was lost is asked again."""


class Endpoint(Protocol):
    """Where an engine is to be asked; None while it is not there."""

    @property
    def url(self) -> str | None:
        """Its URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How questions are asked: so many threads for each engine, so many questions in a request, so many answers to each."""

    threads: int = 4
    questions: int = 4
    group: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """What a step gets: its groups, how many were dropped for it, and how many tokens came since the last time."""

    groups: list[SampleGroup]
    dropped: int
    tokens: int


class Rollouts:
    """Asks while the `with` lasts. `take` is for the trainer; `offers` and `serves` for any thread."""

    def __init__(
        self,
        engines: Sequence[Endpoint],
        task: SortDigits,
        bound: StalenessBound,
        asking: RolloutSettings,
        stop: Stop,
    ) -> None:
        self._task, self._bound, self._asking, self._stop = task, bound, asking, stop
        self._changed = threading.Condition()
        self._groups: deque[SampleGroup] = deque()
        self._asked = self._tokens = self._served = self._offered = 0
        self._ending = False
        self._problem: Exception | None = None
        self._clients: set[Completions] = set()
        self._threads = [
            threading.Thread(target=self._work, args=(engine, f"{asking.seed} {place} {number}"))
            for place, engine in enumerate(engines)
            for number in range(asking.threads)
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
        """So many groups that are fresh enough for these weights; waits for them, and drops what is too old.

        `meanwhile` is called now and then while it waits; if it made something good, the wait begins anew.
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
        """Look before waiting: whoever says that it is over, or what went wrong, does so under the same lock."""
        self._stop.check()
        if self._problem is not None:
            raise self._problem
        if deadline.over:
            raise deadline.exceeded(f"{missing} groups of rollouts")
        self._changed.wait(deadline.within(LOOK_S).remaining_s())

    def _wake(self) -> None:
        """Whoever waits looks again, also those who wait for an engine's answer if it is over."""
        with self._changed:
            self._changed.notify_all()
            for client in self._clients if self._ending or self._stop.said else ():
                client.interrupt()

    def _give_back(self, count: int) -> None:
        """So many groups will not come: others may be asked for in their place."""
        self._asked -= count
        self._changed.notify_all()

    def _work(self, engine: Endpoint, seed: str) -> None:
        chance, client = random.Random(seed), Completions()
        try:
            with self._changed:
                self._clients.add(client)
            while self._may_ask():
                questions = [self._task.question(chance) for _ in range(self._asking.questions)]
                self._ask(client, engine.url, questions)
        except RunStopped:
            return
        except Exception as error:  # whatever it is, the trainer must hear it
            with self._changed:
                self._problem = error
                self._changed.notify_all()
        finally:
            client.close()

    def _may_ask(self) -> bool:
        """Wait until the bound allows a request. False: it is over."""
        with self._changed:
            while not (self._ending or self._stop.said):
                if self._bound.may_ask(self._asked + self._asking.questions - 1, self._served, self._offered):
                    self._asked += self._asking.questions
                    return True
                self._changed.wait()
        return False

    def _ask(self, client: Completions, url: str | None, questions: list[str]) -> None:
        """One request. An engine that is gone is asked again later: somebody is starting it again."""
        count, group = len(questions), self._asking.group
        came: list[SampleGroup] = []
        try:
            if url is not None:
                said = client.ask(url, reading.request(questions, self._task, group=group))
                came = reading.read(said.body, questions, self._task, group=group, served=said.served)
        except (ChannelClosed, DeadlineExceeded):
            came = []
        with self._changed:
            self._groups += came
            self._tokens += sum(len(sample.tokens) for one in came for sample in one.samples)
            self._give_back(count - len(came))
        if not came and not self._ending:
            self._stop.wait(AGAIN_S)
