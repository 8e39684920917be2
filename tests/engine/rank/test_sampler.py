"""Sampling: the distribution that was asked for, the same token whatever else is in the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from liveweight.engine.rank.sampler import SampledToken, uniform
from liveweight.engine.rank.sampler import sample as sample_rows
from liveweight.engine.rank.slots import SeenTokens
from liveweight.engine.serving.requests import LogprobsMode
from liveweight.engine.serving.step_stream import Draw

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    logprobs: int | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> Draw:
    return Draw(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seen=(),
        seed=seed,
        logprobs=logprobs,
        logprobs_mode=logprobs_mode,
        routing=False,
    )


def sample(logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[SampledToken]:
    """Rows without a repetition penalty."""
    return sample_rows(logits, draws, positions, [None] * len(draws))


def frequencies(how: Draw, trials: int = 6_000) -> dict[int, float]:
    rows = LOGITS.expand(trials, -1)
    choices = sample(rows, [how] * trials, range(trials))
    counts = Counter(choice.token for choice in choices)
    return {token: count / trials for token, count in counts.items()}


def expected(how: Draw) -> dict[int, float]:
    """The definition, token by token: temperature, what reaches min_p, the k best, then the smallest set that reaches p."""
    weights = {token: math.exp(float(value) / how.temperature) for token, value in enumerate(LOGITS)}
    weights = {
        token: weight for token, weight in weights.items() if weight >= how.min_p * max(weights.values())
    }
    best = sorted(weights, key=lambda token: -weights[token])[: how.top_k or None]
    total = sum(weights[token] for token in best)
    kept, mass = [], 0.0
    for token in best:
        kept.append(token)
        mass += weights[token] / total
        if how.top_p < 1.0 and mass >= how.top_p - 1e-12:
            break
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.parametrize(
    "how",
    [
        draw(),
        draw(temperature=0.5),
        draw(temperature=3.0),
        draw(top_k=2),
        draw(top_p=0.7),
        draw(top_p=0.9, top_k=3, temperature=2.0),
        draw(top_p=0.01),
        draw(top_k=100),
        draw(min_p=0.3),
        draw(min_p=0.2, temperature=2.0, top_k=3),
        draw(min_p=0.2, top_p=0.75),
        draw(min_p=1.0),
    ],
    ids=str,
)
def test_tokens_come_with_the_frequency_that_was_asked_for(how: Draw) -> None:
    seen, wanted = frequencies(how), expected(how)
    assert set(seen) <= set(wanted)
    for token, probability in wanted.items():
        spread = 5 * math.sqrt(probability * (1 - probability) / 6_000)
        assert seen.get(token, 0.0) == pytest.approx(probability, abs=spread + 1e-9)


@pytest.mark.parametrize("how", [draw(temperature=0.0), draw(top_k=1)], ids=str)
def test_greedy_takes_the_best(how: Draw) -> None:
    assert frequencies(how, 10) == {0: 1.0}


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    torch.manual_seed(5)
    logits = torch.randn(40, 1000)
    hows = [
        draw(seed=row, temperature=1.3, top_p=0.8 if row % 3 else 1.0, top_k=row % 2 * 50)
        for row in range(40)
    ]
    positions = [7 * row for row in range(40)]
    together = [choice.token for choice in sample(logits, hows, positions)]
    alone = [sample(logits[r : r + 1], [hows[r]], [positions[r]])[0].token for r in range(40)]
    assert together == alone


def test_a_short_list_that_is_too_short_is_made_longer() -> None:
    flat = torch.zeros(1, 50_000)
    tokens = {sample(flat, [draw(top_p=0.999)], [position])[0].token for position in range(200)}
    assert len(tokens) > 150


def test_logprobs_are_of_the_model_and_only_where_asked_for() -> None:
    rows = LOGITS.expand(3, -1)
    first, second, third = sample(
        rows, [draw(logprobs=2, temperature=0.3), draw(), draw(logprobs=0)], [1, 2, 3]
    )
    logprobs = LOGITS.log_softmax(-1)
    assert first.logprob == pytest.approx(float(logprobs[first.token]), abs=1e-6)
    assert [token for token, _ in first.top] == [0, 1]
    assert [value for _, value in first.top] == pytest.approx(logprobs[:2].tolist(), abs=1e-6)
    assert (second.logprob, second.top, third.top) == (None, (), ())
    assert third.logprob == pytest.approx(float(logprobs[third.token]), abs=1e-6)


PROCESSED = [
    draw(temperature=0.7),
    draw(temperature=1.6, top_k=3),
    draw(temperature=0.9, top_p=0.7),
    draw(temperature=2.0, top_p=0.9, top_k=4),
    draw(top_k=1),
    draw(temperature=1.3, min_p=0.1),
    draw(temperature=1.3, min_p=0.1, top_k=4, top_p=0.8),
    draw(temperature=0.05, top_k=4),
]


@pytest.mark.parametrize("how", PROCESSED, ids=str)
def test_processed_logprobs_are_of_what_tokens_are_drawn_from(how: Draw) -> None:
    how = msgspec.structs.replace(how, logprobs=5, logprobs_mode="processed_logprobs")
    wanted = expected(how)
    for choice in sample(LOGITS.expand(200, -1), [how] * 200, range(200)):
        assert choice.logprob is not None
        assert choice.logprob == pytest.approx(math.log(wanted[choice.token]), abs=1e-6)
        assert [token for token, _ in choice.top] == list(wanted)[:5]
        assert [value for _, value in choice.top] == pytest.approx(
            [math.log(wanted[token]) for token, _ in choice.top], abs=1e-6
        )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_processed_logprobs_without_cuts_are_the_softmax_over_temperature(temperature: float) -> None:
    torch.manual_seed(7)
    logits = 4 * torch.randn(50, 5_000)
    how = draw(temperature=temperature, logprobs=20, logprobs_mode="processed_logprobs")
    table = torch.log_softmax(logits / temperature, dim=-1)
    for row, choice in enumerate(sample(logits, [how] * 50, range(50))):
        assert choice.logprob == pytest.approx(float(table[row, choice.token]), abs=1e-5)
        assert [value for _, value in choice.top] == pytest.approx(
            table[row].topk(20).values.tolist(), abs=1e-5
        )


def test_greedy_rows_have_the_models_logprobs_in_both_modes() -> None:
    raw, processed = sample(
        LOGITS.expand(2, -1),
        [
            draw(temperature=0.0, logprobs=3),
            draw(temperature=0.0, logprobs=3, top_k=2, logprobs_mode="processed_logprobs"),
        ],
        [1, 1],
    )
    assert raw == processed
    assert raw.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[0]), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 1e-3])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_chosen_token_never_has_probability_zero(temperature: float, top_p: float) -> None:
    torch.manual_seed(3)
    logits = 30 * torch.randn(20, 300)
    how = draw(temperature=temperature, top_p=top_p, logprobs=20, logprobs_mode="processed_logprobs")
    for choice in sample(logits, [how] * 20, range(20)):
        assert choice.logprob is not None
        assert math.isfinite(choice.logprob)
        assert all(math.isfinite(value) for _, value in choice.top)


PENALISED = [
    draw(repetition_penalty=1.5),
    draw(repetition_penalty=0.6, temperature=0.7),
    draw(repetition_penalty=1.2, temperature=1.3, min_p=0.05),
    draw(repetition_penalty=1.2, temperature=0.8, top_k=40),
    draw(repetition_penalty=2.0, temperature=1.1, top_p=0.8),
    draw(repetition_penalty=1.1, temperature=0.9, min_p=0.02, top_k=60, top_p=0.9),
]


@pytest.mark.parametrize("how", PENALISED, ids=str)
def test_distributions_are_those_of_transformers_own_processors(how: Draw) -> None:
    torch.manual_seed(11)
    logits = 3 * torch.randn(8, 1000)
    tokens = torch.randint(0, 1000, (8, 300))
    scores = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(tokens, logits.clone())
    scores = TemperatureLogitsWarper(how.temperature)(tokens, scores)
    if how.min_p:
        scores = MinPLogitsWarper(how.min_p)(tokens, scores)
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(tokens, scores)
    if how.top_p < 1.0:
        scores = TopPLogitsWarper(how.top_p)(tokens, scores)
    wanted = scores.log_softmax(-1)
    how = msgspec.structs.replace(how, logprobs=1000, logprobs_mode="processed_logprobs")
    seen = [SeenTokens(row.tolist()).ids for row in tokens]
    for row, choice in enumerate(sample_rows(logits, [how] * 8, range(8), seen)):
        assert choice.logprob == pytest.approx(float(wanted[row, choice.token]), abs=1e-5)
        table = torch.full((1000,), -math.inf)
        table[[token for token, _ in choice.top]] = torch.tensor([value for _, value in choice.top])
        assert torch.equal(table.isinf(), wanted[row].isinf())
        assert torch.allclose(table, wanted[row], rtol=0, atol=1e-5)


def test_a_penalty_is_of_its_own_row_and_raw_logprobs_are_before_it() -> None:
    plain, penalised, processed = sample_rows(
        LOGITS.expand(3, -1),
        [
            draw(temperature=0.0, logprobs=2),
            draw(temperature=0.0, logprobs=2, repetition_penalty=4.0),
            draw(temperature=0.0, logprobs=2, repetition_penalty=4.0, logprobs_mode="processed_logprobs"),
        ],
        [1, 1, 1],
        [None, np.array([0, 4, 0]), np.array([0, 4, 0])],
    )
    assert (plain.token, penalised.token, processed.token) == (0, 1, 1)
    assert [token for token, _ in penalised.top] == [0, 1]
    assert penalised.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[1]), abs=1e-6)
    after = torch.tensor([0.5, 1.0, 0.5, 0.0, -4.0, -3.0]).log_softmax(-1)
    assert processed.logprob == pytest.approx(float(after[1]), abs=1e-6)


@pytest.mark.parametrize("penalty", [1e-320, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
def test_no_penalty_is_too_far_from_one(penalty: float, temperature: float) -> None:
    how = draw(
        repetition_penalty=penalty,
        temperature=temperature,
        logprobs=3,
        logprobs_mode="processed_logprobs",
    )
    seen = np.arange(6)
    for choice in sample_rows(LOGITS.expand(20, -1), [how] * 20, range(20), [seen] * 20):
        assert choice.logprob is not None
        assert math.isfinite(choice.logprob)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "how",
    [draw(), draw(top_k=2), draw(top_p=0.5), draw(min_p=0.3), draw(min_p=0.3, top_p=0.5, top_k=3)],
    ids=str,
)
def test_a_policy_that_is_no_number_draws_some_token_and_harms_nobody(how: Draw, bad: float) -> None:
    """Training diverges now and then. The rank must outlive that, and the other rows draw as ever."""
    spoiled = LOGITS.clone()
    spoiled[2] = bad
    everywhere = torch.full_like(LOGITS, math.nan)
    for mode in ("raw_logprobs", "processed_logprobs"):
        asked = msgspec.structs.replace(how, logprobs=2, logprobs_mode=mode)
        rows = sample(torch.stack([spoiled, LOGITS, everywhere]), [asked] * 3, range(3))
        assert all(0 <= row.token < len(LOGITS) for row in rows)
        (alone,) = sample(LOGITS.unsqueeze(0), [asked], [1])
        assert rows[1] == alone


def test_seen_tokens_keep_each_token_once_however_many_come() -> None:
    seen = SeenTokens([5, 3, 5])
    for token in [3, *range(1000), 7]:
        seen.add(token)
    assert sorted(seen.ids.tolist()) == list(range(1000))


def test_the_deciding_numbers_are_spread_evenly_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(3000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
