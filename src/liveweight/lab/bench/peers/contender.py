"""The port of a contender: the trainer's half and the ranks' half of one method to move weights, in one module.

A round is timed from `send` to the last rank's return from `receive`: then every rank's live weights are the trainer's. One-time setup
(groups, buffers, directories) belongs in the halves' constructors, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from liveweight.lab.bench.model_shapes import parameters
from liveweight.spec.manifest import TensorSpec

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 256 << 20
WAIT_S = 600.0

Group: TypeAlias = Literal["ours", "in place", "copies twice", "apart"]
"""What a contender is compared as: it shares the trainer's memory, it copies through shared memory, or it goes through something else."""


class Talk(Protocol):
    """One end of a multiprocessing pipe between trainer and rank. For small messages, not for weights."""

    def send(self, obj: Any) -> None:
        """Send a message."""

    def recv(self) -> Any:
        """Receive the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What both halves share: a directory in memory; the tensors, in order; the number of ranks; queues that were made with the ranks."""

    directory: Path
    specs: tuple[TensorSpec, ...]
    ranks: int
    queues: Sequence[Any] = ()


class PeerShare:
    """A rank's live weights: its part of every tensor."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, ranks: int) -> None:
        self.rank = rank
        self.held = parameters(list(specs), rank, ranks)
        self._parts: dict[str, tuple[torch.Tensor, tuple[slice, ...]]] = {}
        for tensor, pieces in self.held.values():
            for piece in pieces:
                at = piece.at or (0,) * len(piece.region)
                where = tuple(
                    slice(start, start + span.count) for start, span in zip(at, piece.region, strict=True)
                )
                self._parts[piece.tensor.name] = tensor[where], _slices(piece.region)

    def take(self, name: str, whole: torch.Tensor) -> None:
        """Copy its part out of a whole tensor."""
        mine, part = self._parts[name]
        mine.copy_(whole[part])

    def part(self, name: str) -> tuple[slice, ...]:
        """Which part that is."""
        return self._parts[name][1]

    def put(self, name: str, part: torch.Tensor) -> None:
        """Copy a part that was cut out already."""
        self._parts[name][0].copy_(part)

    def clear(self) -> None:
        """Clear all weights, so that a check proves that the new ones were moved."""
        for tensor, _ in self.held.values():
            tensor.zero_()


def _slices(region: Any) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.start + span.count) for span in region)


class PeerSender(Protocol):
    """The trainer's half."""

    def send(self, talks: Sequence[Talk]) -> None:
        """Send the current weights. Every rank is in `receive`, or about to be."""

    def close(self) -> None:
        """Release everything."""


class PeerReceiver(Protocol):
    """A rank's half."""

    def receive(self, talk: Talk) -> None:
        """Returns when the rank's weights are what was sent."""

    def close(self) -> None:
        """Release everything."""


Weights: TypeAlias = "Mapping[str, torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMethod:
    """One contender: its two halves, and the systems that it represents. `shared`: first moves the trainer's weights to its own memory."""

    name: str
    stands_for: str
    group: Group
    sender: Callable[[Rendezvous, Weights], PeerSender]
    receiver: Callable[[Rendezvous, PeerShare], PeerReceiver]


def buckets(
    specs: Sequence[TensorSpec], limit_bytes: int = BUCKET_BYTES
) -> list[list[tuple[TensorSpec, int]]]:
    """Tensors in order, as many as fit into a bucket, each with where it begins; one that is larger has its own."""
    found: list[list[tuple[TensorSpec, int]]] = []
    at = limit_bytes
    for spec in specs:
        if at + spec.size_bytes > limit_bytes or not found:
            found.append([])
            at = 0
        found[-1].append((spec, at))
        at += spec.size_bytes
    return found


def bucket_bytes(specs: Sequence[TensorSpec], limit_bytes: int = BUCKET_BYTES) -> int:
    """How large the largest of them is."""
    return max(at + spec.size_bytes for bucket in buckets(specs, limit_bytes) for spec, at in bucket[-1:])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in one row."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def seen(memory: torch.Tensor, spec: TensorSpec, at: int) -> torch.Tensor:
    """A tensor in a run of bytes."""
    import torch

    return memory[at : at + spec.size_bytes].view(torch.bfloat16).view(spec.shape)
