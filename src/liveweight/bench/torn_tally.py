"""The tally of the torn demo: answers go in as clients finish them, and are replayed one after the other, in a thread."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from liveweight.bench.torn_judge import Counts, Judge, Kind
from liveweight.bench.torn_stream import Answer
from liveweight.errors import LiveWeightError
from liveweight.spec.deadline import Deadline

OnJudged = Callable[[str, Answer, Sequence[Kind]], None]
"""(side, answer, the kinds of its tokens)."""


class Tally:
    """Counts by side and part. `put` is for any thread; the replaying ends with the `with`."""

    def __init__(self, judge: Judge, on_judged: OnJudged) -> None:
        self.counts: defaultdict[tuple[str, int], Counts] = defaultdict(Counts)
        self._judge, self._on_judged = judge, on_judged
        self._answers: queue.Queue[tuple[str, Answer] | None] = queue.Queue()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)

    def put(self, side: str, answer: Answer) -> None:
        """An answer that has all its tokens."""
        self._answers.put((side, answer))

    def finish(self, deadline: Deadline) -> None:
        """Everything that was put is counted on return."""
        self._answers.put(None)
        self._thread.join(deadline.remaining_s())
        if self._fault is not None:
            raise LiveWeightError(f"replaying failed: {self._fault}") from self._fault
        if self._thread.is_alive():
            raise deadline.exceeded("the judge to replay every answer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.put(None)  # daemonic, and at most one answer behind

    def _run(self) -> None:
        while (item := self._answers.get()) is not None:
            side, answer = item
            try:
                kinds = self._judge.kinds(answer.prompt, answer.tokens)
                self.counts[side, answer.mark] += Counts.of(kinds)
                self._on_judged(side, answer, kinds)
            except Exception as error:  # told by `finish`
                self._fault = error
                return
