"""The replay: every token that clients were sent, drawn again by the version that it says it came from.

A token is torn if its version would not have drawn it, given all tokens before it; where the engine does not say, if none would have.
Logits so near that rounding decides are no evidence, and count for the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from liveweight.bench.replaying import Replaying
from liveweight.bench.torn_judge import drawable, loaded, logits

if TYPE_CHECKING:
    import torch

BACKLOG = 64


@dataclass(slots=True)
class Answer:
    """A prompt, what came after it, and what each token says of its weights: `LABEL@DIGEST`."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


class Versions:
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


class Replay(Replaying[Answer]):
    """Counts tokens, and those of them that are torn."""

    def __init__(self, versions: Versions, *, attributed: bool) -> None:
        super().__init__(self._count, backlog=BACKLOG)
        self.tokens = self.torn = 0
        self._versions, self._attributed = versions, attributed
        self._models = [loaded(directory) for directory in versions.directories]

    def _count(self, answer: Answer) -> None:
        if not answer.tokens:
            return
        numbers = [self._versions.of_weights(weights) for weights in answer.weights]
        whole = [*answer.prompt, *answer.tokens]
        asked = set(numbers) if self._attributed else set(range(len(self._models)))
        drawn = {number: drawable(self._table(number, whole, answer), answer.tokens) for number in asked}
        self.tokens += len(numbers)
        if self._attributed:
            self.torn += sum(not drawn[number][at] for at, number in enumerate(numbers))
        else:
            self.torn += sum(not any(of[at] for of in drawn.values()) for at in range(len(numbers)))

    def _table(self, number: int, whole: Sequence[int], answer: Answer) -> torch.Tensor:
        return logits(self._models[number], whole)[len(answer.prompt) - 1 : -1]
