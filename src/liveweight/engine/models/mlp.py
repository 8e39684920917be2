"""The dense feed-forward layer: gate and up in one product."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from liveweight.engine.models.declare import Site
from liveweight.engine.models.forward import Batch
from liveweight.engine.models.layers import Columns, Rows


class Mlp(nn.Module):
    """silu(gate) * up, then down; cut by the inner dimension."""

    def __init__(self, site: Site, prefix: str) -> None:
        super().__init__()
        inner = site.spec.intermediate
        bounds = site.share(inner, "the intermediate size")
        parts = {f"{prefix}.gate_proj": (inner, bounds), f"{prefix}.up_proj": (inner, bounds)}
        self.gate_up = Columns(site, site.spec.hidden, parts)
        self.down = Rows(site, f"{prefix}.down_proj", inner, bounds)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        del batch
        return self.down.forward(gated(self.gate_up.forward(x)))


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in the memory of the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)
