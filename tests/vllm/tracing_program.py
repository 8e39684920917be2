"""In vLLM's environment, with layers of its reload's kind: what tracing takes for all that loading does, and what it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from liveweight.integrations.vllm.workers.install import Installer
from liveweight.integrations.vllm.workers.trace_loading import trace
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec

SHAPE = (4, 6)
SPECS = tuple(TensorSpec(name=name, dtype=DType.FLOAT32, shape=SHAPE) for name in ("q", "k"))


class Layer(torch.nn.Module):
    """Its parameter has what `q` and `k` have, one below the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * SHAPE[0], SHAPE[1]), requires_grad=False)
        self.register_buffer("mirror", None, persistent=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        self.rank = 1

    def load(self, param: torch.Tensor, loaded: torch.Tensor, half: int) -> None:
        """As vLLM's loaders: a part of the parameter is copied into."""
        param.data.narrow(0, half * SHAPE[0], SHAPE[0]).copy_(loaded)


class Model(torch.nn.Module):
    """One layer; `after` is what its loading does besides."""

    def __init__(
        self, after: Callable[[Any], None] = lambda _: None, names: tuple[str, ...] = ("q", "k")
    ) -> None:
        super().__init__()
        self.layer, self._after, self._names = Layer(), after, names

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Both halves."""
        for name, tensor in weights:
            if name in self._names:
                parameter: Any = self.layer.weight
                parameter.weight_loader(parameter, tensor, self._names.index(name))
        self._after(self.layer)


def traced(model: Model, before: Callable[[Any], None] = lambda _: None) -> bool:
    """Whether copying would be loading; the model itself is as it was."""
    record_metadata_for_reloading(model)
    before(model.layer)
    held = (dict(vars(model.layer)), dict(model.layer._buffers), model.layer.weight.clone())
    found = trace(model, [SPECS])
    assert vars(model.layer) == held[0]
    assert dict(model.layer._buffers) == held[1]
    assert torch.equal(model.layer.weight, held[2])
    return found.complete


def mirrored(layer: Any) -> None:
    """A loader that keeps a second copy, and not of what has no memory."""
    layer._buffers["mirror"] = torch.ones(3)


def set_buffer(layer: Any) -> None:
    layer.mirror = torch.zeros(3)


def set_attribute(layer: Any) -> None:
    layer.rank = 0


def halved(layer: Any) -> None:
    layer.weight.data.mul_(0.5)


def packed(layer: Any) -> None:
    held = layer.weight.clone()
    layer.cpu_linear = lambda x: x @ held


def listed(layer: Any) -> None:
    layer.derived = [layer.weight.t().contiguous()]


def copies(installer: Installer) -> bool:
    return installer._copies is not None


def copied() -> None:
    """Once a version was loaded, what is copied is what loading gives; where it is not there, nothing is."""
    model = Model()
    record_metadata_for_reloading(model)
    versions = [{spec.name: torch.randn(SHAPE) for spec in SPECS} for _ in range(2)]
    installer = Installer(model, None, Manifest(tensors=SPECS))
    model.load_weights(versions[0].items())
    installer.learn(versions[1].__getitem__)
    assert not copies(installer), "the model holds something else"
    installer.learn(versions[0].__getitem__)
    assert copies(installer)
    installer.load(versions[1].items())
    assert torch.equal(model.layer.weight, torch.cat([versions[1]["q"], versions[1]["k"]]))


def main() -> None:
    """Prints that all of it is so."""
    torch.set_num_threads(1)
    assert traced(Model())
    assert not traced(Model(), mirrored), "a buffer that may be made from weights"
    assert not traced(Model(set_buffer)), "a buffer that loading makes"
    assert not traced(Model(set_attribute)), "loading leaves a mark"
    assert not traced(Model(halved)), "a parameter is changed on its way"
    assert not traced(Model(), packed), "a packed copy computes"
    assert not traced(Model(), listed), "something made from weights, in a list"
    assert not traced(Model(names=("q",))), "a tensor without a place"
    copied()
    sys.stdout.write("traced\n")


if __name__ == "__main__":
    main()
