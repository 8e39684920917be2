"""Choosing tokens: from logits and each row's settings to ids and logprobs. The same on every rank, and whatever else is in the batch.

A row uses one number between 0 and 1, which follows from its seed and the position of the token. So a request draws the same tokens
alone or in company, after being taken back and filled again, and with or without a draft.

The order is vLLM's: repetition penalty, temperature, min_p, top_k, top_p. Raw logprobs are of the model's own distribution, before all of
them. Processed logprobs are of the one that the token was drawn from, normalised again. A greedy row (temperature 0) has the penalty only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from liveweight.engine.serving.step_stream import Draw

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_SHORTLIST = 256
_LARGEST = 3e38


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


def sample(
    raw: torch.Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    seen: Sequence[NDArray[np.int64] | None],
) -> list[SampledToken]:
    """One choice per row of the model's logits [rows, vocab], float32; `positions` are those of the tokens to choose.

    `seen` has the tokens before each of them, for rows with a repetition penalty.
    """
    logits = _penalised(raw, draws, seen)
    choices = [SampledToken(token=token) for token in logits.argmax(dim=-1).tolist()]
    warm = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    whole = [row for row in warm if not _cuts(draws[row])]
    if whole:
        for row, choice in zip(whole, _from_all(logits, draws, positions, whole), strict=True):
            choices[row] = choice
    for row in sorted(set(warm) - set(whole)):
        number = uniform(draws[row].seed, positions[row])
        choices[row] = _from_best(logits[row], draws[row], number, choices[row].token)
    for row, draw in enumerate(draws):
        if draw.logprobs is None:
            continue
        if draw.logprobs_mode == "raw_logprobs":
            choices[row] = _with_logprobs(choices[row].token, raw[row].log_softmax(dim=-1), draw.logprobs)
        elif draw.temperature == 0:
            choices[row] = _with_logprobs(choices[row].token, logits[row].log_softmax(dim=-1), draw.logprobs)
    return choices


def _cuts(draw: Draw) -> bool:
    return draw.top_p < 1.0 or draw.top_k > 0 or draw.min_p > 0.0


def _penalised(
    raw: torch.Tensor, draws: Sequence[Draw], seen: Sequence[NDArray[np.int64] | None]
) -> torch.Tensor:
    """Logits of tokens that were seen: above 0 divided by their row's penalty, below 0 multiplied by it."""
    import torch

    if all(tokens is None for tokens in seen):
        return raw
    logits = raw.clone()
    for row, (draw, tokens) in enumerate(zip(draws, seen, strict=True)):
        if tokens is not None:
            ids = torch.from_numpy(tokens)
            found, penalty = raw[row, ids].double(), draw.repetition_penalty
            found = torch.where(found > 0, found / penalty, found * penalty)
            logits[row, ids] = found.clamp_(
                -_LARGEST, _LARGEST
            ).float()  # a penalty far from 1 must not make infinity
    return logits


def _from_all(
    logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int], rows: Sequence[int]
) -> list[SampledToken]:
    """Rows that draw from the whole distribution, together; with their logprobs, if these are processed ones."""
    import torch

    scaled = _scaled(logits[list(rows)], [draws[row].temperature for row in rows])
    mass = torch.softmax(scaled, dim=-1).cumsum_(dim=-1)
    numbers = torch.tensor([[uniform(draws[row].seed, positions[row])] for row in rows], dtype=torch.float64)
    choices = []
    for at, (row, token) in enumerate(zip(rows, _decided(mass, numbers).squeeze(1).tolist(), strict=True)):
        draw = draws[row]
        if draw.logprobs is None or draw.logprobs_mode == "raw_logprobs":
            choices.append(SampledToken(token=token))
        else:
            choices.append(_with_logprobs(token, scaled[at].log_softmax(dim=-1), draw.logprobs))
    return choices


def _from_best(logits: torch.Tensor, draw: Draw, number: float, likeliest: int) -> SampledToken:
    """A row that draws from the most likely tokens only; with its logprobs, if these are processed ones."""
    import torch

    count = None if draw.logprobs_mode == "raw_logprobs" else draw.logprobs
    if draw.top_k == 1:
        if count is None:
            return SampledToken(token=likeliest)
        return SampledToken(token=likeliest, logprob=0.0, top=((likeliest, 0.0),) if count else ())
    best, ids = _best(_scaled(logits.unsqueeze(0), [draw.temperature])[0], draw)
    mass = torch.softmax(best, dim=-1).cumsum_(dim=-1)
    index = int(_decided(mass, torch.tensor([number], dtype=torch.float64)))
    if count is None:
        return SampledToken(token=int(ids[index]))
    logprobs = best.log_softmax(dim=-1)
    top = _possible(ids[:count], logprobs[:count])
    return SampledToken(token=int(ids[index]), logprob=float(logprobs[index]), top=top)


def _best(scaled: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cuts leave of a row, the likeliest first, and its ids. A short list is enough, if it holds all of them."""
    import torch

    left = scaled.shape[-1]
    if draw.min_p > 0.0:  # before the others, as in vLLM; the largest is 0
        below = scaled < math.log(
            draw.min_p
        )  # never true of what is no number: such a row keeps all its tokens
        scaled, left = scaled.masked_fill(below, -math.inf), left - int(below.sum())
    if draw.top_p >= 1.0:
        best, ids = torch.topk(scaled, min(draw.top_k or left, left))
        return best, ids
    total = torch.logsumexp(scaled, dim=-1)
    count = min(draw.top_k or _SHORTLIST, left)
    while True:
        best, ids = torch.topk(scaled, count)
        mass = torch.exp(best - total).cumsum_(dim=-1)
        if draw.top_k or count == left or float(mass[-1]) >= draw.top_p:
            break
        count = min(count * 8, left)
    limit = draw.top_p * float(mass[-1]) if draw.top_k else draw.top_p
    kept = min(int((mass < limit).sum()) + 1, count)
    return best[:kept], ids[:kept]


def _scaled(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Rows in float64, divided by their temperatures. The largest of a row becomes 0 first, so that none overflows."""
    import torch

    heat = torch.tensor(temperatures, dtype=torch.float64).unsqueeze(1)
    return logits.double().sub_(logits.amax(dim=-1, keepdim=True)).div_(heat)


def _decided(mass: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where cumulative mass first exceeds that share of its end. A token without mass is never chosen, also where rounding would
    reach the end."""
    import torch

    end = mass[..., -1:].contiguous()
    found = torch.searchsorted(mass, torch.minimum(numbers * end, torch.nextafter(end, -end)), right=True)
    return found.clamp_(max=mass.shape[-1] - 1)  # logits that are no numbers have no place


def _with_logprobs(token: int, logprobs: torch.Tensor, count: int) -> SampledToken:
    """The token with its logprob, and the `count` likeliest of the row."""
    if not count:
        return SampledToken(token=token, logprob=float(logprobs[token]))
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    return SampledToken(token=token, logprob=float(logprobs[token]), top=_possible(best.indices, best.values))


def _possible(ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[tuple[int, float], ...]:
    """Alternatives as values, without those of probability 0."""
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in pairs if logprob != -math.inf)
