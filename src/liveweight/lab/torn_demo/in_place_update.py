"""The left side's updates: buckets written in place, into the weights that an engine serves.

The model: the trainer holds each rank's share of the new version and copies it, one bucket after the other, into the memory that the rank
computes with, as one-sided writes do. Loaders that receive a bucket and copy it into live parameters themselves end in the same state:
after bucket k, the first k are new and the others old. If the engine is paused, no step runs meanwhile: requests end with the tokens they
have, and their clients continue them after the resume, over a refilled cache. Not modelled: the advantage of such systems, which need no
second copy.
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
"""The hook's name in an engine's configuration."""


# In a rank of the left engine.


def share_live(model: Model) -> None:
    """The hook: moves a rank's loaded weights to memory that any process with access to /proc/PID/fd can write."""
    share_module(model, lambda size_bytes: WritableArena(os.memfd_create(NAME), size_bytes))


class WritableArena:
    """Memory under a descriptor, mapped writable. Nothing tells a reader that it changes: no seal, no generation."""

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
    """The live weights of the rank with this process id."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # this descriptor was closed meanwhile: try the next one
            if path.readlink().name.startswith(f"memfd:{NAME}"):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    return WritableArena(descriptor, os.fstat(descriptor).st_size).memory
                finally:
                    os.close(descriptor)
    raise Unavailable(f"process {pid} has no weights that others can write")


class InPlaceConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to write: a checkpoint's shares of `ranks` ranks, in buckets. `stop_after`: stop after this bucket, to be killed there."""

    checkpoint: str
    ranks: int
    buckets: int
    paused: bool
    stop_after: int | None


def trainer_main(descriptor: int) -> None:
    """The process's main function."""
    run(descriptor, InPlaceConfig, _train)


def _train(channel: StepChannel[InPlaceConfig | Go], config: InPlaceConfig) -> None:
    """Load, receive the engine's URL, and write. Before it is to be killed, report that and wait."""
    shares = [share_of(Path(config.checkpoint), rank, config.ranks) for rank in range(config.ranks)]
    channel.send(ChildMessage("ready"))
    served = engine_of(channel)
    engine, live = EngineClient(served.url), [live_memory(pid) for pid in served.pids]
    if config.paused:
        engine.pause("abort", Deadline.after(ANSWER_S))
    for written in write(shares, live, config.buckets):
        if written == config.stop_after:
            channel.send(ChildMessage("middle", f"{written} of {config.buckets} buckets are written"))
            channel.receive()
    if config.paused:
        engine.resume(Deadline.after(ANSWER_S))
    channel.send(ChildMessage("done"))


def write(sources: Sequence[Memory], targets: Sequence[Memory], buckets: int) -> Iterator[int]:
    """Copy bucket after bucket, each to all ranks. Yields the number of buckets written so far."""
    for number in range(buckets):
        for source, target in zip(sources, targets, strict=True):
            start, end = (source.size_bytes * at // buckets for at in (number, number + 1))
            target.bytes()[start:end] = source.bytes()[start:end]
        yield number + 1


class _RankPosition(Solo):
    """The position of one rank, for cutting its share. There are no other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def share_of(directory: Path, rank: int, size: int) -> Memory:
    """Load a rank's share of a checkpoint by the engine's own layers and loader, in the layout of the rank's weights."""
    import torch

    from liveweight.engine.models.model import build
    from liveweight.engine.models.model_spec import ModelSpec
    from liveweight.engine.rank.checkpoint_loading import load

    spec = ModelSpec.read(directory)
    model = build(spec, _RankPosition(rank, size), dtype=getattr(torch, spec.dtype), device="cpu", draft=True)
    load(model, directory)
    return share_module(model, SharedArena).arena.memory
