"""The layers that a decoder is made of, cut over the ranks: linear, vocabulary, norm.

Each declares its parameters' regions. Weights are read through the module at every call: an update may have let them point elsewhere.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from liveweight.engine.models.declare import Bounds, Declared, Site, columns, everything, rows
from liveweight.engine.models.matmul import product


class Norm(Declared):
    """RMS norm; several names make one table of vectors."""

    weight: nn.Parameter

    def __init__(self, site: Site, size: int, *names: str) -> None:
        super().__init__()
        self.eps, self.shape = site.spec.eps, (size,)
        self.declare(
            "weight", everything(*(site.tensor(f"{name}.weight", size) for name in names)), site.device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last dimension."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computed in float32; the weight is applied in the tensor's own dtype."""
    if x.dtype == torch.float32 and weight.dim() == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


class Columns(Declared):
    """A linear layer cut by its outputs: rows of several matrices under each other, in one product."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, site: Site, inputs: int, parts: dict[str, tuple[int, Bounds]], *, bias: bool = False
    ) -> None:
        """`parts`: by the checkpoint's name, a matrix's full outputs and this rank's share of them."""
        super().__init__()
        named = parts.items()
        weights = [(site.tensor(f"{name}.weight", size, inputs), bounds) for name, (size, bounds) in named]
        self.declare("weight", rows(weights), site.device)
        self.register_parameter("bias", None)
        if bias:
            biases = [(site.tensor(f"{name}.bias", size), bounds) for name, (size, bounds) in named]
            self.declare("bias", rows(biases), site.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        return product(x, self.weight, self.bias)


class Rows(Declared):
    """A linear layer cut by its inputs: the ranks' products are added."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, site: Site, name: str, inputs: int, bounds: Bounds, *, bias: bool = False) -> None:
        super().__init__()
        self._group = site.group
        hidden = site.spec.hidden
        self.declare("weight", columns(site.tensor(f"{name}.weight", hidden, inputs), bounds), site.device)
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", everything(site.tensor(f"{name}.bias", hidden)), site.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole output, on every rank."""
        out = self._group.add(product(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


class Replicated(Declared):
    """A linear layer that every rank has whole."""

    weight: nn.Parameter

    def __init__(self, site: Site, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.declare("weight", everything(site.tensor(f"{name}.weight", outputs, inputs)), site.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole output."""
        return product(x, self.weight)


class Vocabulary(Declared):
    """A table of a vector per token, cut by tokens and padded to equal parts: as embedding, as head, or as both."""

    weight: nn.Parameter

    def __init__(self, site: Site, name: str, aliases: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._group, self._vocab = site.group, site.spec.vocab
        each = -(-self._vocab // site.group.size)
        self._start = min(self._vocab, site.group.rank * each)
        self._stop = min(self._vocab, self._start + each)
        table = site.tensor(name, self._vocab, site.spec.hidden, aliases=aliases)
        self.declare("weight", rows([(table, (self._start, self._stop))], least=each), site.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], on every rank."""
        if self._group.size == 1:
            return functional.embedding(tokens, self.weight)
        elsewhere = (tokens < self._start) | (tokens >= self._stop)
        found = functional.embedding((tokens - self._start).masked_fill_(elsewhere, 0), self.weight)
        return self._group.add(found.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in float32, on every rank; padding is cut off."""
        joined = self._group.join(product(hidden, self.weight))
        return joined[:, : self._vocab].float()
