"""The torture's trainers: one publishes with liveweight, one writes into live weights. Each in a process of its own.

They are told what to publish, do it and say what came of it. Nothing in them knows that they are being struck.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from liveweight.checkpoint import CheckpointSource
from liveweight.engine.serving.step_channel import StepChannel
from liveweight.errors import LiveWeightError, RoundFailed, RoundOpen
from liveweight.integrations.vllm.engine import vllm
from liveweight.lab.bench.engine.live_trainer import module_of_checkpoint
from liveweight.lab.torn_demo.in_place_update import live_memory, share_of, write
from liveweight.lab.torn_demo.processes import ChildFailed, run_with
from liveweight.lab.torture.fault_plan import After
from liveweight.lab.torture.reporting_replica import ReportingReplica
from liveweight.observe.bus import Bus
from liveweight.observe.events import OfferKind
from liveweight.spec.deadline import Deadline
from liveweight.trainer.offers.live import share_module
from liveweight.trainer.publisher import RoundPublisher
from liveweight.transports.ipc.arena import SharedArena
from liveweight.wire.credentials import load_or_create_secret

if TYPE_CHECKING:
    import torch

FREE_S = 60.0
LOOK_S = 0.005

MakePublisher: TypeAlias = Callable[..., RoundPublisher]
"""`lw.Publisher`."""


class PublishingConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trainer that publishes: what there is to publish, and where. With a URL the engine is a vLLM, whose leader shall listen at the
    address and whose workers stage at that pace."""

    checkpoints: tuple[str, ...]
    address: str
    secret_file: str
    directory: str
    vllm_url: str | None = None
    pace_bytes_per_s: float | None = None


class WritingConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trainer that writes in place: as many buckets, each as long after the one before as a wire would take."""

    checkpoints: tuple[str, ...]
    ranks: int
    buckets: int
    bucket_s: float


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Publish that content under that label; for the one that writes, into these processes."""

    label: int
    content: int
    offer: OfferKind = "frozen"
    verify: bool = True
    timeout_s: float = 60.0
    lease_s: float = 10.0
    pids: tuple[int, ...] = ()


class TrainerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is ready. `parameters` is where its own weights lie."""

    parameters: int = 0


class RoundReached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a round has come."""

    name: After


class RoundResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round is over: committed, or failed with that code, of which `said` has the words."""

    label: int
    code: str | None
    took_s: float
    said: str = ""


Word: TypeAlias = TrainerReady | RoundReached | RoundResult | ChildFailed
Told: TypeAlias = PublishingConfig | WritingConfig | Publish


def publisher_main(descriptor: int, make: MakePublisher) -> None:
    """The process of a trainer that publishes."""
    run_with(descriptor, Told, partial(_publish_on_request, make))


def writer_main(descriptor: int) -> None:
    """The process of one that writes in place."""
    run_with(descriptor, Told, _write_on_request)


def _publish_on_request(make: MakePublisher, pipe: StepChannel[Told], config: Told) -> None:
    import torch

    torch.set_num_threads(1)
    if not isinstance(config, PublishingConfig):
        raise LiveWeightError("a publisher is told where to publish first")
    contents = [dict(CheckpointSource(Path(path)).tensors()) for path in config.checkpoints]
    module = module_of_checkpoint(Path(config.checkpoints[0]))
    with ExitStack() as stack:
        shared = stack.enter_context(share_module(module, SharedArena))
        publisher = stack.enter_context(
            make(
                shared,
                engines=[_engine(config, pipe)],
                secret=Path(config.secret_file),
                directory=Path(config.directory),
                timeout_s=FREE_S,
                threads=1,
                bus=Bus(),
            )
        )
        pipe.send(TrainerReady(parameters=shared.arena.memory.address))
        while isinstance(order := pipe.receive(), Publish):
            _load(module, contents[order.content])
            pipe.send(_published(publisher, order))


def _engine(config: PublishingConfig, pipe: StepChannel[Told]) -> str | ReportingReplica:
    """As `lw.Publisher` takes it."""
    if config.vllm_url is None:
        return config.address
    secret = load_or_create_secret(Path(config.secret_file))
    named = vllm(config.vllm_url, address=config.address, pace_bytes_per_s=config.pace_bytes_per_s)
    # While a round runs, its thread alone speaks: the program's waits for its end.
    return ReportingReplica(
        named.replica(secret, Path(config.secret_file)), lambda name: pipe.send(RoundReached(name=name))
    )


def _load(module: torch.nn.Module, content: dict[str, torch.Tensor]) -> None:
    """An optimiser's step, as large as it can be: every weight changes."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(content[name])


def _published(publisher: RoundPublisher, order: Publish) -> RoundResult:
    """Publish, once whoever held the engine has left it."""
    publisher.settings = dataclasses.replace(
        publisher.settings,
        offer=order.offer,
        verify=order.verify,
        timeout_s=order.timeout_s,
        lease_s=order.lease_s,
    )
    pause, free, began_s = threading.Event(), Deadline.after(order.timeout_s), time.monotonic()
    while True:
        code, said = None, ""
        try:
            publisher.publish(order.label)
        except RoundFailed as error:
            code, said = error.cause.code, str(error)
            if code == RoundOpen.code and free.remaining_s() > 0:
                pause.wait(LOOK_S)
                continue
        except LiveWeightError as error:
            code, said = error.code, str(error)
        return RoundResult(label=order.label, code=code, took_s=time.monotonic() - began_s, said=said)


def _write_on_request(pipe: StepChannel[Told], config: Told) -> None:
    import torch

    torch.set_num_threads(1)
    if not isinstance(config, WritingConfig):
        raise LiveWeightError("a writer is told what to write first")
    shares = [
        [share_of(Path(path), rank, config.ranks) for rank in range(config.ranks)]
        for path in config.checkpoints
    ]
    pause = threading.Event()
    pipe.send(TrainerReady())
    while isinstance(order := pipe.receive(), Publish):
        began_s = time.monotonic()
        targets = [live_memory(pid) for pid in order.pids]
        for _ in write(shares[order.content], targets, config.buckets):
            pause.wait(config.bucket_s)
        pipe.send(RoundResult(label=order.label, code=None, took_s=time.monotonic() - began_s))
