"""The counts of the torn demo: a thread replays answers one after the other, as clients finish them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from liveweight.lab.replay_thread import ReplayThread
from liveweight.lab.torn_demo.clients import ClientAnswer
from liveweight.lab.torn_demo.judge import Kind, TokenCounts, TokenJudge

OnJudged = Callable[[str, ClientAnswer, Sequence[Kind]], None]
"""(side, answer, the kinds of its tokens)."""


class AnswerCounts(ReplayThread[tuple[str, ClientAnswer]]):
    """Counts the tokens of whole answers, by side and part."""

    def __init__(self, judge: TokenJudge, on_judged: OnJudged) -> None:
        super().__init__(self._count)
        self.counts: defaultdict[tuple[str, int], TokenCounts] = defaultdict(TokenCounts)
        self._kinds, self._on_judged = judge.kinds, on_judged

    def _count(self, item: tuple[str, ClientAnswer]) -> None:
        side, answer = item
        kinds = self._kinds(answer.prompt, answer.tokens)
        self.counts[side, answer.mark] += TokenCounts.of(kinds)
        self._on_judged(side, answer, kinds)
