"""A rank of the nixl benchmark: its share of the source's bytes by a bare READ, staged, and staged with verification, into one memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.lab.bench.child_process import JsonSocket
from liveweight.lab.bench.model_shapes import parameters
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import converted
from liveweight.spec.manifest import TensorSpec
from liveweight.transports.attach import ask_source
from liveweight.transports.nixl.arena_location import location_from
from liveweight.transports.nixl.library import NixlAgent
from liveweight.transports.nixl.reader import NixlReader
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Message
from liveweight.wire.messages.values import Offer
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging import StagingStopped, stage
from liveweight.worker.targets.torch_target import TensorTarget

WAIT_S = 600.0


def main(line: JsonSocket, config: dict[str, Any]) -> None:
    """Read on request until `stop`. Every answer has its begin and end, on the clock that all processes share."""
    import torch

    torch.set_num_threads(1)
    specs = converted(config["specs"], list[TensorSpec])
    secret = load_or_create_secret(Path(config["secret"]))
    target = TensorTarget(parameters(specs, config["rank"], config["world"]))
    with (
        NixlReader(secret, choose_kernels(), name="gdr", direct=True) as reader,
        CopyThreads(1) as copy_threads,
    ):
        rank = _Rank(target, reader, copy_threads, secret)
        line.send(ready=True)
        while (command := line.receive(Deadline.after(WAIT_S)))["do"] != "stop":
            line.send(**rank.run(command["do"], converted(command["offer"], Offer)))


class _Rank:
    """A rank's state between rounds."""

    def __init__(
        self, target: TensorTarget, reader: NixlReader, copy_threads: CopyThreads, secret: Secret
    ) -> None:
        self._target, self._reader, self._copy_threads, self._secret = target, reader, copy_threads, secret
        self._digest = ShadowDigest(target.layout, choose_kernels())
        self._bare: BareRead | None = None

    def run(self, what: str, offer: Offer) -> dict[str, Any]:
        """One contender."""
        shadow = self._target.shadow()
        if what == "bare" and self._bare is None:
            self._bare = BareRead(offer, self._secret, shadow)
        lanes = b""
        began_s = time.monotonic()
        match what:
            case "bare":
                if self._bare is not None:
                    self._bare.run()
            case "plain":
                self._stage(offer, shadow)
            case "verified":
                lanes = self._verified(offer, shadow)
            case "digest":
                lanes = self._lanes(shadow)
            case _:
                raise ValueError(what)
        return {"span": (began_s, time.monotonic()), "lanes": lanes.hex()}

    def _stage(self, offer: Offer, shadow: Sequence[Memory]) -> None:
        deadline = Deadline.after(WAIT_S)
        reading = self._reader.bind(offer, self._target.layout, shadow, deadline)
        stage(reading, copy_threads=self._copy_threads, pace_bytes_per_s=None, stop=_never, deadline=deadline)

    def _verified(self, offer: Offer, shadow: Sequence[Memory]) -> bytes:
        """As a rank's staging thread does it (worker/staging_thread)."""
        deadline = Deadline.after(WAIT_S)
        reading = self._reader.bind(offer, self._target.layout, shadow, deadline)
        digesting = self._digest.begin(reading, shadow, self._copy_threads, ahead=reading.overlaps)
        stage(
            reading,
            copy_threads=self._copy_threads,
            pace_bytes_per_s=None,
            stop=_never,
            deadline=deadline,
            concurrent=digesting.concurrent,
        )
        lanes = digesting.finish(stop=_never, deadline=deadline)
        if isinstance(lanes, StagingStopped):
            raise TypeError("a stage that nobody stopped was stopped")
        return lanes_to_bytes(lanes)

    def _lanes(self, shadow: Sequence[Memory]) -> bytes:
        deadline = Deadline.after(WAIT_S)
        return lanes_to_bytes(self._digest.all_of(shadow, copy_threads=self._copy_threads, deadline=deadline))


def _never() -> bool:
    return False


class BareRead:
    """NIXL alone: one READ of the same number of bytes, from the source's arena into the same memory, registered and prepared once."""

    def __init__(self, offer: Offer, secret: Secret, shadow: Sequence[Memory]) -> None:
        deadline = Deadline.after(WAIT_S)
        attached = ask_source(offer, offer.layout, secret, Codec[Message](Message), WireLimits(), deadline)
        place = location_from(attached.memories[0], attached.layout.memories_bytes[0])
        first = min(memory.address for memory in shadow)
        last = max(memory.address + memory.size_bytes for memory in shadow)
        size = min(last - first, place.size_bytes)
        self._agent = NixlAgent("liveweight-bench", progress=False)
        here = np.array([[first, size, 0]], dtype=np.uint64)
        self._agent.register(here)
        peer = self._agent.add_peer(place.description)
        theirs = self._agent.prepare(np.array([[place.data, size, 0]], dtype=np.uint64), peer)
        self._request = self._agent.request(self._agent.prepare(here), theirs, 0, 1)

    def run(self) -> None:
        """Post the READ, and poll until it is done."""
        done = self._agent.post(self._request)
        while not done:
            done = self._agent.done(self._request)
