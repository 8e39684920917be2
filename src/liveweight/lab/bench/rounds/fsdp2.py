"""Rounds from a trainer of two ranks, beside those from one full source: the same bytes, to the same engine ranks.

Each rank is a process of its own that holds half of every tensor, as FSDP2 cuts it, and freezes with one thread.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from liveweight.devices.device import CPU
from liveweight.devices.kernels import choose
from liveweight.lab.bench.child_process import BenchProcess, JsonSocket
from liveweight.lab.bench.rounds.ipc_rank import WAIT_S
from liveweight.observe.bus import Bus
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import converted
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import counts
from liveweight.trainer.settings import PublisherSettings
from liveweight.trainer.sources.dtensor_placements import MeshCut, held
from liveweight.trainer.spmd.join_ranks import SpmdSettings, join_ranks
from liveweight.transports.registry import mode
from liveweight.wire.credentials import load_or_create_secret, socket_directory

WORLD = 2
WARM_ROUNDS = 2
"""Both shadows of every engine rank are bound before anything is timed."""


def sharded_rounds(config: dict[str, Any], rounds: int) -> list[float]:
    """Seconds of that many verified rounds, each from the call to the last commit, at the slower rank."""
    with ExitStack() as stack:
        commands = config | {"store": f"{config['store']}-trainer", "world": WORLD}
        ranks = [stack.enter_context(BenchProcess(main, commands | {"rank": rank})) for rank in range(WORLD)]
        for rank in ranks:
            rank.line.receive(Deadline.after(WAIT_S))
        taken = []
        for label in range(1, 1 + WARM_ROUNDS + rounds):
            for rank in ranks:
                rank.line.send(label=label)
            taken.append(max(rank.line.receive(Deadline.after(WAIT_S))["took"] for rank in ranks))
        for rank in ranks:
            rank.line.send(label=None)
        for rank in ranks:
            rank.line.receive(Deadline.after(WAIT_S))
    return taken[WARM_ROUNDS:]


def main(line: JsonSocket, config: dict[str, Any]) -> None:
    """One rank: publishes each label that it receives, until it receives none."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{config['store']}", rank=config["rank"], world_size=WORLD
    )
    tensors = _shards(converted(config["specs"], list[TensorSpec]), config["rank"])
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has no default group")
    publisher = join_ranks(tensors, group, _settings(config))
    line.send(ready=True)
    while (label := line.receive(Deadline.after(WAIT_S))["label"]) is not None:
        for tensor in tensors.values():
            tensor.to_local().view(-1)[:1] = label % 128
        began_s = time.monotonic()
        publisher.offer(label)
        publisher.wait()
        line.send(took=time.monotonic() - began_s)
    publisher.close()
    dist.destroy_process_group()
    line.send(ended=True)


def _shards(specs: list[TensorSpec], rank: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, found = init_device_mesh("cpu", (WORLD,)), {}
    for spec in specs:
        ((region, _),) = held(spec.shape, [MeshCut(dimension=0, parts=WORLD, which=rank)])
        local = torch.ones(counts(region), dtype=getattr(torch, spec.dtype.value))
        strides = torch.empty(spec.shape, device="meta").stride()
        found[spec.name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(spec.shape), stride=strides
        )
    return found


def _settings(config: dict[str, Any]) -> SpmdSettings:
    secret = load_or_create_secret(Path(config["secret"]))
    return SpmdSettings(
        secret=secret,
        directory=socket_directory(Path(config["secret"]).parent),
        mode=mode("ipc"),
        host=None,
        device=CPU,
        kernels=choose().kernels,
        threads=1,
        bus=Bus(),
        settings=PublisherSettings(timeout_s=WAIT_S),
        name=f"bench/{config['rank']}",
        run="sharded",
        engines=1,
        connect=lambda _: [WireReplica(config["address"], secret)],
    )
