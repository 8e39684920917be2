"""A trainer: holds a version of the test model, or of a checkpoint, and publishes it on command."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import liveweight as lw
from liveweight.errors import DeadlineExceeded
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, BucketDamaged, OfferMade
from liveweight.rounds.replica import WireReplica
from liveweight.rounds.undo_and_verify import ReplicaVerdict
from liveweight.spec.deadline import Deadline
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.ipc.ring_packing import BucketPacking
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.messages import Committed, Phase, Progress
from liveweight.wire.messages.values import RoundId
from tests.support import model
from tests.support.programs.program import Console


def main(config: dict[str, Any]) -> None:
    """The config has engines, secret, directory, offer, verify, timeout_s, run, dtype, quorum; and `checkpoints`, if those are to be
    published, in the place of labels from 0 on."""
    torch.set_num_threads(1)
    console, bus = Console(), Bus()
    values = values_of(config.get("checkpoints"))
    weights = (
        model.tree(values(0)) if "checkpoints" in config else model.module(0, getattr(torch, config["dtype"]))
    )
    secret = load_or_create_secret(Path(config["secret"]))
    source: object = lw.share_module(weights) if config["offer"] == "live" else weights
    pack = BucketPacking.pack

    def packed(packing: BucketPacking, bucket: int, segment: int) -> tuple[int, int]:
        return damaged(console, packing, segment, pack(packing, bucket, segment))

    setattr(BucketPacking, "pack", packed)  # noqa: B010 - in this process every bucket passes the test's hands
    with (
        bus.subscribe(lambda event: damage(console, weights, event)),
        bus.subscribe(console.on_event),
        lw.Publisher(
            source,
            engines=[Watched(console, secret, *engine) for engine in enumerate(config["engines"])],
            secret=secret,
            directory=Path(config["directory"]),
            offer=config["offer"],
            verify=config["verify"],
            timeout_s=config["timeout_s"],
            lease_s=config["lease_s"],
            quorum=config["quorum"],
            replica_timeout_s=config.get("replica_timeout_s"),
            behind=config.get("behind", "serve"),
            run=config["run"],
            transfer_mode=config.get("transfer_mode", "ipc"),
            address=config.get("address"),
            threads=2,
            bus=bus,
        ) as publisher,
    ):
        console.at_once["revoke"] = revoke
        console.send(ready="")
        while (command := console.commands.get())["do"] != "stop":
            console.serve(command, lambda asked: act(asked, publisher, weights, values))
        console.send(id=command["id"])


Values = Callable[[int], Mapping[str, torch.Tensor]]


def values_of(checkpoints: list[str] | None) -> Values:
    """The weights that a label stands for."""
    return model.full if checkpoints is None else lambda label: read_checkpoint(checkpoints[label])


def read_checkpoint(directory: str) -> dict[str, torch.Tensor]:
    """All its tensors."""
    return {
        name: tensor
        for file in Path(directory).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


class Watched(WireReplica):
    """A replica at which the trainer can be held: when all its ranks have staged, before it asks for the vote, before it commits, after
    it waited in vain."""

    def __init__(self, console: Console, secret: Secret, number: int, address: str) -> None:
        super().__init__(address, secret)
        self._console, self._number = console, number

    def status(self, round_id: RoundId, until: Phase, deadline: Deadline) -> Progress:
        """As it is; that all have staged is a moment, and so is an answer that does not come."""
        if until == "verified":
            self._console.moment("Verifying", self._number)
        try:
            return super().status(round_id, until, deadline)
        except DeadlineExceeded:
            self._console.moment("Silence", self._number)
            raise

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """As it is, after a moment."""
        self._console.moment("Voting", self._number)
        super().vote(round_id, lease_s, deadline)

    def commit(self, round_id: RoundId, deadline: Deadline) -> Committed:
        """As it is, after a moment."""
        self._console.moment("Committing", self._number)
        return super().commit(round_id, deadline)


def damage(console: Console, weights: torch.nn.Module, event: AnyEvent) -> None:
    """If the test asked for it: flip one bit of what is offered, after it was digested."""
    if isinstance(event, BucketDamaged):
        console.send(damaged=event.tensor)
    if isinstance(event, OfferMade) and console.armed == "arena":
        console.armed = None
        if event.kind == "live":
            address = next(weights.parameters()).data_ptr()
        else:
            arenas = [found for found in gc.get_objects() if isinstance(found, SharedArena)]
            address = arenas[0].memory.address
        ctypes.c_ubyte.from_address(address).value ^= 1


def revoke() -> None:
    """Raise the generation of everything that is offered, as a freeze does that does not wait for readers."""
    for arena in [found for found in gc.get_objects() if type(found) is SharedArena]:
        arena.raise_generation()


def damaged(
    console: Console, packing: BucketPacking, segment: int, packed: tuple[int, int]
) -> tuple[int, int]:
    """If the test asked for it: flip one bit of a bucket that was packed, once or every time."""
    if console.armed in ("bucket", "every bucket"):
        console.armed = None if console.armed == "bucket" else console.armed
        ctypes.c_ubyte.from_address(packing.segments[segment].address).value ^= 1
    return packed


def act(
    command: dict[str, Any], publisher: lw.Publisher, weights: torch.nn.Module, values: Values
) -> dict[str, object]:
    """What the test may ask of a trainer."""
    match command["do"]:
        case "set":
            model.load(weights, values(command["label"]))
            return {}
        case "offer":
            model.load(weights, values(command["label"]))
            publisher.offer(command["label"])
            return {}
        case "close":
            publisher.close()
            return {"threads": [thread.name for thread in threading.enumerate()]}
        case "publish":
            model.load(weights, values(command["label"]))
            report = publisher.publish(command.get("name", command["label"]))
            return {
                "unchanged": report.unchanged,
                "verified": report.verified,
                "behind": list(report.behind),
                "restarted": [replica.name for replica in report.replicas if replica.restarted],
                "offer": report.offer,
                "digest": report.version.digest,
            }
        case "fleet":
            fleet = publisher.fleet()
            return {
                "version": None if fleet.version is None else fleet.version.label,
                "behind": list(fleet.behind),
                "restarted": [replica.name for replica in fleet.replicas if replica.restarted],
                "serving": [None if one.serving is None else one.serving.label for one in fleet.replicas],
            }
        case "catch_up":
            caught = publisher.catch_up()
            if caught is None:
                return {"caught_up": False}
            restarted = [replica.name for replica in caught.replicas if replica.restarted]
            return {"behind": list(caught.behind), "restarted": restarted}
        case "undo":
            return {"serving": [None if v is None else v.label for v in publisher.undo()]}
        case "verify":
            found = publisher.verify()
            return {
                "match": found.match,
                "version": found.version.label,
                "replicas": [verdict_json(replica) for replica in found.replicas],
            }
        case other:
            raise ValueError(other)


def verdict_json(replica: ReplicaVerdict) -> dict[str, object]:
    """A replica's verdict, as JSON has it."""
    fault, verdict = replica.fault, replica.verdict
    facts: dict[str, object] = {"name": replica.name, "match": replica.match}
    if verdict is not None:
        facts |= {"digest": verdict.digest, "mismatches": [[m.name, m.ranks] for m in verdict.mismatches]}
    return facts if fault is None else facts | {"code": fault.code, "text": str(fault)}
