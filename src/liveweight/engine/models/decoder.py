"""One decoder layer: attention and feed-forward, each behind a norm, each added to the stream."""

from __future__ import annotations

import torch
from torch import nn

from liveweight.engine.models.attention import Attention, Rotation
from liveweight.engine.models.declare import Site
from liveweight.engine.models.forward import Batch
from liveweight.engine.models.layers import Norm
from liveweight.engine.models.mlp import Mlp
from liveweight.engine.models.moe import SparseMlp


class DecoderLayer(nn.Module):
    """Layer number `layer` of the checkpoint, dense or sparse as the spec says."""

    def __init__(self, site: Site, layer: int) -> None:
        super().__init__()
        prefix, hidden = f"model.layers.{layer}", site.spec.hidden
        self.input_norm = Norm(site, hidden, f"{prefix}.input_layernorm")
        self.attention = Attention(site, f"{prefix}.self_attn", layer)
        self.post_norm = Norm(site, hidden, f"{prefix}.post_attention_layernorm")
        sparse = site.spec.sparse(layer)
        self.mlp: Mlp | SparseMlp = (SparseMlp if sparse else Mlp)(site, f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, batch: Batch, rotation: Rotation) -> torch.Tensor:
        """The stream [tokens, hidden], changed in place."""
        x += self.attention.forward(self.input_norm.forward(x), batch, rotation)
        x += self.mlp.forward(self.post_norm.forward(x), batch)
        return x
