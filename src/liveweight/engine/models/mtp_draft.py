"""The MTP layer: a decoder layer that sees the next token's embedding beside the main model's hidden state, to guess the token after it.

In the checkpoint it is the layer behind the last one. An own embedding or head, where it has one, is held here; else the model's serve.
"""

from __future__ import annotations

import torch
from torch import nn

from liveweight.engine.models.attention import Rotation
from liveweight.engine.models.declare import Site
from liveweight.engine.models.decoder import DecoderLayer
from liveweight.engine.models.forward import Batch
from liveweight.engine.models.layers import Norm, Replicated, Vocabulary


class Draft(nn.Module):
    """The layer and what surrounds it."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        spec = site.spec
        prefix, hidden = f"model.layers.{spec.layers}", spec.hidden
        self.embedding_norm = Norm(site, hidden, f"{prefix}.enorm")
        self.hidden_norm = Norm(site, hidden, f"{prefix}.hnorm")
        self.project = Replicated(site, f"{prefix}.eh_proj", 2 * hidden, hidden)
        self.layer = DecoderLayer(site, spec.layers)
        self.norm = Norm(site, hidden, f"{prefix}.shared_head.norm")
        self.embedding = Vocabulary(site, f"{prefix}.embed_tokens.weight") if spec.draft_embedding else None
        self.head = Vocabulary(site, f"{prefix}.shared_head.head.weight") if spec.draft_head else None

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch, rotation: Rotation
    ) -> torch.Tensor:
        """[tokens, hidden], after the layer's own norm."""
        both = torch.cat((self.embedding_norm.forward(embedded), self.hidden_norm.forward(hidden)), dim=-1)
        return self.norm.forward(self.layer.forward(self.project.forward(both), batch, rotation))
