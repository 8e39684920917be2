"""The demo's task and its learning rule, against examples that were worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from liveweight.lab.demo.learning.grpo import EPSILON, advantages, batch_of, informative, loss
from liveweight.lab.demo.learning.samples import Sample, SampleGroup
from liveweight.lab.demo.learning.task import SortDigits

torch.set_num_threads(1)


def sample(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], *, reward: float = 0.0, version: int = 0
) -> Sample:
    return Sample(
        prompt=(7, 8),
        tokens=tokens,
        logprobs=logprobs,
        versions=(version,) * len(tokens),
        reward=reward,
    )


def test_only_the_sorted_digits_are_rewarded() -> None:
    task = SortDigits(digits=4)
    assert task.answer("3141=") == "1134"
    assert task.reward("3141=", "1134") == 1.0
    assert [task.reward("3141=", wrong) for wrong in ("1143", "113", "11344", "", "1134=")] == [0.0] * 5


def test_questions_follow_their_seed_and_have_their_length() -> None:
    task, first, second = SortDigits(digits=6), random.Random("a"), random.Random("a")
    questions = [task.question(first) for _ in range(20)]
    assert questions == [task.question(second) for _ in range(20)]
    assert all(
        len(question) == 7 and question[:6].isdecimal() and question[6] == "=" for question in questions
    )


def test_demonstrations_are_wrong_as_often_as_they_are_meant_to_be() -> None:
    chance, honest, careless = random.Random(0), SortDigits(noise=0.0), SortDigits(noise=0.3)
    questions = [honest.question(chance) for _ in range(2000)]
    assert all(honest.demonstration(q, chance) == honest.answer(q) for q in questions)
    pairs = [
        pair
        for q in questions
        for pair in zip(careless.demonstration(q, chance), careless.answer(q), strict=True)
    ]
    wrong = sum(shown != right for shown, right in pairs) / len(pairs)
    assert wrong == pytest.approx(0.3 * 0.9, abs=0.02)  # a tenth of the random digits are right by chance


def test_advantages_are_distances_from_the_group_in_its_own_spread() -> None:
    # Mean 1/4, standard deviation sqrt(3)/4.
    spread = math.sqrt(3) / 4 + EPSILON
    assert advantages([1, 0, 0, 0]) == pytest.approx([0.75 / spread, *[-0.25 / spread] * 3])


def test_groups_whose_answers_are_equally_good_teach_nothing() -> None:
    same = SampleGroup(question="1=", samples=(sample((1,), (-1.0,), reward=1.0),) * 2)
    differing = SampleGroup(
        question="2=", samples=(sample((1,), (-1.0,), reward=1.0), sample((2,), (-2.0,), reward=0.0))
    )
    samples, found = informative([same, differing])
    assert samples == list(differing.samples)
    assert found == pytest.approx([1.0, -1.0], abs=1e-3)
    assert informative([same]) == ([], [])


def test_answers_are_padded_and_padding_is_masked() -> None:
    batch = batch_of([sample((1, 2, 3), (-0.1, -0.2, -0.3)), sample((4,), (-0.4,))])
    assert batch.tokens.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0]]
    assert batch.drawn.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.prompt_tokens == 2


def test_the_loss_is_the_clipped_objective_of_each_token_beside_its_own_version() -> None:
    # Ratios 1.5, 0.5 and 1.1: with a gain of 2 the first is clipped to 1.28; with one of -1, 0.5 is clipped to 0.8.
    sampled = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    now = sampled + torch.tensor([[1.5, 1.1], [0.5, 9.0]]).log()
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    found = loss(now, sampled, torch.tensor([2.0, -1.0]), mask, clip_low=0.2, clip_high=0.28)
    assert float(found) == pytest.approx(-(1.28 * 2 + 1.1 * 2 + -0.8) / 3)


def test_a_clipped_token_gets_no_gradient_and_any_other_its_ratio_times_its_advantage() -> None:
    sampled = torch.tensor([[0.0, 0.0]])
    now = torch.tensor([[1.5, 1.1]]).log().requires_grad_()
    torch.autograd.backward(
        loss(now, sampled, torch.tensor([2.0]), torch.ones(1, 2), clip_low=0.2, clip_high=0.28)
    )
    assert now.grad is not None
    assert now.grad.tolist() == [pytest.approx([0.0, -1.1 * 2 / 2])]
