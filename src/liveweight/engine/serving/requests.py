"""Requests to the engine and their answers: sampling, tokens, pieces of an answer. Values only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from liveweight.errors import LiveWeightError, RequestInvalid

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why an answer ended: a stop token or string; its length; somebody ended it, with the tokens it had."""
LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]
"""Of which distribution logprobs are: the model's own, or the one that the token was drawn from. The words are vLLM's."""
MAX_LOGPROBS = 20
_SEEDS = 1 << 64


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to end. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave the distribution whole.

    The token at a position depends on the request's own tokens and on `seed`, never on what else runs.
    `logprobs` counts the alternatives reported per token, 0 for the chosen one alone, None for no logprobs. `logprobs_mode` None is the
    engine's own. `repetition_penalty` is of tokens that the prompt or the answer has already; 1 is none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    routing: bool = False

    def __post_init__(self) -> None:
        checks = {
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be between 0 and 100": 0.0 <= self.temperature <= 100.0,
            "top_p must be above 0 and at most 1": 0.0 < self.top_p <= 1.0,
            "top_k must not be negative": self.top_k >= 0,
            "min_p must be between 0 and 1": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty must be above 0, and finite": 0.0 < self.repetition_penalty < math.inf,
            f"seed must be between 0 and {_SEEDS - 1}": 0 <= self.seed < _SEEDS,
            "a stop string must not be empty": all(self.stop),
            f"logprobs must be between 0 and {MAX_LOGPROBS}": self.logprobs is None
            or 0 <= self.logprobs <= MAX_LOGPROBS,
        }
        for rule, holds in checks.items():
            if not holds:
                raise RequestInvalid(rule)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token: under which weights, and, if asked for, its logprob and the most likely alternatives (id, logprob)."""

    id: int
    weights: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer. The last one has a `finish` or a `fault`; `text` may lag behind the tokens until then.

    `routing`, with the last piece if asked for: the experts of every token that went through the model, which is all but the last
    one: [tokens, MoE layers, experts per token], uint16, little-endian, row-major. `reused_kv`: after a commit some tokens were drawn over
    keys and values that other weights had computed.
    """

    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: Finish | None = None
    fault: LiveWeightError | None = None
    routing: bytes | None = None
    cached_tokens: int = 0
    reused_kv: bool = False

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.fault is not None


Sink: TypeAlias = Callable[[Delta], None]
"""Takes the pieces of one answer, in order, on the engine's thread: it must hand them on at once and never raise."""
