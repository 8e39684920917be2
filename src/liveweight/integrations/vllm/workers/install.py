"""Weights into one model of a worker: through vLLM's own loading, or, once that has shown where everything lies, by plain copies.

vLLM's loading makes every layer anew beside the one that serves, tensor by tensor, and copies it over. Where nothing is made from weights
but the parameters themselves, the same bytes can be copied there at once, which takes a fraction of the time for which vLLM stands still.

Owns when copies are trusted: what tracing learned of vLLM's loading is complete, and after a loading by vLLM itself the model held every
byte where it was expected. Before that, and after any failure, vLLM loads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from liveweight.integrations.vllm.workers import compat
from liveweight.integrations.vllm.workers.read_back import ModelReadBack
from liveweight.integrations.vllm.workers.target import in_layers, layer_of
from liveweight.integrations.vllm.workers.trace_loading import LoadingTrace, TracedCopy, trace
from liveweight.spec.manifest import Manifest

Tensors = Callable[[str], torch.Tensor]


class Installer:
    """Of one model. `load` and `restore` are for the worker's main thread, the others for threads beside it, while no weights change."""

    def __init__(self, model: Any, model_config: Any, manifest: Manifest) -> None:
        self._model, self._model_config, self._manifest = model, model_config, manifest
        self._tracing = threading.Lock()
        self._traced: LoadingTrace | None = None
        self._reading = ModelReadBack(manifest, self.places)
        self._copies: dict[str, list[TracedCopy]] | None = None
        """By tensor; None as long as vLLM loads."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put all tensors of a version into the model. If it raises, the model is in pieces: `restore` follows, and another load."""
        if self._copies is None:
            compat.load(self._model, self._model_config, tensors)
            return
        with torch.no_grad():
            for name, tensor in tensors:
                for place in self._copies.get(name, ()):
                    _held(place).copy_(place.source.within(tensor))
        compat.after_loading(self._model, self._model_config)

    def restore(self) -> None:
        """Let every layer have tensors of its own again. vLLM loads next."""
        self._copies = None
        compat.restore(self._model, self._model_config)

    def places(self) -> tuple[TracedCopy, ...]:
        """Where vLLM's loading puts tensors, as far as that can be followed."""
        return self._known().places

    def learn(self, installed: Tensors) -> None:
        """These tensors are installed. Where vLLM loaded them, see whether the next ones can be copied."""
        if self._copies is not None or not self._known().complete:
            return
        if self._reading.beside(installed).differing:
            return  # somebody else has written there
        copies: dict[str, list[TracedCopy]] = {}
        for place in self._known().places:
            if place.held() is None:
                return
            copies.setdefault(place.tensor, []).append(place)
        self._copies = copies

    def _known(self) -> LoadingTrace:
        with self._tracing:
            if self._traced is None:
                groups = itertools.groupby(in_layers(self._manifest), key=layer_of)
                try:
                    self._traced = trace(self._model, [list(group) for _, group in groups])
                except (
                    Exception
                ):  # of a model whose layers have no twin: vLLM loads it, and nothing of it is read back
                    self._traced = LoadingTrace(places=(), complete=False)
            return self._traced


def _held(place: TracedCopy) -> torch.Tensor:
    held = place.held()
    if held is None:
        raise RuntimeError(f"vLLM no longer keeps {place.parameter} as it was loaded")
    return held
