"""The replay: every token that clients were sent, drawn again by the version that it says it came from.

A token is torn if its version would not have drawn it, given all tokens before it; where the engine does not say, if none would have.
Logits so near that rounding decides are no evidence, and count for the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from liveweight.bench.torn_judge import drawable, loaded, logits
from liveweight.errors import LiveWeightError
from liveweight.spec.deadline import Deadline

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


class Replay:
    """Counts. `put` is for any thread, and waits while too many answers are behind; the replaying ends with the `with`."""

    def __init__(self, versions: Versions, *, attributed: bool) -> None:
        self.tokens = self.torn = 0
        self._versions, self._attributed = versions, attributed
        self._models = [loaded(directory) for directory in versions.directories]
        self._answers: queue.Queue[Answer | None] = queue.Queue(BACKLOG)
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def put(self, answer: Answer) -> None:
        """An answer that nothing is added to any more."""
        self._answers.put(answer)

    def finish(self, deadline: Deadline) -> None:
        """Everything that was put is counted on return."""
        self._answers.put(None)
        self._thread.join(deadline.remaining_s())
        if self._fault is not None:
            raise LiveWeightError(f"replaying failed: {self._fault}") from self._fault
        if self._thread.is_alive():
            raise deadline.exceeded("every answer to be replayed")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread is daemonic, and whoever left by an error does not wait for what is behind."""

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            if self._fault is None and answer.tokens:
                try:
                    self._count(answer)
                except Exception as error:  # told by `finish`
                    self._fault = error

    def _count(self, answer: Answer) -> None:
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
