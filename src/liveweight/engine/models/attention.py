"""Attention: projections, norms of queries and keys, rotation. What is attended to, and the cache, are behind the batch's `attend`."""

from __future__ import annotations

import torch
from torch import nn

from liveweight.engine.models.declare import Bounds, Site
from liveweight.engine.models.forward import Batch
from liveweight.engine.models.layers import Columns, Norm, Rows, rms_norm
from liveweight.errors import EngineConfigInvalid

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine of every token's position: [tokens, 1, head_dim]."""


class Rotary:
    """Rotation by position, by halves of a head: a table over all positions of the model."""

    def __init__(self, site: Site) -> None:
        dim, device = site.spec.head_dim, site.device
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        positions = torch.arange(site.spec.max_positions, dtype=torch.float32, device=device)
        angles = positions.unsqueeze(1) * (1.0 / site.spec.rope_theta**exponents)
        cosine, sine = angles.cos(), angles.sin()
        table = torch.cat((cosine, cosine, -sine, sine), dim=1)
        self._table = table.to(getattr(torch, site.dtype.value)).view(-1, 2, dim)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of a batch, once for all layers."""
        found = self._table.index_select(0, positions)
        return found[:, :1], found[:, 1:]


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Every head turned by its token's angles."""
    cosine, sine = rotation
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


class Attention(nn.Module):
    """Queries, keys and values in one product; a rank has its share of heads. Key heads are replicated where ranks outnumber them."""

    def __init__(self, site: Site, prefix: str, layer: int) -> None:
        super().__init__()
        spec = site.spec
        self.layer, self.eps, self.head_dim = layer, spec.eps, spec.head_dim
        queries, keys = site.share(spec.heads, "the heads"), key_heads(site)
        self.heads, self.kv_heads = queries[1] - queries[0], keys[1] - keys[0]
        parts = {
            f"{prefix}.q_proj": (spec.heads * spec.head_dim, _scaled(queries, spec.head_dim)),
            f"{prefix}.k_proj": (spec.kv_heads * spec.head_dim, _scaled(keys, spec.head_dim)),
            f"{prefix}.v_proj": (spec.kv_heads * spec.head_dim, _scaled(keys, spec.head_dim)),
        }
        self.qkv = Columns(site, spec.hidden, parts, bias=spec.attention_bias)
        self.qk_norm = Norm(site, spec.head_dim, f"{prefix}.q_norm", f"{prefix}.k_norm")
        inputs = spec.heads * spec.head_dim
        bounds = _scaled(queries, spec.head_dim)
        self.out = Rows(site, f"{prefix}.o_proj", inputs, bounds, bias=spec.attention_bias)
        kinds = torch.arange(self.heads + self.kv_heads, device=site.device) >= self.heads
        self.register_buffer("kinds", kinds.long(), persistent=False)
        # Not a number until it was derived: a path that forgot to would show.
        weights = torch.full((len(kinds), spec.head_dim), torch.nan, dtype=self.qk_norm.weight.dtype)
        self.register_buffer("qk_weights", weights.to(site.device), persistent=False)

    kinds: torch.Tensor
    qk_weights: torch.Tensor

    def derive(self) -> None:
        """The norms' weights of every head, queries first."""
        torch.index_select(self.qk_norm.weight, 0, self.kinds, out=self.qk_weights)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: Rotation) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        heads, both = self.heads, self.heads + self.kv_heads
        qkv = self.qkv.forward(x).view(x.shape[0], both + self.kv_heads, self.head_dim)
        qk = rotate(rms_norm(qkv[:, :both], self.qk_weights, self.eps), rotation)
        return self.out.forward(batch.attend(self.layer, qk[:, :heads], qk[:, heads:], qkv[:, both:]))


def key_heads(site: Site) -> Bounds:
    """This rank's key and value heads: a share, or one that several ranks have."""
    total, ranks = site.spec.kv_heads, site.group.size
    if total >= ranks:
        return site.share(total, "the kv heads")
    if ranks % total:
        raise EngineConfigInvalid(f"tp {ranks} is no multiple of the model's kv heads, {total}")
    head = site.group.rank * total // ranks
    return head, head + 1


def _scaled(bounds: Bounds, factor: int) -> Bounds:
    return bounds[0] * factor, bounds[1] * factor
