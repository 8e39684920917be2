"""The left side's updates: buckets written in place, into the weights that an engine serves.

What is modelled: the trainer holds each rank's share of the new version and copies it, a bucket after the other, into the memory that the
rank computes with, as one-sided writes do. Loaders that receive a bucket and copy it into live parameters themselves end in the same
state: after bucket k, the first k are new and the others old. Paused, no step runs meanwhile: requests are ended with what they have and
their clients go on with them after the resume, over a cache that is filled anew. Not modelled: what such systems gain by it, which
is that they need no second copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from liveweight.devices.cpu import mapped
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.engine.models.forward import Solo
from liveweight.engine.serving.step_channel import StepChannel
from liveweight.errors import Unavailable
from liveweight.lab.torn_demo.processes import ChildMessage, Go, engine_of, run
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline
from liveweight.trainer.offers.live import share_module
from liveweight.transports.ipc.arena import SharedArena

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model

ANSWER_S = 60.0
NAME = "liveweight-torn"
HOOK = f"{__name__}:share_live"
"""The hook, as an engine's configuration names it."""


# In a rank of the left engine.


def share_live(model: Model) -> None:
    """The hook: moves a rank's weights, once loaded, to memory that whoever may look into its process can write."""
    share_module(model, lambda size_bytes: WritableArena(os.memfd_create(NAME), size_bytes))


class WritableArena:
    """Memory under a descriptor, mapped writable, with nothing that would tell a reader that it changes: no seal, no generation."""

    device: Device = CPU
    generation = 0

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)
        mapping = mmap.mmap(descriptor, size_bytes)
        self.memory: Memory = mapped(mapping, 0, size_bytes, writable=True)

    def raise_generation(self) -> int:
        """There is none to raise."""
        return self.generation

    def close(self) -> None:
        """The mapping goes with its last view, the descriptor with its process."""


# The trainer.


def live_memory(pid: int) -> Memory:
    """The live weights of the rank that is this process."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile: another one
            if path.readlink().name.startswith(f"memfd:{NAME}"):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    return WritableArena(descriptor, os.fstat(descriptor).st_size).memory
                finally:
                    os.close(descriptor)
    raise Unavailable(f"process {pid} has no weights that others can write")


class InPlaceConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to write: a checkpoint's shares of so many ranks, in so many buckets; `stop_after` some of them, to be killed there."""

    checkpoint: str
    ranks: int
    buckets: int
    paused: bool
    stop_after: int | None


def trainer_main(descriptor: int) -> None:
    """The process."""
    run(descriptor, InPlaceConfig, _train)


def _train(pipe: StepChannel[InPlaceConfig | Go], config: InPlaceConfig) -> None:
    """Load, hear where the engine is, and write. Where it is to be killed it says so and waits for its end."""
    shares = [share_of(Path(config.checkpoint), rank, config.ranks) for rank in range(config.ranks)]
    pipe.send(ChildMessage("ready"))
    served = engine_of(pipe)
    engine, live = EngineClient(served.url), [live_memory(pid) for pid in served.pids]
    if config.paused:
        engine.pause("abort", Deadline.after(ANSWER_S))
    for written in write(shares, live, config.buckets):
        if written == config.stop_after:
            pipe.send(ChildMessage("middle", f"{written} of {config.buckets} buckets are written"))
            pipe.receive()
    if config.paused:
        engine.resume(Deadline.after(ANSWER_S))
    pipe.send(ChildMessage("done"))


def write(sources: Sequence[Memory], targets: Sequence[Memory], buckets: int) -> Iterator[int]:
    """Copy bucket after bucket, each to all ranks; says after each how many are written."""
    for number in range(buckets):
        for source, target in zip(sources, targets, strict=True):
            start, end = (source.size_bytes * at // buckets for at in (number, number + 1))
            target.bytes()[start:end] = source.bytes()[start:end]
        yield number + 1


class _Seat(Solo):
    """A rank's place, for cutting its share; no other rank is there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def share_of(directory: Path, rank: int, size: int) -> Memory:
    """A rank's share of a checkpoint, by the engine's own layers and loader, laid out as the rank's weights are."""
    import torch

    from liveweight.engine.models.model import build
    from liveweight.engine.models.spec import ModelSpec
    from liveweight.engine.rank.checkpoint_loading import load

    spec = ModelSpec.read(directory)
    model = build(spec, _Seat(rank, size), dtype=getattr(torch, spec.dtype), device="cpu", draft=True)
    load(model, directory)
    return share_module(model, SharedArena).arena.memory
