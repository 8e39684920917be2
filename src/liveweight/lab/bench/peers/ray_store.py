"""Ray's object store: the trainer puts its weights, actors get them without a copy and load their part."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from liveweight.lab.bench.peers.contender import PeerShare, Rendezvous, Weights
from liveweight.lab.bench.peers.rank import lanes_of
from liveweight.spec.manifest import TensorSpec

STORE_ROOM = 3
NAME = "ray"
STANDS_FOR = "Ray's object store"


def absent() -> str | None:
    """Why it cannot be measured here."""
    return "not installed: pip install ray" if find_spec("ray") is None else None


class Actor:
    """A rank, as an actor."""

    def __init__(self, specs: tuple[TensorSpec, ...], rank: int, ranks: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._specs, self._share = specs, PeerShare(specs, rank, ranks)

    def take(self, arrays: dict[str, Any]) -> float:
        """Load its part; when it has."""
        import torch

        for spec in self._specs:
            whole = torch.frombuffer(arrays[spec.name], dtype=torch.bfloat16).view(spec.shape)
            self._share.take(spec.name, whole)
        return time.monotonic()

    def clear(self) -> None:
        """See PeerShare."""
        self._share.clear()

    def lanes(self) -> bytes:
        """What it holds, bit for bit."""
        return lanes_of(self._share)


class RayStore:
    """The trainer's side, and the actors."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights) -> None:
        import ray

        self._weights, self._ray = weights, ray
        size = sum(spec.size_bytes for spec in rendezvous.specs)
        ray.init(
            num_cpus=rendezvous.ranks,
            object_store_memory=max(STORE_ROOM * size, 100 << 20),
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
        made = ray.remote(Actor)
        self._actors = [
            made.remote(rendezvous.specs, rank, rendezvous.ranks) for rank in range(rendezvous.ranks)
        ]

    def round(self) -> float:
        """Put, get, load; seconds from the put to the last actor's load."""
        import torch

        began_s = time.monotonic()
        arrays = {
            name: tensor.detach().view(torch.uint8).numpy().reshape(-1)
            for name, tensor in self._weights.items()
        }
        reference = self._ray.put(arrays)
        ends = self._ray.get([actor.take.remote(reference) for actor in self._actors])
        del reference
        return float(max(ends)) - began_s

    def clear(self) -> None:
        """Let the actors forget."""
        self._ray.get([actor.clear.remote() for actor in self._actors])

    def lanes(self) -> list[bytes]:
        """What every rank holds."""
        found: list[bytes] = self._ray.get([actor.lanes.remote() for actor in self._actors])
        return found

    def close(self) -> None:
        """End the cluster."""
        self._ray.shutdown()
