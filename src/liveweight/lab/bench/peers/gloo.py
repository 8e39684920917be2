"""`torch.distributed` broadcasts over gloo: tensor by tensor, the shape of TRL and OpenRLHF on NCCL, and in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from liveweight.engine.rank.rank_group import collectives
from liveweight.lab.bench.peers.contender import (
    WAIT_S,
    PeerMethod,
    PeerShare,
    Rendezvous,
    Talk,
    Weights,
    bucket_bytes,
    buckets,
    raw,
    seen,
)

if TYPE_CHECKING:
    import torch


def _group(rendezvous: Rendezvous, process: int, name: str) -> Any:
    """Join a gloo group: the trainer is process 0, rank r is process r + 1. Does not touch torch's global state."""
    import torch.distributed as dist

    size = rendezvous.ranks + 1
    store: Any = dist.FileStore(str(rendezvous.directory / f"meeting-{name}"), size)  # type: ignore[attr-defined]
    return collectives(dist, "gloo", process, size, store, WAIT_S)


def _broadcast(group: Any, memory: torch.Tensor) -> None:
    group.broadcast(memory, 0).wait()


class TensorSender:
    """Every tensor where it lies, one after the other."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights) -> None:
        self._weights, self._group = weights, _group(rendezvous, 0, "tensor")

    def send(self, talks: Sequence[Talk]) -> None:
        """See PeerSender."""
        del talks
        for tensor in self._weights.values():
            _broadcast(self._group, raw(tensor))

    def close(self) -> None:
        """See PeerSender."""
        self._group = None


class TensorReceiver:
    """Into one buffer, from which each tensor's part is loaded."""

    def __init__(self, rendezvous: Rendezvous, share: PeerShare) -> None:
        import torch

        self._specs, self._share = rendezvous.specs, share
        self._memory = torch.zeros(max(spec.size_bytes for spec in rendezvous.specs), dtype=torch.uint8)
        self._group = _group(rendezvous, share.rank + 1, "tensor")

    def receive(self, talk: Talk) -> None:
        """See Receiver."""
        del talk
        for spec in self._specs:
            _broadcast(self._group, self._memory[: spec.size_bytes])
            self._share.take(spec.name, seen(self._memory, spec, 0))

    def close(self) -> None:
        """See Receiver."""
        self._group = None


class BucketSender:
    """Tensors packed into buckets, each broadcast at once."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights) -> None:
        import torch

        self._weights, self._buckets = weights, buckets(rendezvous.specs)
        self._memory = torch.zeros(bucket_bytes(rendezvous.specs), dtype=torch.uint8)
        self._group = _group(rendezvous, 0, "bucket")

    def send(self, talks: Sequence[Talk]) -> None:
        """See PeerSender."""
        del talks
        for bucket in self._buckets:
            end = 0
            for spec, at in bucket:
                end = at + spec.size_bytes
                self._memory[at:end].copy_(raw(self._weights[spec.name]))
            _broadcast(self._group, self._memory[:end])

    def close(self) -> None:
        """See PeerSender."""
        self._group = None


class BucketReceiver:
    """Each bucket's tensors are loaded from where it arrived."""

    def __init__(self, rendezvous: Rendezvous, share: PeerShare) -> None:
        import torch

        self._buckets, self._share = buckets(rendezvous.specs), share
        self._memory = torch.zeros(bucket_bytes(rendezvous.specs), dtype=torch.uint8)
        self._group = _group(rendezvous, share.rank + 1, "bucket")

    def receive(self, talk: Talk) -> None:
        """See Receiver."""
        del talk
        for bucket in self._buckets:
            last, at = bucket[-1]
            _broadcast(self._group, self._memory[: at + last.size_bytes])
            for spec, start in bucket:
                self._share.take(spec.name, seen(self._memory, spec, start))

    def close(self) -> None:
        """See Receiver."""
        self._group = None


METHODS = (
    PeerMethod(
        name="gloo_tensor",
        stands_for="a broadcast for each tensor (TRL, OpenRLHF), over gloo",
        group="apart",
        sender=TensorSender,
        receiver=TensorReceiver,
    ),
    PeerMethod(
        name="gloo_bucket",
        stands_for="broadcasts of buckets, over gloo",
        group="apart",
        sender=BucketSender,
        receiver=BucketReceiver,
    ),
)
