"""Faults that tests inject into vLLM's workers: an extension of the worker, called by `/collective_rpc`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from liveweight.integrations.vllm.workers.install import Installer


class Faults:
    """Becomes a base of vLLM's worker: `self` is the worker."""

    model_runner: Any
    weight_transfer_engine: Any
    rank: int

    def own_pid(self) -> int:
        """Of this worker."""
        return os.getpid()

    def change_a_norm(self) -> None:
        """One weight of the last layer is otherwise than it was installed."""
        self.model_runner.model.model.norm.weight.data[3] += 1

    def packs(self) -> int:
        """Whether vLLM computes with copies of weights that it packed for this CPU."""
        computing = (getattr(layer, "cpu_linear", None) for layer in self.model_runner.model.modules())
        return int(any(getattr(function, "__closure__", None) is not None for function in computing))

    def copies(self) -> int:
        """Whether the next version is copied to where it belongs, not loaded by vLLM."""
        return int(self.weight_transfer_engine._main._copies is not None)

    def spoil_loading(self) -> None:
        """Let the next load of weights leave one weight otherwise than it should be."""
        genuine = Installer.load

        def load(installer: Installer, tensors: Iterable[tuple[str, Any]]) -> None:
            Installer.load = genuine  # type: ignore[method-assign]
            genuine(installer, tensors)
            self.change_a_norm()

        Installer.load = load  # type: ignore[method-assign,assignment]

    def fail_loading(self, after: str, times: str, how: str = "as it is") -> None:
        """Let the next so many loads of weights fail, on worker 0, each after that many tensors: `by vLLM` itself, or as it is."""
        left, genuine = int(times), Installer.load

        def load(installer: Installer, tensors: Iterable[tuple[str, Any]]) -> None:
            nonlocal left
            if left > 0 and self.rank == 0:
                left -= 1
                tensors = _failing(tensors, int(after))
                if how == "by vLLM":
                    installer._copies = None
            genuine(installer, tensors)

        Installer.load = load  # type: ignore[method-assign,assignment]


def _failing(weights: Iterable[tuple[str, Any]], after: int) -> Iterator[tuple[str, Any]]:
    for number, named in enumerate(weights):
        if number == after:
            raise RuntimeError(f"a test wants {named[0]} to fail")
        yield named
