"""A batch of rollouts: every prompt is asked of some engine of the fleet until it is answered by the version that was published.

Owns which engine is asked, when a prompt is asked again, and when an engine is given up. Bringing a lost engine back to the version is the
caller's `recover`. Runs in the trainer's main process; one batch at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from liveweight.errors import LiveWeightError
from liveweight.integrations.trl.completions import (
    CompletionEndpoint,
    EngineProblem,
    GroupAnswer,
    SamplingFields,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version

CONCURRENT = 32
"""How many prompts one engine is asked at a time; it runs their answers as one batch."""
AGAIN_S = 0.2
AGAIN_MAX_S = 5.0
"""How soon a lost engine is looked after again, at first and at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt, and how many answers to it are wanted."""

    prompt: Sequence[int]
    count: int


@dataclass(slots=True, kw_only=True)
class RolloutCounts:
    """What a batch cost beyond its answers."""

    refused: int = 0
    """Answers, or requests, that were refused because of another version."""
    asked_again: int = 0
    """Prompts that had to be asked again, for whatever reason."""

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for a logger."""
        return {"rollouts/refused": float(self.refused), "rollouts/asked_again": float(self.asked_again)}


def groups_of(prompts: Sequence[Sequence[int]], count: int) -> list[PromptGroup]:
    """Runs of equal prompts, at most `count` long: TRL repeats each prompt as often as it wants answers."""
    groups: list[PromptGroup] = []
    for prompt in prompts:
        if groups and groups[-1].count < count and list(groups[-1].prompt) == list(prompt):
            groups[-1] = PromptGroup(prompt=prompt, count=groups[-1].count + 1)
        else:
            groups.append(PromptGroup(prompt=prompt, count=1))
    return groups


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """Use once: `run` returns the answers in the groups' order, or raises.

    `serving` are the engines, by their place in `endpoints`, that serve the version at the start. `recover` brings engines back to it and
    says which serve it then; it is called in the thread that runs the batch, while the others are asked. Raises DeadlineExceeded, with
    the last problem of every engine, if no engine serves the version for `recover_s`.
    """

    endpoints: Sequence[CompletionEndpoint]
    groups: Sequence[PromptGroup]
    sampling: SamplingFields
    version: Version
    serving: set[int]
    recover: Callable[[], set[int]]
    recover_s: float
    answer_s: float
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: deque[int] = field(default_factory=deque)
    _answers: dict[int, GroupAnswer] = field(default_factory=dict)
    _problems: dict[int, str] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    _running: Counter[int] = field(default_factory=Counter)
    _failure: BaseException | None = None
    _stalled: Deadline | None = None

    def run(self) -> list[GroupAnswer]:
        """All answers, every token of which came from the version."""
        self._waiting.extend(range(len(self.groups)))
        if not self.serving:
            self._stalled = Deadline.after(self.recover_s)
        with self._asking():
            self._look_after_engines()
        if self._failure is not None:
            raise self._failure
        return [self._answers[number] for number in range(len(self.groups))]

    @property
    def _over(self) -> bool:
        return self._failure is not None or len(self._answers) == len(self.groups)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Threads that ask, for the length of the block. An error in the block ends their requests."""
        each = min(CONCURRENT, len(self.groups))
        threads = [
            threading.Thread(target=self._ask, args=(place,), name="liveweight-rollouts", daemon=True)
            for place in range(len(self.endpoints))
            for _ in range(each)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for endpoint in self.endpoints if self._failure is not None else ():
                endpoint.interrupt()
            for thread in threads:
                thread.join()

    def _look_after_engines(self) -> None:
        """Until the batch is over: recover engines that were lost in it, and any engine if none serves."""
        again_s = AGAIN_S
        while True:
            with self._changed:
                if self._over:
                    return
                needed = bool(self._lost) or not self.serving
                if not needed:
                    again_s = AGAIN_S
                    self._changed.wait()
                    continue
                if self._stalled is not None and self._stalled.over and not self.serving:
                    raise self._stalled.exceeded(self._waited_for())
            served = self.recover()
            with self._changed:
                back = served & (self._lost | (set(range(len(self.endpoints))) - self.serving))
                self.serving |= back
                self._lost -= back
                self._changed.notify_all()
                if not self._over and (self._lost or not self.serving):
                    self._changed.wait(again_s)
                    again_s = min(AGAIN_MAX_S, 2 * again_s)

    def _waited_for(self) -> str:
        known = [
            self._problems.get(place, f"{one.url} is behind") for place, one in enumerate(self.endpoints)
        ]
        return f"an engine to serve {self.version}: {'; '.join(known)}"

    def _ask(self, place: int) -> None:
        """One thread of one engine."""
        endpoint = self.endpoints[place]
        while (number := self._next(place)) is not None:
            group = self.groups[number]
            try:
                found = endpoint.complete(
                    group.prompt, group.count, self.sampling, self.version, Deadline.after(self.answer_s)
                )
            except LiveWeightError as error:
                self._fail(error)
                return
            except BaseException as error:  # a defect: the batch must not wait for this thread
                self._fail(error)
                raise
            if isinstance(found, GroupAnswer):
                self._answered(place, number, found)
            else:
                self._again(place, number, found)

    def _next(self, place: int) -> int | None:
        """The next prompt for that engine, once it serves and no other that serves has fewer to answer; None at the end of the batch."""
        with self._changed:
            while not self._over:
                if self._waiting and place in self.serving and self._running[place] == self._fewest():
                    self._running[place] += 1
                    self._changed.notify_all()  # it may be another's turn now
                    return self._waiting.popleft()
                self._changed.wait()
        return None

    def _fewest(self) -> int:
        return min(self._running[place] for place in self.serving)

    def _answered(self, place: int, number: int, answer: GroupAnswer) -> None:
        with self._changed:
            self._running[place] -= 1
            self._answers[number] = answer
            self._stalled = None
            self._changed.notify_all()

    def _again(self, place: int, number: int, problem: EngineProblem) -> None:
        with self._changed:
            self._running[place] -= 1
            self._waiting.appendleft(number)
            self._problems[place] = problem.reason
            self.counts.asked_again += 1
            self.counts.refused += problem.kind == "other_version"
            if problem.kind == "busy":
                self._changed.notify_all()
                self._changed.wait(problem.retry_s)
                return
            self.serving.discard(place)
            self._lost.add(place)
            self._stalled = self._stalled or Deadline.after(self.recover_s)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
