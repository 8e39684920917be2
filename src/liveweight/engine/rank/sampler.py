"""Choosing tokens: from logits and each row's settings to ids and logprobs. The same on every rank, and whatever else is in the batch.

A row uses one number between 0 and 1, which follows from its seed and the position of the token. So a request draws the same tokens
alone or in company, after being taken back and filled again, and with or without a draft. Logprobs are of the model's own
distribution, before temperature and cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liveweight.engine.serving.step_stream import Draw

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_SHORTLIST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One row's token, and its logprob and alternatives (id, logprob) where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """The number between 0 and 1 that decides the token at a position: splitmix64 of both."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)


def sample(logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[SampledToken]:
    """One choice per row of `logits` [rows, vocab], float32; `positions` are those of the tokens to choose."""
    tokens = logits.argmax(dim=-1).tolist()
    warm = [row for row, draw in enumerate(draws) if draw.temperature > 0 and draw.top_k != 1]
    plain = [row for row in warm if draws[row].top_p >= 1.0 and not draws[row].top_k]
    if plain:
        for row, token in zip(plain, _plain(logits, draws, positions, plain), strict=True):
            tokens[row] = token
    for row in set(warm) - set(plain):
        tokens[row] = _cut(logits[row], draws[row], uniform(draws[row].seed, positions[row]))
    if all(draw.logprobs is None for draw in draws):
        return [SampledToken(token=token) for token in tokens]
    return _with_logprobs(logits, tokens, [draw.logprobs for draw in draws])


def _plain(
    logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int], rows: Sequence[int]
) -> list[int]:
    """Rows that draw from the whole distribution, together."""
    import torch

    heat = torch.tensor([draws[row].temperature for row in rows], dtype=torch.float64).unsqueeze(1)
    mass = torch.softmax(logits[list(rows)].double() / heat, dim=-1).cumsum_(dim=-1)
    wanted = torch.tensor([[uniform(draws[row].seed, positions[row])] for row in rows], dtype=torch.float64)
    found = torch.searchsorted(mass, wanted * mass[:, -1:], right=True).squeeze(1)
    return [int(token) for token in found.clamp_(max=logits.shape[-1] - 1).tolist()]


def _cut(logits: torch.Tensor, draw: Draw, wanted: float) -> int:
    """A row that draws from the most likely tokens only. A short list is enough, if it holds all of them."""
    import torch

    scaled = logits.double() / draw.temperature
    total, vocab = torch.logsumexp(scaled, dim=-1), scaled.shape[-1]
    count = min(draw.top_k or _SHORTLIST, vocab)
    while True:
        best, ids = torch.topk(scaled, count)
        mass = torch.exp(best - total).cumsum_(dim=-1)
        if draw.top_k or count == vocab or float(mass[-1]) >= draw.top_p:
            break
        count = min(count * 8, vocab)
    limit = draw.top_p * float(mass[-1]) if draw.top_k else draw.top_p
    kept = min(int((mass < limit).sum()) + 1, count)
    mass = mass[:kept]
    index = int(torch.searchsorted(mass, wanted * mass[-1], right=True))
    return int(ids[min(index, kept - 1)])


def _with_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int | None]
) -> list[SampledToken]:
    choices = []
    for row, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if count is None:
            choices.append(SampledToken(token=token))
            continue
        logprobs = logits[row].log_softmax(dim=-1)
        best = logprobs.topk(min(count, logprobs.shape[-1])) if count else None
        top = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        choices.append(SampledToken(token=token, logprob=float(logprobs[token]), top=top))
    return choices
