"""The main functions of the torture's trainer processes: one publishes with liveweight, one writes into live weights.

They receive what to publish, publish it, and report the result. They do not know that they are being struck.
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
POLL_S = 0.005

MakePublisher: TypeAlias = Callable[..., RoundPublisher]
"""`lw.Publisher`."""


class PublishingConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trainer that publishes: what, and where. With `vllm_url` the engine is a vLLM, whose leader listens at the address and whose
    workers stage at that pace."""

    checkpoints: tuple[str, ...]
    address: str
    secret_file: str
    directory: str
    vllm_url: str | None = None
    pace_bytes_per_s: float | None = None


class WritingConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trainer that writes in place: the number of buckets, and the time of each, as long as a network would take."""

    checkpoints: tuple[str, ...]
    ranks: int
    buckets: int
    bucket_s: float


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Publish that content under that label. A writer writes it into the processes `pids`."""

    label: int
    content: int
    offer: OfferKind = "frozen"
    verify: bool = True
    timeout_s: float = 60.0
    lease_s: float = 10.0
    pids: tuple[int, ...] = ()


class TrainerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer is ready. `parameters` is the address of its own weights."""

    parameters: int = 0


class RoundReached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round has reached this moment."""

    name: After


class RoundResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round is over: committed, or failed with that error code and message."""

    label: int
    code: str | None
    took_s: float
    message: str = ""


FromTrainer: TypeAlias = TrainerReady | RoundReached | RoundResult | ChildFailed
ToTrainer: TypeAlias = PublishingConfig | WritingConfig | Publish


def publisher_main(descriptor: int, make: MakePublisher) -> None:
    """The main function of a trainer that publishes."""
    run_with(descriptor, ToTrainer, partial(_publish_on_request, make))


def writer_main(descriptor: int) -> None:
    """The main function of a trainer that writes in place."""
    run_with(descriptor, ToTrainer, _write_on_request)


def _publish_on_request(make: MakePublisher, channel: StepChannel[ToTrainer], config: ToTrainer) -> None:
    import torch

    torch.set_num_threads(1)
    if not isinstance(config, PublishingConfig):
        raise LiveWeightError("a publisher expects a PublishingConfig first")
    contents = [dict(CheckpointSource(Path(path)).tensors()) for path in config.checkpoints]
    module = module_of_checkpoint(Path(config.checkpoints[0]))
    with ExitStack() as stack:
        shared = stack.enter_context(share_module(module, SharedArena))
        publisher = stack.enter_context(
            make(
                shared,
                engines=[_engine(config, channel)],
                secret=Path(config.secret_file),
                directory=Path(config.directory),
                timeout_s=FREE_S,
                threads=1,
                bus=Bus(),
            )
        )
        channel.send(TrainerReady(parameters=shared.arena.memory.address))
        while isinstance(order := channel.receive(), Publish):
            _load(module, contents[order.content])
            channel.send(_published(publisher, order))


def _engine(config: PublishingConfig, channel: StepChannel[ToTrainer]) -> str | ReportingReplica:
    """The engine, for `lw.Publisher`."""
    if config.vllm_url is None:
        return config.address
    secret = load_or_create_secret(Path(config.secret_file))
    named = vllm(config.vllm_url, address=config.address, pace_bytes_per_s=config.pace_bytes_per_s)
    # While a round runs, only the round's thread sends: the main thread waits for the round's end.
    return ReportingReplica(
        named.replica(secret, Path(config.secret_file)), lambda name: channel.send(RoundReached(name=name))
    )


def _load(module: torch.nn.Module, content: dict[str, torch.Tensor]) -> None:
    """Load new content, like an optimiser's step that changes every weight."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(content[name])


def _published(publisher: RoundPublisher, order: Publish) -> RoundResult:
    """Publish, once no other trainer's round is open."""
    publisher.settings = dataclasses.replace(
        publisher.settings,
        offer=order.offer,
        verify=order.verify,
        timeout_s=order.timeout_s,
        lease_s=order.lease_s,
    )
    pause, free, began_s = threading.Event(), Deadline.after(order.timeout_s), time.monotonic()
    while True:
        code, message = None, ""
        try:
            publisher.publish(order.label)
        except RoundFailed as error:
            code, message = error.cause.code, str(error)
            if code == RoundOpen.code and free.remaining_s() > 0:
                pause.wait(POLL_S)
                continue
        except LiveWeightError as error:
            code, message = error.code, str(error)
        return RoundResult(label=order.label, code=code, took_s=time.monotonic() - began_s, message=message)


def _write_on_request(channel: StepChannel[ToTrainer], config: ToTrainer) -> None:
    import torch

    torch.set_num_threads(1)
    if not isinstance(config, WritingConfig):
        raise LiveWeightError("a writer expects a WritingConfig first")
    shares = [
        [share_of(Path(path), rank, config.ranks) for rank in range(config.ranks)]
        for path in config.checkpoints
    ]
    pause = threading.Event()
    channel.send(TrainerReady())
    while isinstance(order := channel.receive(), Publish):
        began_s = time.monotonic()
        targets = [live_memory(pid) for pid in order.pids]
        for _ in write(shares[order.content], targets, config.buckets):
            pause.wait(config.bucket_s)
        channel.send(RoundResult(label=order.label, code=None, took_s=time.monotonic() - began_s))
