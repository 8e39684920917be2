"""A `torch.multiprocessing` queue of shared tensors: the trainer's weights lie in memory that ranks map, and only handles travel.

The weights are one shared storage, so that one handle is enough for all tensors: the best form of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from liveweight.lab.bench.peers.contender import PeerMethod, PeerShare, Rendezvous, Talk, Weights, raw, seen


class QueueSender:
    """Its weights are a shared storage; they are kept equal to the benchmark's outside of rounds, by `refresh`."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights) -> None:
        import torch

        self._queues, self._weights = rendezvous.queues, weights
        total = sum(spec.size_bytes for spec in rendezvous.specs)
        self._shared: torch.Tensor = torch.zeros(total, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.refresh()

    def refresh(self) -> None:
        """The trainer's step, in its own memory."""
        at = 0
        for tensor in self._weights.values():
            part = raw(tensor)
            self._shared[at : at + len(part)].copy_(part)
            at += len(part)

    def send(self, talks: Sequence[Talk]) -> None:
        """See PeerSender."""
        del talks
        for queue in self._queues:
            queue.put(self._shared)

    def close(self) -> None:
        """See PeerSender."""


class QueueReceiver:
    """Maps what the handle names, and copies its part."""

    def __init__(self, rendezvous: Rendezvous, share: PeerShare) -> None:
        self._queue, self._specs, self._share = rendezvous.queues[share.rank], rendezvous.specs, share

    def receive(self, talk: Talk) -> None:
        """See Receiver."""
        del talk
        memory, at = self._queue.get(), 0
        for spec in self._specs:
            self._share.take(spec.name, seen(memory, spec, at))
            at += spec.size_bytes

    def close(self) -> None:
        """See Receiver."""


METHODS = (
    PeerMethod(
        name="mp_queue",
        stands_for="a torch.multiprocessing queue of shared tensors",
        group="in place",
        sender=QueueSender,
        receiver=QueueReceiver,
    ),
)
