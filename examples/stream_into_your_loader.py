"""Weights as an iterator of (name, tensor), for an engine that has a loader of its own.

    python examples/stream_into_your_loader.py

The trainer packs its parameters into a ring where they lie: nobody holds a second copy of the model. The engine fuses q, k and v as its
loader likes, one tensor at a time.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

import liveweight as lw

STEPS = 3


class Trained(torch.nn.Module):
    """What the trainer has."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(8, 16)))


class Engine(torch.nn.Module):
    """What the engine has, and its own way to load it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(24, 16, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy every tensor to its place; how many there were."""
        rows = {"q": slice(0, 8), "k": slice(8, 16), "v": slice(16, 24)}
        count = 0
        for name, tensor in weights:
            self.qkv[rows[name]] = tensor
            count += 1
        return count


def train(address: str) -> None:
    """Change the weights, and offer them until they were read."""
    model = Trained()
    with lw.Publisher(model, address=address, dtype="bfloat16", offer="ring") as publisher:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            publisher.offer(step)  # returns when the engine has streamed it


def main() -> None:
    """Load one step after the other."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lw-") as directory:
        Path(directory).chmod(0o700)
        address, engine = f"ipc://{directory}/source.sock", Engine()
        trainer = threading.Thread(target=train, args=(address,))
        trainer.start()
        with lw.Receiver(engine, weights_from=address) as receiver:
            for step in range(1, STEPS + 1):
                count = load(engine, receiver, step, trainer)
                print(f"step {step}: {count} tensors, qkv is {engine.qkv.unique().tolist()}")
        trainer.join()


def load(engine: Engine, receiver: lw.Receiver, step: int, trainer: threading.Thread) -> int:
    """Stream a step into the engine's own loader; asked for again as long as the trainer has not come so far."""
    while True:
        try:
            return engine.load_weights(receiver.stream(step))
        except lw.LiveWeightError as error:
            if not (error.retryable and trainer.is_alive()):
                raise


if __name__ == "__main__":
    main()
