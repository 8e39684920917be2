"""The replay: draws every token that clients received again, under the version that the token names.

A token is torn if its version would not have drawn it, given all tokens before it; if the engine names no version, if no version would
have. If only the whole answer names the versions that served it, in order, those tokens are torn that no such order explains.
Logits so close that rounding decides are no evidence, and count in favour of the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from liveweight.engine.serving.step_stream import parts_of
from liveweight.lab.replay_thread import ReplayThread
from liveweight.lab.torn_demo.judge import drawable, loaded, logits

BACKLOG = 64


@dataclass(slots=True)
class ReplayAnswer:
    """A prompt, the tokens after it, and the weights that each token names: see `weights_text`. Or, for the whole answer, `served`: the
    contents that may have served it, in order."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    served: tuple[int, ...] = ()


class PublishedContents:
    """The contents that are published in turn. A label is a number, which determines its content. The engine starts with the first."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)

    def of_label(self, label: int) -> int:
        """The number of a label's content."""
        return label % len(self.directories)

    def of_weights(self, weights: str) -> int:
        """The number of the content that a token names."""
        label, _, _ = parts_of(weights)
        return 0 if label == "initial" else self.of_label(int(label))

    def between(self, first: str, last: str, *, since: int) -> tuple[int, ...]:
        """The contents that may have served, in order, between the first and the last reported version. An engine that was started after
        the label `since` reports something that is no label until the next one serves."""
        start, end = (int(label) if label.isdigit() else since for label in (first, last))
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
        """For each content, whether it would have drawn each of the tokens."""
        whole = [*answer.prompt, *answer.tokens]
        tables = {
            number: logits(self._models[number], whole)[len(answer.prompt) - 1 : -1]
            for number in set(contents)
        }
        return {number: drawable(table, answer.tokens) for number, table in tables.items()}


def torn_in_order(drawn: Sequence[Sequence[bool]]) -> int:
    """How many tokens remain unexplained by versions that followed each other at any times. `rows`: one per version, in order, whether
    it would have drawn each token."""
    fewest = [0] * len(drawn)
    for by in zip(*drawn, strict=True):
        before = itertools.accumulate(fewest, min)
        fewest = [least + (not explained) for least, explained in zip(before, by, strict=True)]
    return min(fewest)
