"""The sparse feed-forward layer: a router and experts. A rank has whole experts, a contiguous share of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from liveweight.engine.models.declare import Declared, Site, stacked
from liveweight.engine.models.forward import Batch
from liveweight.engine.models.layers import Replicated
from liveweight.engine.models.matmul import product
from liveweight.engine.models.mlp import gated


class SparseMlp(nn.Module):
    """Every token goes through the experts that its router chooses; the ranks' outputs are added."""

    def __init__(self, site: Site, prefix: str) -> None:
        super().__init__()
        spec = site.spec
        self._group, self._k, self._norm_topk = site.group, spec.experts_per_token, spec.norm_topk
        self.router = Replicated(site, f"{prefix}.gate", spec.hidden, spec.experts)
        self.experts = Experts(site, prefix)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] to the same; the chosen experts go to `batch.routing`."""
        scores = functional.softmax(self.router.forward(x), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self._k, dim=-1)
        if self._norm_topk:
            weights /= weights.sum(dim=-1, keepdim=True)
        if batch.routing is not None:
            batch.routing.append(chosen)
        return self._group.add(self.experts.forward(x, chosen, weights.to(x.dtype)))


class Experts(Declared):
    """This rank's experts, stacked."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, site: Site, prefix: str) -> None:
        super().__init__()
        hidden, inner, total = site.spec.hidden, site.spec.expert_intermediate, site.spec.experts
        self._start, self._stop = bounds = site.uneven(total)
        names = [f"{prefix}.experts.{number}" for number in range(total)]
        gate_up = (
            [site.tensor(f"{name}.{kind}_proj.weight", inner, hidden) for kind in ("gate", "up")]
            for name in names
        )
        down = ([site.tensor(f"{name}.down_proj.weight", hidden, inner)] for name in names)
        self.declare("gate_up", stacked(gate_up, bounds, least=(0, 2 * inner, hidden)), site.device)
        self.declare("down", stacked(down, bounds, least=(0, hidden, inner)), site.device)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output: experts that nobody chose cost nothing."""
        k, experts = chosen.shape[1], chosen.flatten()
        order = experts.argsort(stable=True)
        runs = self._runs(torch.bincount(experts, minlength=self._stop).tolist())
        inputs = x.index_select(0, order // k)
        outputs = x.new_zeros(inputs.shape)
        gate_up, down = self.gate_up, self.down
        for expert, start, stop in runs:
            inner = gated(product(inputs[start:stop], gate_up[expert]))
            outputs[start:stop] = product(inner, down[expert])
        placed = torch.empty_like(outputs).index_copy_(0, order, outputs)
        return torch.bmm(weights.unsqueeze(1), placed.view(-1, k, x.shape[1])).squeeze(1)

    def _runs(self, counts: list[int]) -> list[tuple[int, int, int]]:
        """This rank's experts that were chosen: number here, and the run of choices, sorted by expert, that are theirs."""
        runs, at = [], sum(counts[: self._start])
        for number, times in enumerate(counts[self._start : self._stop]):
            if times:
                runs.append((number, at, at + times))
            at += times
        return runs
