"""Streams for a program's own loader: a version that a source holds ready, as an iterator of (name, tensor).

Composes a hold of the source with the reader of its transfer mode, whichever that is; both are the stream's own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from liveweight.devices.device import CPU
from liveweight.errors import WrongState
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.rounds.read_lease import ReadLease
from liveweight.spec.deadline import Deadline
from liveweight.transports.registry import mode
from liveweight.wire.credentials import Secret
from liveweight.wire.host_identity import this_host
from liveweight.wire.waker import Waker
from liveweight.worker.weight_stream import ReadableOffer, WeightStream

MARGIN_S = 5.0


class HeldOffer:
    """One version of a source, held while it is streamed. Implements the stream's Access."""

    def __init__(self, source: str, secret: Secret, version: str | int | None) -> None:
        self._source, self._secret = source, secret
        self._version = None if version is None else str(version)
        self._cancel = Waker()
        self._stack = ExitStack()

    def open(self, deadline: Deadline) -> ReadableOffer:
        """Ask the source for the version, and make a reader of its mode."""
        lease = ReadLease(
            self._source,
            self._secret,
            requester=f"a stream of {this_host()}/{os.getpid()}",
            version=self._version,
            lease_s=deadline.remaining_s() + MARGIN_S,
            deadline=deadline,
            cancel=self._cancel,
        )
        self._stack.enter_context(lease)
        held, kernels = lease.held, CPU.choose().kernels
        reader = mode(held.offer.mode).reader(self._secret, kernels, CPU)
        self._stack.callback(reader.close)
        digests, tensors = held.digests, len(held.manifest.tensors)
        return ReadableOffer(
            offer=held.offer,
            manifest=held.manifest,
            lanes=None if digests is None else lanes_from_bytes(digests, tensors),
            reader=reader,
            kernels=kernels,
        )

    def interrupt(self) -> None:
        """End the wait for a source that does not answer."""
        self._cancel.wake()

    def release(self) -> None:
        """Give the version back: the source may go on."""
        self._stack.close()
        self._cancel.close()


class Streaming:
    """What a receiver with a source can do beside rounds. For the main thread."""

    _streams_from: tuple[str, Secret] | None = None

    def stream(
        self, version: str | int | None = None, *, prefetch: int = 2, timeout_s: float = 60.0
    ) -> WeightStream:
        """All tensors of a version that the source (`weights_from`) holds, as (name, tensor), one after the other; None: the newest.

            for name, tensor in receiver.stream("step_100"):
                load(name, tensor)

        In every transfer mode alike: whole tensors in the manifest's order, in host memory, read `prefetch` chunks ahead by a thread, each
        compared with its digest where the source knows it. What goes wrong is raised here, in the loop. Leaving the loop frees everything.
        It touches neither the receiver's weights nor its version.
        """
        if self._streams_from is None:
            raise WrongState("without weights_from, the address of a source", "stream")
        source, secret = self._streams_from
        return WeightStream(HeldOffer(source, secret, version), timeout_s=timeout_s, prefetch=prefetch)
