"""GRPO in plain PyTorch: a group's own mean is the baseline, and the importance ratio is clipped.

The ratio is taken token by token, to the probability with which the token was drawn, by the version that drew it: an answer that crossed
a commit has tokens of two policies, and each is compared with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liveweight.lab.demo.learning.samples import Sample, SampleGroup

if TYPE_CHECKING:
    import torch

EPSILON = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """A batch of samples, answers padded at their ends. `mask` is 1 where a token was drawn."""

    tokens: torch.Tensor
    prompt_tokens: int
    drawn: torch.Tensor
    mask: torch.Tensor
    sampled: torch.Tensor
    """The logprob of each drawn token, under the version that drew it."""


def batch_of(samples: Sequence[Sample]) -> TrainingBatch:
    """Batch these samples, whose prompts are equally long."""
    import torch

    longest = max(len(sample.tokens) for sample in samples)

    def padded(row: Sequence[float]) -> list[float]:
        return [*row, *[0] * (longest - len(row))]

    drawn = torch.tensor([padded(sample.tokens) for sample in samples])
    prompts = torch.tensor([sample.prompt for sample in samples])
    return TrainingBatch(
        tokens=torch.cat([prompts, drawn], dim=1),
        prompt_tokens=prompts.shape[1],
        drawn=drawn,
        mask=torch.tensor([padded([1.0] * len(sample.tokens)) for sample in samples]),
        sampled=torch.tensor([padded(sample.logprobs) for sample in samples]),
    )


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each answer of a group is than the group, in its standard deviations."""
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]


def informative(groups: Sequence[SampleGroup]) -> tuple[list[Sample], list[float]]:
    """The samples of groups whose answers differ in reward, with their advantages. Other groups have no gradient."""
    samples: list[Sample] = []
    found: list[float] = []
    for group in groups:
        rewards = [sample.reward for sample in group.samples]
        if len(set(rewards)) > 1:
            samples += group.samples
            found += advantages(rewards)
    return samples, found


def loss(
    now: torch.Tensor,
    sampled: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The clipped objective, negated, as a mean over all drawn tokens. `now` are the logprobs under the weights that learn."""
    import torch

    ratio = (now - sampled).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -(gain * mask).sum() / mask.sum()
