"""The on-policy check: whether tokens were drawn by the version that the engine names.

The trainer recomputes the logprob of every drawn token with its own model, under the version that the engine names, and compares. Only
rounding may differ, unless an engine reused keys and values of other weights, or does not serve the version that it names.
"""

from __future__ import annotations

from collections.abc import Sequence

from liveweight.lab.demo.learning.grpo import batch_of
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.samples import Sample, SampleGroup
from liveweight.lab.demo.records import Gap


def to_check(groups: Sequence[SampleGroup], count: int) -> list[Sample]:
    """Choose `count` samples: those that a commit landed in first, where most can go wrong. Not those whose commit position is unknown."""
    samples = [sample for group in groups for sample in group.samples if not sample.mixed]
    return sorted(samples, key=lambda sample: not sample.crossed)[:count]


def gap(policy: Policy, samples: Sequence[Sample]) -> Gap:
    """How far the engine's logprobs of these samples are from the trainer's. Ignores tokens of versions that are not kept."""
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
