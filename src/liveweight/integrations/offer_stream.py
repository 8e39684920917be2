"""Streams for a program's own loader: a version that a source holds ready, as an iterator of (name, tensor).

Composes a read lease (rounds/read_lease) with the reader of the source's transfer mode. The stream owns both.
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
    """One version of a source, under a read lease while it is streamed. Implements OfferAccess (worker/weight_stream)."""

    def __init__(self, source: str, secret: Secret, version: str | int | None) -> None:
        self._source, self._secret = source, secret
        self._version = None if version is None else str(version)
        self._cancel = Waker()
        self._stack = ExitStack()
        self._lease: ReadLease | None = None

    def open(self, deadline: Deadline) -> ReadableOffer:
        """Acquire a read lease on the version, and open a reader of its transfer mode."""
        lease = ReadLease(
            self._source,
            self._secret,
            requester=f"a stream of {this_host()}/{os.getpid()}",
            version=self._version,
            lease_s=deadline.remaining_s() + MARGIN_S,
            deadline=deadline,
            cancel=self._cancel,
        )
        self._lease = self._stack.enter_context(lease)
        held, kernels = lease.grant, CPU.choose().kernels
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
        """End the wait for a source that does not answer. For any thread."""
        self._cancel.wake()

    def release(self, *, read: bool) -> None:
        """Release the read lease: the source may reuse the memory. `read`: every tensor was read."""
        if self._lease is not None:
            self._lease.release(read=read)
        self._stack.close()
        self._cancel.close()


class Streaming:
    """The `stream` method of lw.Receiver. For the main thread."""

    _streams_from: tuple[str, Secret] | None = None

    def stream(
        self, version: str | int | None = None, *, prefetch: int = 2, timeout_s: float = 60.0
    ) -> WeightStream:
        """Iterate over all tensors of a version that the source (`weights_from`) holds, as (name, tensor). None is the newest version.

            for name, tensor in receiver.stream("step_100"):
                load(name, tensor)

        Every transfer mode yields whole tensors in the manifest's order, in host memory. A thread reads `prefetch` chunks ahead, and
        compares each tensor with its digest if the source knows it. Errors are raised in the loop. Leaving the loop frees everything.
        The receiver's weights and version do not change.
        """
        if self._streams_from is None:
            raise WrongState("without weights_from, the address of a source", "stream")
        source, secret = self._streams_from
        return WeightStream(HeldOffer(source, secret, version), timeout_s=timeout_s, prefetch=prefetch)
