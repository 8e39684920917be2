"""The torn demo's judge: which version would have drawn a token, and whether its own logits are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from liveweight.lab.torn_demo.judge import NEAR, Kind, TokenCounts, TokenJudge, kinds_of, logits
from tests.support.engine.engines import Logits, Models

VOCAB = 8


def table(*best: int, second: int | None = None, behind: float = 1.0) -> torch.Tensor:
    """A row of logits for each token that is best there; `second` follows it that far behind."""
    rows = torch.zeros(len(best), VOCAB)
    for row, token in zip(rows, best, strict=True):
        row[token] = 2.0
        if second is not None:
            row[second] = 2.0 - behind
    return rows


@pytest.mark.parametrize(
    ("old", "new", "tokens", "kinds"),
    [
        (table(1, 2), table(3, 4), [1, 2], ["old", "old"]),
        (table(1, 2), table(3, 4), [3, 4], ["new", "new"]),
        (table(1, 2), table(3, 4), [5, 6], ["neither", "neither"]),
        (table(1, 2, 3), table(4, 5, 6), [1, 7, 6], ["old", "neither", "new"]),
        (table(1), table(3, second=5, behind=NEAR / 2), [5], ["new"]),
        (table(1, second=5, behind=NEAR / 2), table(3), [5], ["old"]),
        (table(1, second=5, behind=NEAR * 2), table(3, second=5, behind=NEAR * 2), [5], ["neither"]),
    ],
    ids=["old", "new", "neither", "crossing", "near tie of new", "near tie of old", "no tie"],
)
def test_a_token_is_of_the_version_that_would_have_drawn_it(
    old: torch.Tensor, new: torch.Tensor, tokens: list[int], kinds: list[Kind]
) -> None:
    assert kinds_of(old, new, tokens) == kinds


@pytest.mark.parametrize(
    ("old", "new", "tokens", "kinds"),
    [
        (table(1, 2, 3), table(4, 2, 6), [4, 2, 6], ["new", "new", "new"]),
        (table(1, 2, 3), table(4, 2, 6), [1, 2, 3], ["old", "old", "old"]),
        (table(1, 2, 3), table(4, 2, 6), [1, 2, 6], ["old", "old", "new"]),
        (table(1, 2), table(1, 4), [1, 4], ["new", "new"]),
        (table(1, 2, 3), table(4, 2, 6), [7, 2, 6], ["neither", "new", "new"]),
        (table(1, 2), table(1, 2), [1, 2], ["old", "old"]),
    ],
    ids=["among new", "among old", "at a crossing", "first", "after neither", "nothing else"],
)
def test_a_token_that_both_would_have_drawn_counts_with_its_neighbours(
    old: torch.Tensor, new: torch.Tensor, tokens: list[int], kinds: list[Kind]
) -> None:
    assert kinds_of(old, new, tokens) == kinds


def test_counts_add_up() -> None:
    both = TokenCounts.of(["old", "new", "new"]) + TokenCounts.of(["neither"])
    assert both.to_dict() == {"old": 1, "new": 2, "neither": 1, "total": 4}


def test_the_judge_has_the_logits_of_transformers(
    models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    judge = TokenJudge(models.directory(), models.directory(seed=1))
    tokens = [5, 300, 7, 7, 511, 0, 42, 43]
    for model, directory in ((judge._old, models.directory()), (judge._new, models.directory(seed=1))):
        torch.testing.assert_close(
            logits(model, tokens), transformers_logits(directory)(tokens), atol=1e-5, rtol=1e-5
        )


def test_the_judge_tells_the_answers_of_both_versions_and_of_a_mixture_apart(
    models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    directories = [models.directory(seed=seed) for seed in (0, 1, 2)]
    judge, prompt = TokenJudge(*directories[:2]), [5, 6, 7, 8]
    counted = []
    for directory in directories:
        answer: list[int] = []
        for _ in range(24):
            answer.append(int(transformers_logits(directory)([*prompt, *answer])[-1].argmax()))
        counted.append(TokenCounts.of(judge.kinds(prompt, answer)))
    assert counted[:2] == [TokenCounts(old=24), TokenCounts(new=24)]
    assert counted[2].neither >= 20
