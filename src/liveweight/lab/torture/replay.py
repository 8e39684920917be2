"""The replay: every token that clients were sent, drawn again by the version that it says it came from.

A token is torn if its version would not have drawn it, given all tokens before it; where the engine does not say, if none would have.
Where only an answer says which versions served it, one after the other, those tokens are torn that no such order explains.
Logits so near that rounding decides are no evidence, and count for the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from liveweight.lab.replay_thread import ReplayThread
from liveweight.lab.torn_demo.judge import drawable, loaded, logits

BACKLOG = 64


@dataclass(slots=True)
class ReplayAnswer:
    """A prompt, what came after it, and what each token says of its weights: `LABEL@DIGEST`. Or, of the whole answer, `served`: the
    contents that may have served it, in their order."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    served: tuple[int, ...] = ()


class PublishedContents:
    """The contents that are published in turn, and which of them a label has: that of its number. The engine starts on the first."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)

    def of_label(self, label: int) -> int:
        """The number of its content."""
        return label % len(self.directories)

    def of_weights(self, weights: str) -> int:
        """Of what a token says."""
        label = weights.rpartition("@")[0]
        return 0 if label == "initial" else self.of_label(int(label))

    def between(self, first: str, last: str, *, since: int) -> tuple[int, ...]:
        """The contents that may have served, in their order, where this was said to serve at first and that at last. An engine that was
        started after the label `since` says something that is no label until the next one serves."""
        start, end = (int(said) if said.isdigit() else since for said in (first, last))
        begun = 0 if start == since else self.of_label(start)
        return (begun, *(self.of_label(label) for label in range(start + 1, end + 1)))


class Replay(ReplayThread[ReplayAnswer]):
    """Counts tokens, and those of them that are torn."""

    def __init__(self, versions: PublishedContents, *, attributed: bool) -> None:
        super().__init__(self._count, backlog=BACKLOG)
        self.tokens = self.torn = 0
        self._versions, self._attributed = versions, attributed
        self._models = [loaded(directory) for directory in versions.directories]

    def _count(self, answer: ReplayAnswer) -> None:
        if not answer.tokens:
            return
        self.tokens += len(answer.tokens)
        if not self._attributed:
            drawn = self._drawn(answer, range(len(self._models)))
            self.torn += sum(not any(of[at] for of in drawn.values()) for at in range(len(answer.tokens)))
        elif answer.served:
            drawn = self._drawn(answer, answer.served)
            self.torn += torn_in_order([drawn[number] for number in answer.served])
        else:
            numbers = [self._versions.of_weights(weights) for weights in answer.weights]
            drawn = self._drawn(answer, numbers)
            self.torn += sum(not drawn[number][at] for at, number in enumerate(numbers))

    def _drawn(self, answer: ReplayAnswer, contents: Iterable[int]) -> dict[int, list[bool]]:
        """By content, whether it would have drawn each of the tokens."""
        whole = [*answer.prompt, *answer.tokens]
        tables = {
            number: logits(self._models[number], whole)[len(answer.prompt) - 1 : -1]
            for number in set(contents)
        }
        return {number: drawable(table, answer.tokens) for number, table in tables.items()}


def torn_in_order(drawn: Sequence[Sequence[bool]]) -> int:
    """How many tokens are left unexplained by versions that followed each other, whenever that was. A row for each, in their order: whether
    it would have drawn each token."""
    fewest = [0] * len(drawn)
    for by in zip(*drawn, strict=True):
        before = itertools.accumulate(fewest, min)
        fewest = [least + (not explained) for least, explained in zip(before, by, strict=True)]
    return min(fewest)
