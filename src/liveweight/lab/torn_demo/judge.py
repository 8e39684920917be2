"""The judge of the torn demo: replays every token against both versions, and finds which of them would have drawn it.

Teacher-forced: a token is judged by the logits after all tokens before it, whichever version drew those. The judge loads both checkpoints
by itself, whole and in float32, and attends with torch's own operator; it shares only the layers with the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from liveweight.engine.models.forward import Batch, Solo

if TYPE_CHECKING:
    import torch

    from liveweight.engine.models.model import Model

NEAR = 1e-4
"""Logits that lie closer than this may change places: sums of several ranks are rounded in another order."""

Kind: TypeAlias = Literal["old", "new", "neither"]
_KINDS: dict[tuple[bool, bool], Kind | None] = {
    (True, False): "old",
    (False, True): "new",
    (False, False): "neither",
    (True, True): None,
}
"""A token's kind, by whether the old version and the new one would have drawn it. None: both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens by the version that would have drawn them."""

    old: int = 0
    new: int = 0
    neither: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.old + self.new + self.neither

    @classmethod
    def of(cls, kinds: Iterable[Kind]) -> Self:
        """Count."""
        counted = Counter(kinds)
        return cls(old=counted["old"], new=counted["new"], neither=counted["neither"])

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            old=self.old + other.old, new=self.new + other.new, neither=self.neither + other.neither
        )

    def to_dict(self) -> dict[str, int]:
        """The JSON form."""
        return {"old": self.old, "new": self.new, "neither": self.neither, "total": self.total}


class TokenJudge:
    """Both versions, loaded. For one thread."""

    def __init__(self, old: Path, new: Path) -> None:
        self._old, self._new = loaded(old), loaded(new)

    def kinds(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Kind]:
        """The kind of every token of a greedy answer."""
        tables = [logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1] for model in (self._old, self._new)]
        return kinds_of(tables[0], tables[1], tokens)


def kinds_of(old: torch.Tensor, new: torch.Tensor, tokens: Sequence[int]) -> list[Kind]:
    """Classify tokens by both versions' logits [tokens, vocab], a row for each token, from before it was drawn.

    A token that both would have drawn counts with the version before it in the answer, else with the one after it.
    """
    certain = [_KINDS[by] for by in zip(drawable(old, tokens), drawable(new, tokens), strict=True)]
    version: Kind = next((kind for kind in certain if kind is not None and kind != "neither"), "old")
    kinds: list[Kind] = []
    for kind in certain:
        if kind is not None and kind != "neither":
            version = kind
        kinds.append(version if kind is None else kind)
    return kinds


def drawable(table: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token is the best of its row, or so near to it that rounding decides."""
    import torch

    chosen = table[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)]
    near: list[bool] = (table.max(dim=-1).values - chosen < NEAR).tolist()
    return near


def logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """The logits after each of the tokens: [tokens, vocab]."""
    import torch

    with torch.inference_mode():
        batch = Batch(
            tokens=torch.tensor(tokens), positions=torch.arange(len(tokens)), attend=_attend_to_all_before
        )
        return model.logits(model.hidden(batch))


def _attend_to_all_before(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention over one whole sequence: nothing is cached, so `layer` is not needed."""
    from torch.nn import functional

    del layer
    q, k, v = (part.transpose(0, 1) for part in (query, key, value))
    seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return seen.transpose(0, 1).reshape(len(query), -1)


def loaded(directory: Path) -> Model:
    """Load a checkpoint, whole and in float32."""
    import torch

    from liveweight.engine.models.model import build
    from liveweight.engine.models.model_spec import ModelSpec
    from liveweight.engine.rank.checkpoint_loading import load
    from liveweight.engine.rank.hooks import hooks_of

    model = build(ModelSpec.read(directory), Solo(), dtype=torch.float32, device="cpu", draft=False)
    load(model, directory, hooks_of(model))
    return model
