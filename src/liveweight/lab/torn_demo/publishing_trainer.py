"""The right side's updates: a trainer that publishes a checkpoint to a running engine, as any trainer does.

Unlike other trainers, it reports when the engine's ranks are in the middle of staging, so that it can be killed there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from liveweight.engine.serving.step_channel import StepChannel
from liveweight.lab.torn_demo.processes import ChildMessage, Go, engine_of, run
from liveweight.rounds.replica import WireReplica
from liveweight.server.client import wire_address
from liveweight.spec.deadline import Deadline
from liveweight.trainer.publisher import RoundPublisher
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.messages.publisher import Phase, Progress
from liveweight.wire.messages.values import RoundId

ANSWER_S = 60.0

MakePublisher: TypeAlias = Callable[..., RoundPublisher]
"""`lw.Publisher`."""


class PublishConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to publish, and how long a round may take. `stops`: report when ranks are staging, and wait there to be killed."""

    checkpoint: str
    directory: str
    secret_file: str
    label: str
    timeout_s: float
    lease_s: float
    stops: bool


class StagingReplica(WireReplica):
    """A replica that calls `on_staging` when its leader reports that ranks are still staging."""

    def __init__(self, address: str, secret: Secret, on_staging: Callable[[Progress], None]) -> None:
        super().__init__(address, secret)
        self._on_staging = on_staging

    def status(self, round_id: RoundId, until: Phase, deadline: Deadline) -> Progress:
        """See Replica."""
        progress = super().status(round_id, until, deadline)
        if progress.phase == "open" and progress.fault is None:
            self._on_staging(progress)
        return progress


def main(descriptor: int, make: MakePublisher) -> None:
    """The process's main function."""
    run(descriptor, PublishConfig, partial(_train, make))


def _train(make: MakePublisher, channel: StepChannel[PublishConfig | Go], config: PublishConfig) -> None:
    """Receive the engine's URL, connect, and publish once."""
    import torch

    torch.set_num_threads(1)
    secret = load_or_create_secret(Path(config.secret_file))

    def staging(progress: Progress) -> None:
        if config.stops:
            channel.send(
                ChildMessage(
                    "middle", f"rank {' and '.join(map(str, progress.missing))} read the new weights"
                )
            )
            channel.receive()

    channel.send(ChildMessage("ready"))
    address = wire_address(engine_of(channel).url, None, Deadline.after(ANSWER_S))
    replica = StagingReplica(address, secret, staging)
    with make(
        Path(config.checkpoint),
        engines=[replica],
        secret=secret,
        directory=Path(config.directory),
        timeout_s=ANSWER_S,
        threads=1,
    ) as publisher:
        publisher.settings = dataclasses.replace(
            publisher.settings, timeout_s=config.timeout_s, lease_s=config.lease_s
        )
        report = publisher.publish(config.label)
        channel.send(ChildMessage("done", str(report.version)))
