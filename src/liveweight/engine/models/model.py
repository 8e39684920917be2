"""The model as the engine runs it: hidden states, logits and the MTP draft of one rank, and what its parameters hold.

Knows neither cache nor processes: those are behind the batch and the group. Filling the parameters is loading's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from liveweight.engine.models.attention import Rotary
from liveweight.engine.models.declare import Declaration, Site, declarations
from liveweight.engine.models.decoder import DecoderLayer
from liveweight.engine.models.forward import Batch, Group
from liveweight.engine.models.layers import Norm, Vocabulary
from liveweight.engine.models.model_spec import DRAFT, ModelSpec
from liveweight.engine.models.mtp_draft import Draft
from liveweight.errors import EngineConfigInvalid
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import OptionalGroup

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Model(nn.Module):
    """A decoder's share of one rank. Run under `torch.inference_mode()`."""

    def __init__(self, site: Site, *, draft: bool) -> None:
        super().__init__()
        spec = self.spec = site.spec
        tied = (HEAD,) if spec.tied else ()
        self.embedding = Vocabulary(site, EMBEDDING, aliases=tied)
        self._decoders = [DecoderLayer(site, layer) for layer in range(spec.layers)]
        self.layers = nn.ModuleList(self._decoders)
        self.norm = Norm(site, spec.hidden, "model.norm")
        self.head = None if spec.tied else Vocabulary(site, HEAD)
        self.drafter = Draft(site) if draft else None
        self._rotary = Rotary(site)
        attention = self._decoders[0].attention
        self.heads, self.kv_heads, self.head_dim = attention.heads, attention.kv_heads, attention.head_dim

    @property
    def has_draft(self) -> bool:
        """Whether `draft` can be called."""
        return self.drafter is not None

    @property
    def cached_layers(self) -> int:
        """How many layers' keys and values a cache has to keep; the draft's is the last one."""
        return self.spec.layers + self.has_draft

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[tokens, hidden], after the final norm."""
        rotation = self._rotary.at(batch.positions)
        x = self.embedding.embed(batch.tokens)
        for layer in self._decoders:
            x = layer.forward(x, batch, rotation)
        return self.norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in float32, joined over the ranks, on every rank."""
        return (self.embedding if self.head is None else self.head).logits(hidden)

    def draft(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """The MTP layer's hidden states: `batch` has the next tokens at the same positions, `hidden` is what `hidden()` gave there."""
        drafter = self._drafter()
        embedding = self.embedding if drafter.embedding is None else drafter.embedding
        embedded = embedding.embed(batch.tokens)
        return drafter.forward(embedded, hidden, batch, self._rotary.at(batch.positions))

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, of what `draft` gave."""
        head = self._drafter().head
        return self.logits(hidden) if head is None else head.logits(hidden)

    def declarations(self) -> Mapping[str, Declaration]:
        """What every parameter holds, by its name in the module."""
        return declarations(self)

    def pieces(self) -> Mapping[str, tuple[Piece, ...]]:
        """The same as a target wants it: the pieces of this rank."""
        return {name: declaration.pieces for name, declaration in self.declarations().items()}

    def draft_group(self) -> tuple[OptionalGroup, ...]:
        """The draft's own tensors as a group that an offer may leave out, since no answer depends on them; none without a draft."""
        if self.drafter is None:
            return ()
        named = dict.fromkeys(
            spec.name for one in declarations(self.drafter).values() for spec in one.tensors
        )
        return (OptionalGroup(name=DRAFT, tensors=tuple(named)),)

    def _drafter(self) -> Draft:
        if self.drafter is None:
            raise EngineConfigInvalid("the model was built without its draft layer")
        return self.drafter


def build(spec: ModelSpec, group: Group, *, dtype: torch.dtype, device: str, draft: bool) -> Model:
    """This rank's model: parameters allocated, without content. EngineConfigInvalid where the group cannot share it.

    `draft` builds the MTP layer where the checkpoint has one; a model without one has no draft.
    """
    if draft and spec.draft_layers > 1:
        raise EngineConfigInvalid(
            f"the model has {spec.draft_layers} MTP layers and one is supported: serve it without draft"
        )
    named = DType(str(dtype).removeprefix("torch."))
    site = Site(spec=spec, group=group, dtype=named, device=device)
    return Model(site, draft=draft and spec.draft_layers == 1).eval()
