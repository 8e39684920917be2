"""The load: clients that send one greedy request after the other and stream the answers, whatever happens to the engine meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from liveweight.engine.serving.requests import Delta, Sampling, Sink
from liveweight.errors import LiveWeightError
from liveweight.lab.torture.replay import ReplayAnswer
from liveweight.spec.deadline import Deadline

AGAIN_S = 0.01
END_S = 30.0


class LoadTarget(Protocol):
    """An engine as clients use it. For any thread."""

    def stream(self, answer: ReplayAnswer, sampling: Sampling, patience_s: float) -> Iterator[int]:
        """Send the answer's prompt, and append tokens to the answer as they arrive. Yields 0 once the request is accepted, then the number
        of tokens that arrived. LiveWeightError if the request failed, TimeoutError if no token came for `patience_s`."""


class Submits(Protocol):
    """An engine of this process."""

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """See Engine."""


class Submitting:
    """An engine of this process as clients use it: its tokens name their version."""

    def __init__(self, engine: Submits) -> None:
        self._engine = engine

    def stream(self, answer: ReplayAnswer, sampling: Sampling, patience_s: float) -> Iterator[int]:
        """See LoadTarget."""
        pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._engine.submit(answer.prompt, sampling, pieces.put)
        yield 0
        while True:
            try:
                piece = pieces.get(timeout=patience_s)
            except queue.Empty:
                raise TimeoutError from None
            answer.tokens += [token.id for token in piece.tokens]
            answer.weights += [token.weights for token in piece.tokens]
            yield len(piece.tokens)
            if piece.fault is not None:
                raise piece.fault
            if piece.last:
                return


class ClientLoad:
    """The clients, for the length of the `with`. `finished` gets every answer, whole or not. No token for `patience_s` is late."""

    def __init__(
        self,
        engine: Callable[[], LoadTarget],
        *,
        clients: int,
        tokens: int,
        patience_s: float,
        finished: Callable[[ReplayAnswer], None],
    ) -> None:
        """`engine` returns the current engine: another may have taken its place."""
        self.late = self.failed = self._arrived = 0
        self._engine, self._finished, self._patience_s = engine, finished, patience_s
        self._sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def went_on(self, deadline: Deadline) -> None:
        """Wait until another token has arrived."""
        with self._changed:
            before = self._arrived
            if not self._changed.wait_for(lambda: self._arrived > before, deadline.remaining_s()):
                raise deadline.exceeded("the engine's next token")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until clients have their answers, or have stopped waiting."""
        self._stopping.set()
        deadline = Deadline.after(self._patience_s + END_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    def _run(self, client: int) -> None:
        number = 0
        while not self._stopping.is_set():
            answer = ReplayAnswer(prompt(client, number))
            if self._run_request(answer):
                number += 1
            else:
                self._stopping.wait(AGAIN_S)
            self._finished(answer)

    def _run_request(self, answer: ReplayAnswer) -> bool:
        """Run one request to its end. False if it was refused or failed."""
        taken = False
        try:
            for came in self._engine().stream(answer, self._sampling, self._patience_s):
                taken = True
                self._note(came)
        except TimeoutError:
            with self._changed:
                self.late += 1
            return False
        except LiveWeightError:
            with self._changed:
                self.failed += taken
            return False
        return True

    def _note(self, came: int) -> None:
        with self._changed:
            self._arrived += came
            self._changed.notify_all()


def prompt(client: int, number: int) -> list[int]:
    """A prompt of token ids that all our vocabularies have."""
    return [4 + (client * 37 + number * 101 + position * 11) % 400 for position in range(8)]
