"""Installs weights into one model of a worker: through vLLM's own loading, or, once a trace shows where every tensor lies, by plain copies.

vLLM's loading builds every layer anew beside the serving one, tensor by tensor, and copies it over. If nothing but the parameters is made
from weights, the same bytes can be copied into place at once, in a fraction of the time for which vLLM is paused.

Owns when copies are trusted: the trace (workers/trace_loading) is complete, and after a loading by vLLM itself the model held every byte
where the trace expects it. Before that, and after any failure, vLLM loads.
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
    """Installs into one model. `load` and `restore` are for the worker's main thread, the others for any thread while no weights change."""

    def __init__(self, model: Any, model_config: Any, manifest: Manifest) -> None:
        self._model, self._model_config, self._manifest = model, model_config, manifest
        self._tracing = threading.Lock()
        self._traced: LoadingTrace | None = None
        self._reading = ModelReadBack(manifest, self.places)
        self._copies: dict[str, list[TracedCopy]] | None = None
        """Copies by tensor; None as long as vLLM loads."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put all tensors of a version into the model. If it raises, the model is half loaded: call `restore`, then load again."""
        if self._copies is None:
            compat.load(self._model, self._model_config, tensors)
            return
        with torch.no_grad():
            for name, tensor in tensors:
                for place in self._copies.get(name, ()):
                    _held(place).copy_(place.source.within(tensor))
        compat.after_loading(self._model, self._model_config)

    def restore(self) -> None:
        """Give every layer its own tensors back. The next load is vLLM's."""
        self._copies = None
        compat.restore(self._model, self._model_config)

    def places(self) -> tuple[TracedCopy, ...]:
        """Where vLLM's loading puts tensors, as far as the trace can follow it."""
        return self._known().places

    def learn(self, installed: Tensors) -> None:
        """Called with the installed tensors. If vLLM loaded them, decide whether the next version can be copied."""
        if self._copies is not None or not self._known().complete:
            return
        if self._reading.beside(installed).differing:
            return  # somebody else has written to the model
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
                ):  # a layer cannot be twinned: vLLM loads this model, and nothing of it is read back
                    self._traced = LoadingTrace(places=(), complete=False)
            return self._traced


def _held(place: TracedCopy) -> torch.Tensor:
    held = place.held()
    if held is None:
        raise RuntimeError(f"vLLM no longer keeps {place.parameter} as it was loaded")
    return held
