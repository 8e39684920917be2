"""The on-policy check: were these tokens drawn by the policy that the trainer thinks drew them?

The trainer computes the logprob of every drawn token again, with its own model, under the version that the engine names, and compares.
Rounding is all that may differ, unless an engine went on with keys and values of other weights, or does not serve what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from liveweight.lab.demo.learning.grpo import batch_of
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.samples import Sample, SampleGroup
from liveweight.lab.demo.records import Gap


def to_check(groups: Sequence[SampleGroup], count: int) -> list[Sample]:
    """So many samples: those that a commit landed in first, since there the most can go wrong. Not those of which nobody knows where."""
    samples = [sample for group in groups for sample in group.samples if not sample.mixed]
    return sorted(samples, key=lambda sample: not sample.crossed)[:count]


def gap(policy: Policy, samples: Sequence[Sample]) -> Gap:
    """How far the engine's logprobs of these samples are from the trainer's. Tokens of versions that are gone do not count."""
    import torch

    versions = sorted({version for sample in samples for version in sample.versions} & policy.kept())
    every: list[float] = []
    after: list[float] = []
    for version in versions:
        own = [sample for sample in samples if version in sample.versions]
        batch = batch_of(own)
        with torch.no_grad():
            rows = (policy.logprobs(batch, version) - batch.sampled).abs().tolist()
        for sample, row in zip(own, rows, strict=True):
            for drawn_by, difference in zip(sample.versions, row, strict=False):
                if drawn_by == version:
                    every.append(difference)
                    if version != sample.versions[0]:
                        after.append(difference)
    return Gap(
        tokens=len(every),
        mean=sum(every) / max(1, len(every)),
        worst=max(every, default=0.0),
        after_tokens=len(after),
        after_mean=sum(after) / max(1, len(after)),
        after_worst=max(after, default=0.0),
    )
