"""A rank of the ipc benchmark: a receiver, and the plain copy that is the limit, on the same memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import choose_kernels
from liveweight.lab.bench.child_process import JsonSocket, reset_peak, resident_bytes
from liveweight.lab.bench.model_shapes import parameters
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import converted
from liveweight.spec.manifest import TensorSpec
from liveweight.transports.ipc.reader import IpcReader
from liveweight.transports.registry import mode
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages.values import Offer
from liveweight.worker.receiver import RankReceiver
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging_thread import StagingSettings
from liveweight.worker.targets.torch_target import TensorTarget

WAIT_S = 600.0
IDLE_S = 0.1
"""How long an idle rank waits for a decision, which wakes it, before it checks for the benchmark's next command. Steps without work are no
part of a round."""


def main(line: JsonSocket, config: dict[str, Any]) -> None:
    """Serve until `stop`. The ranks synchronise over gloo; the benchmark sends commands to each by its socket."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = config["rank"], config["world"]
    group = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{config['store']}", rank=rank, world_size=world)
        group = dist.group.WORLD
    specs = converted(config["specs"], list[TensorSpec])
    secret, kernels = load_or_create_secret(Path(config["secret"])), choose_kernels()
    target = TensorTarget(parameters(specs, rank, world), kernels=kernels)
    with RankReceiver(
        target,
        address=config["address"],
        secret=secret,
        kernels=kernels,
        readers={name: mode(name).reader(secret, kernels) for name in config.get("modes", ("ipc",))},
        rank=rank,
        world=world,
        group=group,
        settings=StagingSettings(threads=config["threads"]),
    ) as receiver:
        line.send(ready=receiver.address)
        _serve(line, receiver, target, IpcReader(secret, kernels))
    line.send(done=True)
    if world > 1:
        dist.destroy_process_group()


def _serve(line: JsonSocket, receiver: RankReceiver, target: TensorTarget, reader: IpcReader) -> None:
    """Step through boundaries, and execute the benchmark's commands until `stop`."""
    limits = PlainCopy(target, reader, receiver.rank)
    resident = 0
    while True:
        receiver.at_boundary(idle_s=IDLE_S)
        match _together(line, receiver.rank, receiver.world):
            case None:
                continue
            case {"do": "stop"}:
                return
            case {"do": "limit", "offer": offer}:
                line.send(span=limits.run(line, converted(offer, Offer)))
            case {"do": "digest"}:
                line.send(lanes=digest(target).hex())
            case {"do": "reset"}:
                reset_peak()
                resident = resident_bytes("VmRSS") - resident_bytes("RssShmem")
                line.send(done=True)
            case {"do": "memory"}:
                mapped = resident_bytes("RssShmem")
                line.send(peak_extra=max(0, resident_bytes("VmHWM") - mapped - resident))


def _together(line: JsonSocket, rank: int, world: int) -> dict[str, Any] | None:
    """The benchmark's next command to this rank. All ranks read theirs at the same step, which rank 0 chooses."""
    import torch
    import torch.distributed as dist

    command = line.receive_now() if rank == 0 else None
    if world == 1:
        return command
    has_command = torch.tensor([command is not None])
    dist.broadcast(has_command, src=0)
    return line.receive(Deadline.after(WAIT_S)) if rank and has_command.item() else command


class PlainCopy:
    """The limit: this rank's share of the source's bytes, copied into its shadow in one plain copy."""

    def __init__(self, target: TensorTarget, reader: IpcReader, rank: int) -> None:
        self._target, self._reader, self._rank = target, reader, rank

    def run(self, line: JsonSocket, offer: Offer) -> tuple[float, float]:
        """When the copy began and ended, on the clock that all processes of the host share."""
        shadow = self._target.shadow()
        reading = self._reader.bind_arenas(offer, self._target.layout, shadow, Deadline.after(WAIT_S))
        source = reading.attachment.arenas[0].memory.bytes()
        share = self._target.layout.placed_bytes
        pieces = _pieces(source, [memory.bytes() for memory in shadow], share * self._rank, share)
        line.send(set=True)
        line.receive(Deadline.after(WAIT_S))
        began = time.monotonic()
        for to, of in pieces:
            np.copyto(to, of)
        return began, time.monotonic()


def _pieces(
    source: npt.NDArray[np.uint8], shadows: list[npt.NDArray[np.uint8]], at: int, size: int
) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """One run of the source's bytes, into a shadow that is one piece of memory seen as many parameters."""
    pieces, left = [], min(size, len(source) - at)
    for shadow in shadows:
        part = min(left, len(shadow))
        if part > 0:
            pieces.append((shadow[:part], source[at : at + part]))
            at, left = at + part, left - part
    return pieces


def digest(target: TensorTarget) -> bytes:
    """A digest of the live weights."""
    with CopyThreads(1) as copy_threads:
        reading = ShadowDigest(target.layout, choose_kernels())
        lanes = reading.of(
            target.live(), copy_threads=copy_threads, stop=lambda: False, deadline=Deadline.after(WAIT_S)
        )
    if not isinstance(lanes, np.ndarray):
        raise TypeError("a digest that nobody stopped was stopped")
    return lanes_to_bytes(lanes)
