"""A model whose next token is a function of all tokens before, read back from the pages of its cache: whatever was shared, taken back,
guessed or ended wrongly gives another token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from liveweight.engine.models.forward import Batch
from liveweight.engine.rank.attention import AttentionPlan
from liveweight.engine.serving.requests import Delta

VOCAB, EOS, PRIME = 23, 0, 1_000_003


def digest(tokens: list[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
    return value


def continued(prompt: list[int], count: int) -> list[int]:
    """What a model does that is alone in the world."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(digest(tokens) % VOCAB)
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class Cells:
    """A cache that keeps tokens, and tells a query the digest of what it sees."""

    def __init__(self, blocks: int, block_tokens: int, context: int) -> None:
        self.block_tokens, self.context = block_tokens, context
        self.cells = [[-1] * block_tokens for _ in range(blocks)]

    def attend(
        self, plan: AttentionPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        del layer, query, value
        size, seen = self.block_tokens, []
        assert plan.positions.max() < self.context
        rows = list(zip(plan.row_starts[:-1], plan.row_starts[1:], plan.tables, strict=True))
        for start, end, table in rows:
            for at in range(start, end):
                page, offset = divmod(int(plan.positions[at]), size)
                self.cells[table[page]][offset] = int(key[at])
        for start, end, table in rows:
            for at in range(start, end):
                context = int(plan.positions[at]) + 1
                seen.append(digest([self.cells[table[p // size]][p % size] for p in range(context)]))
        return torch.tensor(seen, dtype=torch.float64)


class Oracle:
    """A model over those cells. Its guesses are right as often as `luck` says."""

    def __init__(self, luck: float | None) -> None:
        self.has_draft, self.luck = luck is not None, luck or 0.0
        self.random = random.Random(3)

    def hidden(self, batch: Batch) -> torch.Tensor:
        tokens = batch.tokens.double()
        return batch.attend(0, tokens, tokens, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden.long() % VOCAB, VOCAB).float()

    def draft(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """The digest after the next token: what the model will see, if that token stays."""
        return (hidden * 31 + batch.tokens.double() + 1) % PRIME

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        wrong = torch.tensor([self.random.random() >= self.luck for _ in range(len(hidden))])
        return self.logits(hidden + wrong.double())


@dataclass
class Answer:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    last: Delta | None = None

    def take(self, delta: Delta) -> None:
        assert self.last is None, "nothing follows the last piece"
        self.tokens += [token.id for token in delta.tokens]
        if delta.last:
            self.last = delta


class Silent:
    """No text."""

    def push(self, token: int) -> tuple[str, bool]:
        del token
        return "", False

    def finish(self) -> str:
        return ""
