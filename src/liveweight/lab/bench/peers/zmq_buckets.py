"""Buckets through shared memory, announced over ZMQ: one buffer in lock-step, as in verl's transfer, and two halves with one
acknowledgement, as in checkpoint-engine's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

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


def _memory(rendezvous: Rendezvous, name: str, halves: int) -> torch.Tensor:
    """A file in memory that all processes map; the first one creates it."""
    import torch

    size = bucket_bytes(rendezvous.specs) * halves
    return torch.from_file(
        str(rendezvous.directory / f"{name}.bin"), shared=True, size=size, dtype=torch.uint8
    )


class ZmqSender:
    """Fills one half after the other. A bucket is acknowledged before the next is filled (one half) or announced (two halves)."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights, *, name: str, halves: int) -> None:
        self._weights, self._buckets, self._halves = weights, buckets(rendezvous.specs), halves
        self._memory = _memory(rendezvous, name, halves)
        self._half_bytes = len(self._memory) // halves
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(rendezvous.ranks):
            one = self._context.socket(zmq.REQ)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
            one.bind(f"ipc://{rendezvous.directory}/{name}-{rank}.sock")
            self._sockets.append(one)

    def send(self, talks: Sequence[Talk]) -> None:
        """See PeerSender."""
        del talks
        for number, bucket in enumerate(self._buckets):
            base = number % self._halves * self._half_bytes
            if self._halves == 1:
                self._acknowledged(number)
            for spec, at in bucket:
                self._memory[base + at : base + at + spec.size_bytes].copy_(raw(self._weights[spec.name]))
            if self._halves > 1:
                self._acknowledged(number)
            announced = json.dumps([(spec.name, base + at, spec.shape) for spec, at in bucket]).encode()
            for one in self._sockets:
                one.send(announced)
        self._acknowledged(len(self._buckets))

    def _acknowledged(self, number: int) -> None:
        """Wait until every rank has loaded the bucket before."""
        if number:
            for one in self._sockets:
                one.recv()

    def close(self) -> None:
        """See PeerSender."""
        self._context.destroy(linger=0)


class ZmqReceiver:
    """Loads every bucket where it lies, and acknowledges it."""

    def __init__(self, rendezvous: Rendezvous, share: PeerShare, *, name: str, halves: int) -> None:
        self._share, self._count = share, len(buckets(rendezvous.specs))
        self._specs: dict[str, Any] = {spec.name: spec for spec in rendezvous.specs}
        self._memory = _memory(rendezvous, name, halves)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self._socket.connect(f"ipc://{rendezvous.directory}/{name}-{share.rank}.sock")

    def receive(self, talk: Talk) -> None:
        """See Receiver."""
        del talk
        for _ in range(self._count):
            for name, at, _shape in json.loads(self._socket.recv()):
                self._share.take(name, seen(self._memory, self._specs[name], at))
            self._socket.send(b"")

    def close(self) -> None:
        """See Receiver."""
        self._context.destroy(linger=0)


def _peer_method(name: str, stands_for: str, halves: int) -> PeerMethod:
    return PeerMethod(
        name=name,
        stands_for=stands_for,
        group="copies twice",
        sender=partial(ZmqSender, name=name, halves=halves),
        receiver=partial(ZmqReceiver, name=name, halves=halves),
    )


METHODS = (
    _peer_method("zmq_lockstep", "one shared buffer in lock-step over ZMQ (verl's bucketed transfer)", 1),
    _peer_method("zmq_double", "two halves, one acknowledgement, over ZMQ (checkpoint-engine)", 2),
)
