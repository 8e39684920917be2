"""The process of a rank: its weights, its cache, and a loop that carries out the stream's entries one after the other.

The process ends with its stream: when the engine closes it, or dies. Any failure is the last message on the stream (RankFailed); the
engine decides what follows.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from liveweight.devices.device import open_device
from liveweight.engine.rank.attention import PagedAttention
from liveweight.engine.rank.hooks import hooks_of
from liveweight.engine.rank.rank_group import join_group
from liveweight.engine.rank.sleep import RankSleep
from liveweight.engine.rank.slots import Slots
from liveweight.engine.rank.start_version import StartVersion, loaded
from liveweight.engine.rank.step_runner import StepRunner
from liveweight.engine.serving.step_channel import StepChannel
from liveweight.engine.serving.step_stream import (
    Begin,
    Entry,
    RankFailed,
    RankReady,
    ReleaseMemory,
    RestoreMemory,
    SaveImage,
    Setup,
    Step,
    Swap,
    weights_text,
)
from liveweight.engine.updates.live_updates import RankUpdates
from liveweight.errors import ChannelClosed, LiveWeightError, MessageInvalid, Torn
from liveweight.observe.bus import Bus
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.messages.values import fault_of
from liveweight.worker.join import JoinContent

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model
    from liveweight.worker.commit import Hook


def main(descriptor: int, *, parent: int | None, bus: Bus | None = None) -> None:
    """What a rank's process does. `descriptor` is its end of the stream, inherited from the engine's process, which is `parent`;
    `bus` gets the events of its part in rounds."""
    # A terminal sends SIGINT to every process of its group; the engine's process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent is not None:
        _end_with(parent)
    with socket.socket(fileno=descriptor) as end:
        channel: StepChannel[Entry] = StepChannel(end, Entry, peer="the scheduler")
        rank, step = -1, "start"
        try:
            setup = channel.receive()
            if not isinstance(setup, Setup):
                raise MessageInvalid(f"a stream begins with Setup, not with {type(setup).__name__}")  # noqa: TRY301
            rank = setup.rank
            with ExitStack() as stack:
                runner, updates, sleep = _prepare(setup, channel, stack, bus or Bus())
                step = "step"
                _run_entries(channel, runner, updates, sleep)
        except Exception as error:  # whatever it is, the engine must know
            _send_failure(channel, error, rank=rank, step=step)


def _prepare(
    setup: Setup, channel: StepChannel[Entry], stack: ExitStack, bus: Bus
) -> tuple[StepRunner, RankUpdates | None, RankSleep]:
    """Everything before the first step: threads, the other ranks, weights and their name, cache, the rounds' leader."""
    import torch

    config = setup.config
    torch.set_num_threads(config.threads)
    model, hooks = _model(setup)
    start = _name_start(setup, model, channel)
    attention = _attention(setup, model)
    slots = Slots(config.max_running, context=setup.context, block_tokens=config.block_tokens)
    runner = StepRunner(model, attention, slots, weights=weights_text(start.version), reports=setup.rank == 0)
    updates = None
    if config.updates is not None:
        updates = RankUpdates(
            config.updates,
            model,
            start=start,
            rank=setup.rank,
            device=config.device,
            hooks=hooks,
            timeout_s=config.start_timeout_s,
            bus=bus,
            on_failure=channel.interrupt,
        )
        stack.callback(updates.close)
        if config.snapshots is not None:
            pace_bytes_per_s = config.updates.pace_bytes_per_s
            updates.start_snapshot_writer(
                config.snapshots, config.start_timeout_s, pace_bytes_per_s=pace_bytes_per_s
            )
    channel.send(RankReady(setup.rank, runner.weights, attention.name))
    return runner, updates, _sleep(setup, model, attention, hooks, updates)


def _sleep(
    setup: Setup,
    model: Model,
    attention: PagedAttention,
    hooks: Sequence[Hook],
    updates: RankUpdates | None,
) -> RankSleep:
    from liveweight.worker.targets.torch_target import module_target

    config, device = setup.config, open_device(setup.config.device)
    given = config.updates
    return RankSleep(
        rank=setup.rank,
        target=module_target(model, model.pieces(), device=device) if updates is None else updates.target,
        device=device,
        threads=config.threads,
        secret=Secret.generate() if given is None else load_or_create_secret(Path(given.secret_file)),
        hooks=hooks,
        cache=attention.memories,
        fence=(lambda _: nullcontext()) if updates is None else updates.changing,
    )


def _attention(setup: Setup, model: Model) -> PagedAttention:
    """The rank's cache, empty."""
    return PagedAttention(
        layers=model.cached_layers,
        kv_heads=model.kv_heads,
        heads=model.heads,
        head_dim=model.head_dim,
        blocks=setup.blocks,
        block_tokens=setup.config.block_tokens,
        dtype=model.embedding.weight.dtype,
        device=setup.config.device,
    )


def _name_start(setup: Setup, model: Model, channel: StepChannel[Entry]) -> StartVersion:
    """Send what was loaded, receive the version of all ranks' parts together. Rank 0 will give the leader the manifest."""
    config = setup.config
    own = loaded(model, device=config.device, threads=config.threads, timeout_s=config.start_timeout_s)
    channel.send(own)
    begin = channel.receive()
    if not isinstance(begin, Begin):
        raise MessageInvalid(f"after Setup comes Begin, not {type(begin).__name__}")
    manifest = begin.manifest if setup.rank == 0 else None
    return StartVersion(version=begin.version, content=JoinContent(lanes=own.lanes, manifest=manifest))


def _model(setup: Setup) -> tuple[Model, tuple[Hook, ...]]:
    """The rank's share of the model, loaded, and the hooks; joins the group of ranks first."""
    import torch

    from liveweight.engine.models.model import build
    from liveweight.engine.models.model_spec import ModelSpec
    from liveweight.engine.rank.checkpoint_loading import load

    config = setup.config
    group = join_group(
        rank=setup.rank,
        size=config.tp,
        rendezvous=Path(setup.meeting),
        device=config.device,
        timeout_s=config.step_timeout_s,
    )
    spec = ModelSpec.read(Path(config.model))
    dtype = getattr(torch, spec.dtype if config.dtype == "auto" else config.dtype)
    model = build(spec, group, dtype=dtype, device=config.device, draft=config.draft)
    hooks = hooks_of(model, config.hooks)
    load(model, Path(config.model), hooks)
    return model, hooks


def _run_entries(
    channel: StepChannel[Entry], runner: StepRunner, updates: RankUpdates | None, sleep: RankSleep
) -> None:
    """Carry out entries until the stream ends."""
    while True:
        try:
            entry = channel.receive()
        except ChannelClosed:
            if updates is not None:
                updates.check()
            return
        match entry:
            case Step() if not runner.weights:
                raise Torn("a step came for weights that are a mixture")
            case Step():
                runner.run(entry, channel.send)
            case Swap() if updates is not None:
                swapped = updates.carry_out(entry)
                runner.weights = swapped.weights
                channel.send(swapped)
            case SaveImage() | ReleaseMemory() | RestoreMemory():
                channel.send(sleep.carry_out(entry, runner.weights))
            case _:
                raise MessageInvalid(f"{type(entry).__name__} is not for this rank now")


def _send_failure(channel: StepChannel[Entry], error: Exception, *, rank: int, step: str) -> None:
    if not isinstance(error, LiveWeightError):
        logging.getLogger("liveweight").error("rank %d failed in %s", rank, step, exc_info=error)
        error = LiveWeightError(f"{type(error).__name__}: {error}")
    try:
        channel.send(RankFailed(fault_of(error, step=step, rank=rank)))
    except LiveWeightError:
        return  # nobody listens any more


def _end_with(parent: int) -> None:
    """Let the process die with its parent, even while it waits for a peer inside a collective."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:  # it died while this process was starting
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
