"""Generation requests: from the body of an HTTP request to requests to the engine (token ids, sampling), one per choice.

Owns defaults and the limits that depend on the model. Ranges of single fields are request_types'.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from liveweight.engine.serving.requests import Sampling
from liveweight.server.engine_port import EnginePort
from liveweight.server.errors import BadRequest, UnknownModel
from liveweight.server.openai.request_types import ChatRequest, CompletionRequest, GenerateRequest
from liveweight.spec.version_demand import VersionDemand

COMPLETION_TOKENS = 16
_LONG_TEXT = 2_000  # characters from which on tokenising leaves the event loop: about a millisecond
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request to the engine."""

    prompt: Sequence[int]
    sampling: Sampling
    demand: VersionDemand | None = None


async def completion_requests(body: CompletionRequest, engine: EnginePort) -> list[EngineRequest]:
    """The engine requests of `/v1/completions`, those of one prompt together. BadRequest or UnknownModel if it cannot be answered."""
    _check(body, engine)
    _check_count(body, len(body.prompt), engine)
    prompts = [await _ids(prompt, engine) for prompt in body.prompt]
    if body.max_tokens is None:
        wanted = [min(COMPLETION_TOKENS, max(1, engine.context - len(prompt))) for prompt in prompts]
    else:
        wanted = [body.max_tokens for _ in prompts]
    return _requests(body, engine, "prompt", prompts, wanted, body.logprobs)


async def chat_requests(body: ChatRequest, engine: EnginePort) -> list[EngineRequest]:
    """The engine requests of `/v1/chat/completions`. BadRequest, RequestInvalid or UnknownModel if it cannot be answered."""
    _check(body, engine)
    _check_count(body, 1, engine)
    messages = [message.plain() for message in body.messages]
    size = sum(len(message["content"]) for message in messages)
    prompt = await _encode(size, lambda: engine.tokenizer.encode_chat(messages, body.chat_template_kwargs))
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    wanted = max(1, engine.context - len(prompt)) if given is None else given
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(body, engine, "messages", [prompt], [wanted], logprobs)


def _check(body: GenerateRequest, engine: EnginePort) -> None:
    """Refuse what is not served here: another model, other weights, experts."""
    if body.model is not None and body.model != engine.name:
        raise UnknownModel(f"no model {body.model!r} here, only {engine.name!r}", param="model")
    engine.check_demand(body.demand)
    if body.return_routed_experts and engine.spec.sparse_layers == 0:
        raise BadRequest("this model has no experts to route to", param="return_routed_experts")


def _check_count(body: GenerateRequest, prompts: int, engine: EnginePort) -> None:
    """Refuse what the engine could never take at once, before anything is tokenised or submitted."""
    config, answers = engine.config, prompts * body.choices
    room = config.max_running + config.max_waiting
    if answers > room:
        raise BadRequest(
            f"{prompts} prompts with {body.choices} answers each are {answers} answers, and this engine takes {room} at once "
            f"({config.max_running} that run and {config.max_waiting} that wait): send fewer, or raise --max-waiting",
            param="n" if prompts <= room else "prompt",
        )


async def _ids(prompt: str | list[int], engine: EnginePort) -> list[int]:
    if isinstance(prompt, str):
        return await _encode(len(prompt), lambda: engine.tokenizer.encode(prompt))
    outside = next((token for token in prompt if token >= engine.vocab), None)
    if outside is not None:
        raise BadRequest(f"token id {outside} is not below the vocabulary's {engine.vocab}", param="prompt")
    return prompt


async def _encode(size: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if size < _LONG_TEXT else await asyncio.to_thread(work)


def _requests(
    body: GenerateRequest,
    engine: EnginePort,
    param: str,
    prompts: Sequence[list[int]],
    wanted: Sequence[int],
    logprobs: int | None,
) -> list[EngineRequest]:
    """Every prompt as often as there are choices.

    Choice k of a prompt has the request's seed plus k, whatever prompts stand beside it. Without a seed every choice of every prompt
    draws one of its own, so equal prompts have different answers.
    """
    for prompt, tokens in zip(prompts, wanted, strict=True):
        _check_length(len(prompt), tokens, engine.context, param)
    return [
        EngineRequest(
            prompt=prompt,
            sampling=_sampling(body, tokens, _seed(body, choice), logprobs),
            demand=body.demand,
        )
        for prompt, tokens in zip(prompts, wanted, strict=True)
        for choice in range(body.choices)
    ]


def _seed(body: GenerateRequest, choice: int) -> int:
    return secrets.randbits(64) if body.seed is None else (body.seed + choice) % _SEEDS


def _check_length(prompt: int, wanted: int, context: int, param: str) -> None:
    if prompt == 0:
        raise BadRequest("the prompt has no tokens", param=param)
    if prompt + wanted > context:
        raise BadRequest(
            f"{prompt} tokens of prompt and {wanted} of answer are more than the context of {context}",
            param=param if prompt >= context else "max_tokens",
            code="context_length_exceeded",
        )


def _sampling(body: GenerateRequest, max_tokens: int, seed: int, logprobs: int | None) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=0.0 if body.min_p is None else body.min_p,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=seed,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logprobs_mode=body.logprobs_mode,
        routing=bool(body.return_routed_experts),
    )
