"""One request inside the engine: its tokens, its pages, its progress, and the text that its client has not received yet.

A sequence lives on the scheduler's thread. Whether it is filling, drawing or waiting follows from its numbers; the scheduler moves it.
"""

from __future__ import annotations

from typing import Protocol

from liveweight.engine.serving.kv_blocks import next_key
from liveweight.engine.serving.requests import Delta, Finish, Sampling, Sink, Token
from liveweight.engine.serving.step_stream import Draw, Drawn
from liveweight.spec.version_demand import VersionDemand


class AnswerText(Protocol):
    """Turns tokens into text, and finds stop strings in it."""

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ended it."""

    def finish(self) -> str:
        """The text that was held back."""


class Sequence:
    """A request. `filled` of `target` tokens are scheduled into the cache; then it draws, `pending` draws being in flight.

    `fresh` until the ranks know its slot; `kept` of its pages are remembered by the pool. `stale` while its pages hold what other
    weights computed; `reused` if that ever was so. `demand` is what the version of its first token must meet.
    """

    __slots__ = (
        "answer_text",
        "blocks",
        "cached",
        "demand",
        "filled",
        "finished",
        "fresh",
        "generated",
        "id",
        "in_flight",
        "kept",
        "keys",
        "pending",
        "prompt_length",
        "reused",
        "routing",
        "sampling",
        "sink",
        "slot",
        "stale",
        "target",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        sink: Sink,
        answer_text: AnswerText,
        demand: VersionDemand | None = None,
    ) -> None:
        self.demand = demand
        self.id, self.sampling, self.sink, self.answer_text = number, sampling, sink, answer_text
        self.tokens, self.prompt_length, self.generated = prompt, len(prompt), 0
        self.slot = -1
        self.blocks: list[int] = []
        self.keys: list[bytes] = []  # of the full pages of `tokens`, as far as they were needed
        self.filled = self.target = self.cached = self.kept = 0
        self.pending = self.in_flight = 0
        self.finished = self.fresh = self.stale = self.reused = False
        self.routing = bytearray()

    @property
    def filling(self) -> bool:
        """Whether tokens that are known are not all scheduled yet."""
        return self.filled < self.target

    def keys_until(self, count: int, root: bytes, block_tokens: int) -> list[bytes]:
        """The keys of the first `count` tokens' full pages."""
        full = count // block_tokens
        while len(self.keys) < full:
            at = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else root
            self.keys.append(next_key(parent, self.tokens[at : at + block_tokens]))
        return self.keys[:full]

    def draw(self) -> Draw:
        """What the ranks must know of its sampling, when they are to fill its tokens."""
        s = self.sampling
        return Draw(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            seen=() if s.repetition_penalty == 1.0 else tuple(dict.fromkeys(self.tokens)),
            seed=s.seed,
            logprobs=s.logprobs,
            logprobs_mode=s.logprobs_mode or "raw_logprobs",
            routing=s.routing,
        )

    def take(self, drawn: Drawn, weights: str, ends: frozenset[int]) -> Delta | None:
        """Add what a step drew; the piece of the answer that follows from it, the last one with its finish."""
        tokens: list[Token] = []
        text: list[str] = []
        finish: Finish | None = None
        for index, token in enumerate(drawn.tokens):
            self.tokens.append(token)
            self.generated += 1
            tokens.append(_token(drawn, index, weights))
            finish = self._add_token(token, ends, text)
            if finish is not None:
                break
        if not tokens:
            self.routing += drawn.routing
            return None
        # What was drawn beyond the end is no part of the answer, and neither are the experts that were chosen for it.
        self.routing += drawn.routing[: len(drawn.routing) * len(tokens) // len(drawn.tokens)]
        if finish is not None:
            return self.ended(finish, tokens=tuple(tokens), text="".join(text))
        return Delta(
            tokens=tuple(tokens), text="".join(text), cached_tokens=self.cached, reused_kv=self.reused
        )

    def ended(self, finish: Finish, *, tokens: tuple[Token, ...] = (), text: str = "") -> Delta:
        """The last piece of the answer."""
        return Delta(
            tokens=tokens,
            text=text,
            finish=finish,
            routing=bytes(self.routing) if self.sampling.routing else None,
            cached_tokens=self.cached,
            reused_kv=self.reused,
        )

    def aborted(self) -> Delta:
        """The last piece of an answer that somebody ends here."""
        return self.ended("abort", text=self.answer_text.finish())

    def _add_token(self, token: int, ends: frozenset[int], text: list[str]) -> Finish | None:
        """Append the text of a token; returns the finish reason if it is the last. A token that ends the answer has no text of its own."""
        sampling = self.sampling
        if token in sampling.stop_token_ids or (token in ends and not sampling.ignore_eos):
            text.append(self.answer_text.finish())
            return "stop"
        more, stopped = self.answer_text.push(token)
        text.append(more)
        if stopped:
            return "stop"
        if self.generated >= sampling.max_tokens:
            text.append(self.answer_text.finish())
            return "length"
        return None


def _token(drawn: Drawn, index: int, weights: str) -> Token:
    if not drawn.logprobs:
        return Token(id=drawn.tokens[index], weights=weights)
    return Token(
        id=drawn.tokens[index],
        weights=weights,
        logprob=drawn.logprobs[index],
        top=drawn.top[index] if drawn.top else (),
    )
