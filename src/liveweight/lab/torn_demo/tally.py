"""The tally of the torn demo: answers go in as clients finish them, and are replayed one after the other, in a thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from liveweight.lab.replay_thread import Replaying
from liveweight.lab.torn_demo.clients import Answer
from liveweight.lab.torn_demo.judge import Counts, Judge, Kind

OnJudged = Callable[[str, Answer, Sequence[Kind]], None]
"""(side, answer, the kinds of its tokens)."""


class Tally(Replaying[tuple[str, Answer]]):
    """Counts by side and part of answers that have all their tokens."""

    def __init__(self, judge: Judge, on_judged: OnJudged) -> None:
        super().__init__(self._count)
        self.counts: defaultdict[tuple[str, int], Counts] = defaultdict(Counts)
        self._kinds, self._on_judged = judge.kinds, on_judged

    def _count(self, item: tuple[str, Answer]) -> None:
        side, answer = item
        kinds = self._kinds(answer.prompt, answer.tokens)
        self.counts[side, answer.mark] += Counts.of(kinds)
        self._on_judged(side, answer, kinds)
