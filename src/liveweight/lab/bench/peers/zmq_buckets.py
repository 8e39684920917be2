"""Buckets through shared memory, told of over ZMQ: one buffer in lock-step, the shape of verl's transfer, and two halves with one
acknowledgement, the shape of checkpoint-engine's."""

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


def _memory(meeting: Rendezvous, name: str, halves: int) -> torch.Tensor:
    """A file in memory that all map; who comes first makes it."""
    import torch

    size = bucket_bytes(meeting.specs) * halves
    return torch.from_file(str(meeting.directory / f"{name}.bin"), shared=True, size=size, dtype=torch.uint8)


class ZmqSender:
    """Fills one half after the other. With one half, a bucket is acknowledged before the next is filled; with two, before it is told."""

    def __init__(self, meeting: Rendezvous, weights: Weights, *, name: str, halves: int) -> None:
        self._weights, self._buckets, self._halves = weights, buckets(meeting.specs), halves
        self._memory = _memory(meeting, name, halves)
        self._half_bytes = len(self._memory) // halves
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(meeting.ranks):
            one = self._context.socket(zmq.REQ)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
            one.bind(f"ipc://{meeting.directory}/{name}-{rank}.sock")
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
            told = json.dumps([(spec.name, base + at, spec.shape) for spec, at in bucket]).encode()
            for one in self._sockets:
                one.send(told)
        self._acknowledged(len(self._buckets))

    def _acknowledged(self, number: int) -> None:
        """Every rank has loaded the bucket before that one."""
        if number:
            for one in self._sockets:
                one.recv()

    def close(self) -> None:
        """See PeerSender."""
        self._context.destroy(linger=0)


class ZmqReceiver:
    """Loads every bucket where it lies, and acknowledges it."""

    def __init__(self, meeting: Rendezvous, share: PeerShare, *, name: str, halves: int) -> None:
        self._share, self._count = share, len(buckets(meeting.specs))
        self._specs: dict[str, Any] = {spec.name: spec for spec in meeting.specs}
        self._memory = _memory(meeting, name, halves)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self._socket.connect(f"ipc://{meeting.directory}/{name}-{share.rank}.sock")

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


def _way(name: str, stands_for: str, halves: int) -> PeerMethod:
    return PeerMethod(
        name=name,
        stands_for=stands_for,
        group="copies twice",
        sender=partial(ZmqSender, name=name, halves=halves),
        receiver=partial(ZmqReceiver, name=name, halves=halves),
    )


WAYS = (
    _way("zmq_lockstep", "one shared buffer in lock-step over ZMQ (verl's bucketed transfer)", 1),
    _way("zmq_double", "two halves, one acknowledgement, over ZMQ (checkpoint-engine)", 2),
)
