"""Which weights an answer's tokens came from, and whether those weights would have drawn them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from liveweight.engine.engine import Engine
from liveweight.errors import LiveWeightError
from tests.support.engine.engines import WITHIN_S, Answer, Logits, ask, first_difference, greedy

Asked = tuple[list[int], Answer]


def spans(answer: Answer) -> list[tuple[int, int, str]]:
    """The runs of tokens that came from the same weights: first, end, weights."""
    found: list[tuple[int, int, str]] = []
    for index, token in enumerate(answer.tokens):
        if found and found[-1][2] == token.weights:
            found[-1] = (found[-1][0], index + 1, token.weights)
        else:
            found.append((index, index + 1, token.weights))
    return found


def mixtures(asked: Sequence[Asked], logits: Callable[[str], Logits]) -> list[str]:
    """Tokens that their own version would not have drawn, given all tokens before them."""
    wrong = []
    for prompt, answer in asked:
        for first, end, weights in spans(answer):
            difference = first_difference(
                logits(weights), [*prompt, *answer.ids[:first]], answer.ids[first:end]
            )
            if difference is not None:
                wrong.append(f"{prompt} under {weights} from {first}: {difference}")
    return wrong


class Clients:
    """Threads that ask one request after the other, until stopped or the engine fails; every answer is kept."""

    def __init__(self, engine: Engine, count: int, tokens: int) -> None:
        self._engine, self._tokens, self._stop = engine, tokens, threading.Event()
        self.answers: list[Asked] = []
        self.began = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            prompt = [4 + number, 20 + turn % 50, 30, 31 + number]
            try:
                answer = ask(self._engine, prompt, greedy(self._tokens))
            except LiveWeightError:
                return
            self.answers.append((prompt, answer))
            answer.piece()
            self.began.release()
            answer.wait()
            turn += 1

    def went_on(self) -> None:
        """Wait until another request has begun to be answered."""
        while self.began.acquire(blocking=False):
            continue
        assert self.began.acquire(timeout=WITHIN_S)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.began.acquire(timeout=WITHIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
