"""What tests do inside vLLM's workers, through vLLM's own way for that: an extension of the worker, called by `/collective_rpc`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any


class Faults:
    """Becomes a base of vLLM's worker: `self` is the worker."""

    model_runner: Any
    rank: int

    def own_pid(self) -> int:
        """Of this worker."""
        return os.getpid()

    def change_a_norm(self) -> None:
        """One weight of the last layer is otherwise than it was installed."""
        self.model_runner.model.model.norm.weight.data[3] += 1

    def fail_loading(self, after: str, times: str) -> None:
        """Let the next so many loads of weights fail, on worker 0, each after that many tensors."""
        model, left = self.model_runner.model, int(times)
        genuine = type(model).load_weights

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            nonlocal left
            if left == 0 or self.rank != 0:
                return genuine(model, weights)
            left -= 1
            return genuine(model, _failing(weights, int(after)))

        model.load_weights = load_weights


def _failing(weights: Iterable[tuple[str, Any]], after: int) -> Iterator[tuple[str, Any]]:
    for number, named in enumerate(weights):
        if number == after:
            raise RuntimeError(f"a test wants {named[0]} to fail")
        yield named
