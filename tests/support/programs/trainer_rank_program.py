"""One rank of a trainer: holds its shards of the test model, as FSDP2 or as plain DTensors, and publishes them on command."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import liveweight as lw
from liveweight.errors import LiveWeightError
from liveweight.observe.bus import Bus
from liveweight.transports.ipc.arena import SharedArena
from liveweight.wire.credentials import load_or_create_secret
from tests.support import model
from tests.support.programs.program import Console, describe
from tests.support.programs.trainer_program import Watched, read_checkpoint

BIG, BIGS = (4096, 4096), ("big.0.weight", "big.1.weight", "big.2.weight", "big.3.weight")


def main(config: dict[str, Any]) -> None:
    """The config has rank, world, store, style, engines, secret, directory, timeout_s, lease_s, run, transfer_mode, keep."""
    torch.set_num_threads(1)
    console, bus = Console(), Bus()
    rank, world = config["rank"], config["world"]
    dist.init_process_group("gloo", init_method=f"file://{config['store']}", rank=rank, world_size=world)
    weights: Any = (
        Checkpoint(world, config["checkpoint"]) if "checkpoint" in config else STYLES[config["style"]](world)
    )
    one_shot = isinstance(weights, OneShot)
    gathering = isinstance(weights, Gathered) and not one_shot
    secret = load_or_create_secret(Path(config["secret"]))
    with ExitStack() as stack:
        stack.enter_context(bus.subscribe(console.on_event))
        try:
            publisher = stack.enter_context(
                lw.Publisher(
                    weights.source if gathering else None if one_shot else weights,
                    engines=engines(console, secret, config["engines"]),
                    secret=secret,
                    directory=Path(config["directory"]),
                    timeout_s=config["timeout_s"],
                    lease_s=config["lease_s"],
                    run=config["run"],
                    transfer_mode=config.get("transfer_mode", "ipc"),
                    threads=1,
                    bus=bus,
                    group=dist.group.WORLD,
                    keep=config.get("keep"),
                )
            )
        except LiveWeightError as error:
            console.send(ready="", error=describe(error))
            return
        console.send(ready="")
        while (command := console.commands.get())["do"] != "stop":
            console.serve(command, lambda asked: act(asked, publisher, weights))
        console.send(id=command["id"])


def engines(console: Console, secret: Any, addresses: list[str]) -> list[Any]:
    """Leaders that the trainer can be held at; URLs as they are."""
    return [
        address if address.startswith("http") else Watched(console, secret, number, address)
        for number, address in enumerate(addresses)
    ]


def act(command: dict[str, Any], publisher: lw.Publisher, weights: Any) -> dict[str, object]:
    """What the test may ask of a rank."""
    match command["do"]:
        case "offer":
            weights.load(command["label"])
            publisher.offer(command["label"], tensors=next_pass(weights))
            weights.load(-1)  # the optimiser goes on: what was frozen does not change
            return {}
        case "wait":
            return report_json(publisher.wait())
        case "publish":
            weights.load(command["label"])
            label = command.get("name", command["label"])
            return report_json(publisher.publish(label, tensors=next_pass(weights)))
        case "fail":
            weights.fails = True
            return {}
        case "hurry":
            ranked: Any = publisher._ranked
            ranked.settings = dataclasses.replace(ranked.settings, timeout_s=command["timeout_s"])
            return {}
        case "memory":
            return memory()
        case "passes":
            return {"passes": weights.passes, "ended": weights.ended}
        case other:
            raise ValueError(other)


def next_pass(weights: Any) -> Any:
    """The iterator of the next version, of a trainer without a model; else None."""
    return weights.gather() if isinstance(weights, OneShot) else None


def report_json(report: lw.Report) -> dict[str, object]:
    """What the test compares of a report."""
    return {
        "version": report.version.label,
        "digest": report.version.digest,
        "verified": report.verified,
        "bytes": report.size_bytes,
    }


def memory() -> dict[str, object]:
    """What this process holds now, the most that it held since this was asked the last time, and what its arenas take."""
    status = Path("/proc/self/status").read_text().splitlines()
    now, peak = (
        next(int(line.split()[1]) << 10 for line in status if line.startswith(field))
        for field in ("VmRSS", "VmHWM")
    )
    Path("/proc/self/clear_refs").write_text("5")
    arenas = [found for found in gc.get_objects() if isinstance(found, SharedArena)]
    return {"now": now, "peak": peak, "arenas": [arena.size_bytes for arena in arenas]}


class Tensors(dict[str, torch.Tensor]):
    """A mapping of DTensors, all cut by the same placements as far as they have the dimensions; the rest are copies."""

    def __init__(self, mesh: DeviceMesh, placements: list[Placement]) -> None:
        super().__init__()
        for name, value in model.full(0).items():
            fit = [p if fits(p, value) else Replicate() for p in placements]
            self[name] = distribute_tensor(value, mesh, fit, src_data_rank=None)

    def load(self, label: int) -> None:
        """Give the shards that version's values, in place."""
        put(self, label)


class Checkpoint(dict[str, torch.Tensor]):
    """A checkpoint's tensors, cut by rows. It has the one version."""

    def __init__(self, world: int, directory: str) -> None:
        mesh = init_device_mesh("cpu", (world,))
        cut = {
            name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
            for name, value in read_checkpoint(directory).items()
        }
        super().__init__(cut)

    def load(self, label: object) -> None:
        """Nothing to do."""


class Big(dict[str, DTensor]):
    """Few large tensors, cut by rows; a version is its label, everywhere."""

    def __init__(self, world: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        for name in BIGS:
            local = torch.ones(BIG[0] // world, BIG[1], dtype=torch.bfloat16)
            self[name] = DTensor.from_local(local, mesh, [Shard(0)])

    def load(self, label: int) -> None:
        """Give the shards that version's values, in place."""
        for tensor in self.values():
            tensor.to_local().fill_(label)


def fits(placement: Placement, value: torch.Tensor) -> bool:
    return not isinstance(placement, Shard) or placement.dim < value.ndim


def put(tensors: Mapping[str, torch.Tensor], label: int) -> None:
    """Write a version's values into shards, by torch's own cuts."""
    values = model.full(abs(label) + 1000 if label < 0 else label)
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = values[name].to(tensor.dtype)
            if isinstance(tensor, DTensor):
                placed = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(placed.to_local())
            else:
                tensor.copy_(value)


class Fsdp(torch.nn.Module):
    """The test model, sharded by FSDP2; in 32 bits where the engine has 16, and with an alias of its embedding."""

    def __init__(self, world: int, **options: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        tree = model.tree({name: self.master(name, value) for name, value in model.full(0).items()})
        for name, child in tree.named_children():
            self.add_module(name, child)
        whole = {p for p in self.parameters() if not p.is_floating_point() or p.ndim == 0 or p.itemsize == 1}
        for layer in self.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self, mesh=mesh, ignored_params=whole, **options)
        self.fails = False

    @staticmethod
    def master(name: str, value: torch.Tensor) -> torch.Tensor:
        """What the trainer keeps."""
        return value if name.startswith("extra.") else value.float()

    def load(self, label: int) -> None:
        """Give the shards that version's values, in place."""
        put(dict(self.named_parameters()), label)
        if self.fails:
            self.register_parameter("late", torch.nn.Parameter(torch.ones(3)))


class Gathered:
    """A source whose passes are collectives: every rank brings its part of each tensor."""

    def __init__(self, world: int) -> None:
        self.label, self.passes, self.ended, self.fails = 0, 0, 0, False
        self._world = world
        metadata = [(name, spec.dtype, spec.shape) for name, spec in model.specs().items()]
        self.source = lw.GatheringSource(metadata, self.gather)

    def load(self, label: int) -> None:
        """The version that the next pass gathers."""
        self.label = label

    def gather(self) -> Any:
        """One pass."""
        self.passes += 1
        for name, value in model.full(abs(self.label)).items():
            arrived = torch.ones(1)
            dist.all_reduce(arrived)  # hangs unless every rank comes here
            assert arrived.item() == self._world
            if self.fails and name == "layers.0.v.weight":
                yield name, value[:1]
            else:
                yield name, value
        self.ended += 1


class OneShot(Gathered):
    """The same passes, handed over one by one."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        del self.source


def line(*placements: Placement) -> Any:
    return lambda world: Tensors(init_device_mesh("cpu", (world,)), list(placements))


def square(*placements: Placement) -> Any:
    return lambda world: Tensors(init_device_mesh("cpu", (2, world // 2)), list(placements))


STYLES: dict[str, Any] = {
    "fsdp2": Fsdp,
    "fsdp2 offloaded": lambda world: Fsdp(world, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "rows": line(Shard(0)),
    "columns": line(Shard(1)),
    "copies": line(Replicate()),
    "rows and columns": square(Shard(0), Shard(1)),
    "columns and rows": square(Shard(1), Shard(0)),
    "rows twice": square(Shard(0), Shard(0)),
    "copies of rows": square(Replicate(), Shard(0)),
    "gathered": Gathered,
    "one-shot": OneShot,
    "big": Big,
}
"""How a rank may hold the model."""
