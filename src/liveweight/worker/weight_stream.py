"""A weight stream: an offer as an iterator of whole tensors, read a few at a time. For programs that load weights their own way.

Owns a thread that reads ahead, a bounded queue between it and the caller, and the memory of the queued tensors. Nothing here depends on
the transfer mode: every offer is read through a Reader (transports/port), some tensors at a time, into memory that the tensors keep.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.cpu import allocate_tensors
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import DigestMismatch, LiveWeightError, Refused, Unavailable
from liveweight.plan.digests import plan_digests
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout, Placement, contiguous_strides
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import whole
from liveweight.transports.port import Reader
from liveweight.wire.messages.values import Offer
from liveweight.worker.staging import StagingStopped, stage

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 64 << 20
"""What is read at a time, unless a tensor is larger: small tensors together, because every read of an offer has a fixed cost."""
POLL_S = 0.1

Named: TypeAlias = "tuple[str, torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableOffer:
    """An offer, its tensors, their digests if they are known, and the reader for it."""

    offer: Offer
    manifest: Manifest
    lanes: Lanes | None
    reader: Reader
    kernels: Kernels


class OfferAccess(Protocol):
    """How a stream opens and releases its offer."""

    def open(self, deadline: Deadline) -> ReadableOffer:
        """Called first, in the reading thread."""

    def interrupt(self) -> None:
        """End an `open` that waits. From any thread."""

    def release(self, *, read: bool) -> None:
        """Release the offer: nothing is read any more. `read`: every tensor was. Called once, by the reading thread, also after an
        error."""


class WeightStream:
    """Yields every tensor of an offer as (name, tensor), in the manifest's order; tied names follow each other, with one tensor.

    The tensors are the caller's, on the host, and keep their memory themselves. At most `prefetch` chunks are read ahead. Errors are
    raised by `next`. Leaving the loop early, an error in it, `close` and losing the last reference all end the reading, and free
    what was read.
    """

    def __init__(
        self,
        access: OfferAccess,
        *,
        timeout_s: float,
        prefetch: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Reading begins at once. `timeout_s` is for all of it."""
        if prefetch < 1 or chunk_bytes < 1:
            raise Refused(f"a stream that reads {prefetch} chunks of {chunk_bytes} bytes ahead")
        reading = _Reading(access, Deadline.after(timeout_s), prefetch, chunk_bytes)
        self._reading = reading
        self._tensors = _tensors(reading)
        reading.thread.start()
        # A generator that was never started does not run its `finally`. Not at exit: the thread ends with the process.
        weakref.finalize(self, reading.close).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Named:
        return next(self._tensors)

    def close(self) -> None:
        """End the reading, and wait until it has ended. May be called twice."""
        self._tensors.close()
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors(reading: _Reading) -> Generator[Named, None, None]:
    """Ends the reading when the loop over it ends, however it ends."""
    try:
        while (chunk := reading.take()) is not None:
            yield from chunk
            del chunk
    finally:
        reading.close()


class _Reading:
    """The thread that reads ahead. It holds no reference to the stream, so that losing the stream ends the reading."""

    def __init__(self, access: OfferAccess, deadline: Deadline, prefetch: int, chunk_bytes: int) -> None:
        self._access, self._deadline, self._chunk_bytes = access, deadline, chunk_bytes
        self._ready: queue.Queue[list[Named] | BaseException | None] = queue.Queue(prefetch)
        self._stopping = threading.Event()
        self._whole = False
        self.thread = threading.Thread(target=self._run, name="liveweight-stream", daemon=True)

    def take(self) -> list[Named] | None:
        """The next tensors; None at the end. Raises the error of the reading thread."""
        try:
            item = self._ready.get(timeout=self._deadline.remaining_s() + POLL_S)
        except queue.Empty:
            raise self._deadline.exceeded("the next tensors of the stream") from None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop, and wait until nothing is read any more."""
        self._stopping.set()
        self._access.interrupt()
        while self.thread.is_alive():
            self._drain()
            self.thread.join(POLL_S)
        self._drain()

    def _drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()

    def _run(self) -> None:
        try:
            ended = self._read()
        finally:
            self._access.release(read=self._whole)
        self._put(ended)

    def _read(self) -> BaseException | None:
        """Read everything. Returns the error that ended it, or None: it came to its end, or the caller left."""
        try:
            source, done = self._access.open(self._deadline), 0
            with CopyThreads(1) as copy_threads:
                for specs in _chunks(source.manifest, self._chunk_bytes):
                    chunk = self._chunk(source, done, specs, copy_threads)
                    if chunk is None or not self._put(chunk):
                        return None
                    done += len(specs)
                    del chunk
            self._whole = True
        except LiveWeightError as error:
            return error
        except Exception as error:
            return Unavailable(f"{type(error).__name__}: {error}")
        return None

    def _chunk(
        self, source: ReadableOffer, first: int, specs: Sequence[TensorSpec], copy_threads: CopyThreads
    ) -> list[Named] | None:
        """Some tensors, read and compared with their digests; None if the stream was closed."""
        layout = _apart(specs)
        _, parts = allocate_tensors(layout.memories_bytes, "a stream's tensors")
        shadow = [Memory.of_view(part) for part in parts]
        reading = source.reader.bind(source.offer, layout, shadow, self._deadline)
        done = stage(
            reading,
            copy_threads=copy_threads,
            pace_bytes_per_s=None,
            stop=self._stopping.is_set,
            deadline=self._deadline,
        )
        if isinstance(done, StagingStopped):
            return None
        if source.lanes is not None:
            _check(source, layout, shadow, source.lanes[first : first + len(specs)])
        shaped = [_shaped(part, spec) for part, spec in zip(parts, specs, strict=True)]
        return [(name, tensor) for spec, tensor in zip(specs, shaped, strict=True) for name in spec.names]

    def _put(self, item: list[Named] | BaseException | None) -> bool:
        """Queue it for the caller when there is room. False if the stream was closed."""
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False


def _check(source: ReadableOffer, layout: Layout, shadow: Sequence[Memory], wanted: Lanes) -> None:
    """Raise DigestMismatch with the names of tensors that are not what was offered."""
    plan = plan_digests(layout)
    found = source.kernels.bind_digest(plan.rows, shadow, plan.slots).run(0, len(plan.rows))
    wrong = [
        spec.name for spec, bad in zip(layout.tensors, (found != wanted).any(axis=1), strict=True) if bad
    ]
    if wrong:
        raise DigestMismatch(wrong, f"what was streamed from {source.offer.source}")


def _chunks(manifest: Manifest, chunk_bytes: int) -> Iterator[list[TensorSpec]]:
    """The tensors in their order, together up to that size."""
    chunk: list[TensorSpec] = []
    size = 0
    for spec in manifest:
        if chunk and size + spec.size_bytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(spec)
        size += spec.size_bytes
    if chunk:
        yield chunk


def _apart(specs: Sequence[TensorSpec]) -> Layout:
    """Whole tensors, each in a memory of its own: the caller may keep one and let the others go."""
    placements = [
        Placement(
            name=spec.name,
            region=whole(spec.shape),
            memory=number,
            offset_bytes=0,
            strides_bytes=contiguous_strides(spec.shape, spec.dtype),
        )
        for number, spec in enumerate(specs)
    ]
    sizes = tuple(spec.size_bytes for spec in specs)
    return Layout(tensors=tuple(specs), memories_bytes=sizes, placements=tuple(placements))


def _shaped(part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype.value)
    if spec.elements == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return part.view(dtype).view(spec.shape)
