"""The ports between a model and what runs it: one batch of tokens, the group of ranks that share the weights.

A model knows neither the cache's pages nor the processes around it. It is handed tokens with their positions, a function that attends,
and a group that adds and joins tensors over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Attend: TypeAlias = "Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
"""(layer, query [tokens, heads, dim], key and value [tokens, kv_heads, dim]) -> [tokens, heads * dim].

Keys come rotated. The cache keeps keys and values of the layer; a query sees its own sequence up to its own position.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of many sequences in one row, with their positions; `routing` collects each MoE layer's experts [tokens, k]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attend: Attend
    routing: list[torch.Tensor] | None = None


class Group(Protocol):
    """The ranks that share one model's weights. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, on every rank; the argument's memory is used for it."""

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts side by side along the last dimension, in rank order, on every rank."""


class Solo:
    """A group of one."""

    rank, size = 0, 1

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return part
