"""A rank: holds the test model's parameters, steps through boundaries, and tells the test what it holds."""

from __future__ import annotations

import ctypes
import queue
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import liveweight as lw
from liveweight.observe.bus import Bus
from liveweight.observe.events import RankStaged
from liveweight.worker.digest_while_staging import DigestWhileStaging
from liveweight.worker.targets.torch_target import TensorTarget
from tests.support import model
from tests.support.programs.program import Console

CHUNK_BYTES = 1024
"""Small, so that an overwriting in place has a middle."""
TORN: list[str] = []
"""Why the last boundary said that this rank is torn, if it did."""
GROUP_S = 30.0
"""Longer than a test holds a rank, and shorter than it waits for one: gloo may miss that a peer was killed."""


def main(config: dict[str, Any]) -> None:
    """The config has address, secret, rank, world, store, swap, shadow, threads, label."""
    rank, world = config["rank"], config["world"]
    torch.set_num_threads(1)
    console, bus = Console(), Bus()
    group = None
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{config['store']}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_S),
        )
        group = dist.group.WORLD
    held = model.parameters(rank, world, config["label"], getattr(torch, config["dtype"]))
    target = TensorTarget(held, exchange=config["exchange"])
    damage_when_landed(console, target)
    with (
        bus.subscribe(lambda event: damage(console, target) if isinstance(event, RankStaged) else None),
        bus.subscribe(console.on_event),
        lw.Receiver(
            target,
            address=config["address"],
            secret=Path(config["secret"]),
            rank=rank,
            world=world,
            group=group,
            threads=config["threads"],
            shadow=config["shadow"],
            chunk_bytes=CHUNK_BYTES,
            hooks=[lambda: console.moment("Hook", rank), lambda: fail_once(console)],
            weights_from=config.get("weights_from"),
            bus=bus,
        ) as receiver,
    ):
        console.send(ready=receiver.address)
        serve(console, receiver, {name: tensor for name, (tensor, _) in held.items()})
    if world > 1:
        dist.destroy_process_group()


def damage(console: Console, target: TensorTarget) -> None:
    """If the test asked for it: flip one bit of the shadow, or, in place, of what is live."""
    if console.armed in ("shadow", "live"):
        memories = target.shadow() if console.armed == "shadow" else target.live()
        console.armed = None
        ctypes.c_ubyte.from_address(memories[0].address).value ^= 1


def damage_when_landed(console: Console, target: TensorTarget) -> None:
    """Where what has landed is digested before all of it is there: before that."""
    landed = DigestWhileStaging.landed

    def damaged(ahead: DigestWhileStaging, first: int, last: int) -> None:
        damage(console, target)
        landed(ahead, first, last)

    setattr(DigestWhileStaging, "landed", damaged)  # noqa: B010 - in this process all passes the test's hands


class ToldToFail(RuntimeError):
    """The error of a hook that the test makes fail."""


def fail_once(console: Console) -> None:
    """If the test asked for it: a hook that fails, once, or also on the way back."""
    if console.armed in ("hook", "hook, and on the way back"):
        console.armed = None if console.armed == "hook" else "hook"
        raise ToldToFail("this hook was told to fail")


def serve(console: Console, receiver: lw.Receiver, tensors: dict[str, torch.Tensor]) -> None:
    """Step until the stop command. In a replica of several, one rank's stop reaches all."""
    while True:
        try:
            boundary(console, receiver)
            stop = serve_command(console, receiver, tensors)
        except (lw.LiveWeightError, RuntimeError) as error:  # gloo's errors are RuntimeErrors
            console.send(lost=str(error), fingerprint=model.fingerprint(tensors))
            console.commands.get()  # the replica's leader lives until the test has seen what it makes of this
            raise
        if stop:
            return


def boundary(console: Console, receiver: lw.Receiver) -> None:
    """The boundary of a step. One that a hook ended is called again: it finishes, and does not wait for the others again."""
    try:
        receiver.at_boundary(idle_s=0.02)
    except lw.Torn as torn:
        TORN[:] = [str(torn)]
    except ToldToFail:
        console.send(again="")
        receiver.at_boundary()
    else:
        TORN.clear()


def serve_command(console: Console, receiver: lw.Receiver, tensors: dict[str, torch.Tensor]) -> bool:
    """The rest of a step: serve one command; returns whether any rank got the stop command."""
    stop = torch.zeros(1, dtype=torch.int64)
    try:
        command: dict[str, Any] = console.commands.get_nowait()
    except queue.Empty:
        command = {"do": "nothing"}
    if command["do"] == "stop":
        stop[0] = 1
    elif command["do"] != "nothing":
        console.serve(command, lambda asked: act(asked, receiver, tensors))
    if receiver.world > 1:
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    return bool(stop.item())


def act(
    command: dict[str, Any], receiver: lw.Receiver, tensors: dict[str, torch.Tensor]
) -> dict[str, object]:
    """What the test may ask of a rank between two boundaries."""
    match command["do"]:
        case "state":
            version = receiver.version
            return {
                "version": None if version is None else version.label,
                "fingerprint": model.fingerprint(tensors),
                "torn": TORN[0] if TORN else None,
            }
        case "stream":
            return {"same": streams(receiver, command["label"])}
        case "flip":
            ctypes.c_ubyte.from_address(tensors[command["name"]].data_ptr()).value ^= 1
            return {}
        case other:
            raise ValueError(other)


def streams(receiver: lw.Receiver, label: int) -> bool:
    """Whether a stream of that version is, bit for bit and without a tensor too many, what the version holds."""
    found = {name: tensor.clone() for name, tensor in receiver.stream(label)}
    return model.fingerprint(found) == model.fingerprint(model.full(label))
