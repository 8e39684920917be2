"""Samples: the tokens that an engine drew, with the version of each; and how they are read from the engine's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from liveweight.errors import MessageInvalid
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.spec.decoders import from_json

NONE_OF_OURS = -(1 << 30)
"""The version of weights that this run did not publish, such as those an engine was started with: older than any bound allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. `logprobs` are the engine's, `versions` the trainer's step whose weights drew the token.

    `reused`: some of its tokens were drawn over keys and values of other weights. `mixed`: a commit landed in it at an unknown position;
    then `versions` are the version at its beginning, the oldest possible.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    reused: bool = False
    mixed: bool = False

    @property
    def oldest(self) -> int:
        """The oldest version that drew a token of it."""
        return min(self.versions)

    @property
    def crossed(self) -> bool:
        """Whether a commit landed inside it."""
        return self.mixed or len(set(self.versions)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """All answers to one question, which GRPO compares with each other."""

    question: str
    samples: tuple[Sample, ...]

    @property
    def oldest(self) -> int:
        """The oldest version that drew a token of it."""
        return min(sample.oldest for sample in self.samples)


class _Version(msgspec.Struct):
    label: str


class _Span(msgspec.Struct, rename={"begins": "from"}):
    begins: int
    weight_version: _Version


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: _Logprobs
    weight_version: _Version | None = None
    weight_spans: list[_Span] | None = None
    kv: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def request(questions: Sequence[str], task: SortDigits, *, group: int) -> dict[str, Any]:
    """A completion request that asks each question `group` times."""
    return {
        "prompt": list(questions),
        "n": group,
        "max_tokens": task.digits + 1,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def read(
    raw: bytes,
    questions: Sequence[str],
    task: SortDigits,
    *,
    group: int,
    served: tuple[str, str] | None = None,
) -> list[SampleGroup]:
    """Read the groups of an answer. Leaves out questions of which an answer was cut short (KV policy `drop`). `served`: the versions at the
    answer's beginning and end, if the engine reports only those."""
    try:
        choices = sorted(from_json(raw, _Answer).choices, key=lambda choice: choice.index)
    except msgspec.DecodeError as error:
        raise MessageInvalid(f"the engine's answer cannot be read: {error}") from error
    if len(choices) != group * len(questions):
        raise MessageInvalid(f"{len(choices)} choices for {len(questions)} questions, {group} each")
    groups = []
    for number, question in enumerate(questions):
        own = choices[number * group : (number + 1) * group]
        if all(choice.token_ids and choice.finish_reason != "abort" for choice in own):
            samples = tuple(_sample(choice, question, task, served) for choice in own)
            groups.append(SampleGroup(question=question, samples=samples))
    return groups


def _sample(choice: _Choice, question: str, task: SortDigits, served: tuple[str, str] | None) -> Sample:
    finished = choice.finish_reason == "stop"
    return Sample(
        prompt=tuple(choice.prompt_token_ids),
        tokens=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs.token_logprobs),
        versions=_versions(choice) if served is None else (_number(served[0]),) * len(choice.token_ids),
        reward=task.reward(question, choice.text) if finished else 0.0,
        reused=choice.kv == "reused",
        mixed=served is not None and served[0] != served[1],
    )


def _versions(choice: _Choice) -> tuple[int, ...]:
    """The version of each token, from its span or from the whole choice."""
    if not choice.weight_spans:
        label = "" if choice.weight_version is None else choice.weight_version.label
        return (_number(label),) * len(choice.token_ids)
    numbers: list[int] = []
    ends = [span.begins for span in choice.weight_spans[1:]] + [len(choice.token_ids)]
    for span, end in zip(choice.weight_spans, ends, strict=True):
        numbers += [_number(span.weight_version.label)] * (end - span.begins)
    return tuple(numbers)


def _number(label: str) -> int:
    return int(label) if label.isdecimal() else NONE_OF_OURS
