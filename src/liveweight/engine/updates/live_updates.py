"""Live updates inside the engine: a leader beside the scheduler, a WorkerRank in every rank process, and the inbox for decisions.

The leader runs the rounds and leaves a decision in the inbox. The engine's thread takes it from there and puts it on the step stream,
so that all ranks swap their weights between the same two steps. A step without a decision costs the ranks nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from liveweight.devices.device import Device, open_device
from liveweight.engine.config import Snapshots, Updates
from liveweight.engine.rank.snapshot_writing import HeldVersion, LiveWeights, RankSnapshotWriter
from liveweight.engine.rank.start_version import StartVersion
from liveweight.engine.serving.step_stream import Swap, SwapDone, weights_text
from liveweight.errors import ChannelClosed, WrongState
from liveweight.observe.bus import Bus
from liveweight.rounds.boundary import Decision
from liveweight.rounds.leader_server import LeaderServer
from liveweight.spec.deadline import Deadline
from liveweight.transports.registry import TRANSPORTS
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.messages.values import RoundId
from liveweight.worker.commit import Hook
from liveweight.worker.in_place_overwrite import InPlaceSettings
from liveweight.worker.rank import WorkerRank
from liveweight.worker.staging_thread import StagingSettings

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model
    from liveweight.worker.targets.torch_target import TensorTarget


class DecisionInbox:
    """Where the leader leaves a decision for the engine's thread."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._waiting: tuple[RoundId, Decision] | None = None

    def on_decision(self, wake: Callable[[], None]) -> None:
        """Set the callback that wakes the engine's thread. Before that, a decision waits for the thread's first turn."""
        with self._lock:
            self._wake = wake

    def put(self, round_id: RoundId, decision: Decision) -> None:
        """Leave a decision for all ranks. The leader's thread."""
        with self._lock:
            self._waiting, wake = (round_id, decision), self._wake
        if wake is not None:
            wake()

    def withdraw(self, round_id: RoundId) -> bool:
        """Remove the decision; False if it is on the step stream already. The leader's thread."""
        with self._lock:
            waits = self._waiting is not None and self._waiting[0] == round_id
            if waits:
                self._waiting = None
            return waits

    def take(self) -> Decision | None:
        """Remove and return the waiting decision. The engine's thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        return None if waiting is None else waiting[1]


def start_leader(
    updates: Updates, *, secret: Secret, world: int, replica: str, bus: Bus, inbox: DecisionInbox
) -> LeaderServer:
    """Start the leader of an engine's rounds; publishers and ranks reach it at its address."""
    return LeaderServer(
        address=updates.address,
        secret=secret,
        replica=replica,
        boot=secrets.token_hex(8),
        world=world,
        bus=bus,
        decisions=inbox,
    )


class RankUpdates:
    """One rank's side of live updates: stages in the background, swaps where the step stream says so. For the rank's main thread.

    `on_failure` is called, on another thread, when the rank cannot follow rounds any more; `check` says why.
    """

    def __init__(
        self,
        updates: Updates,
        model: Model,
        *,
        start: StartVersion,
        rank: int,
        device: str,
        hooks: Sequence[Hook],
        timeout_s: float,
        bus: Bus,
        on_failure: Callable[[], None],
    ) -> None:
        from liveweight.worker.targets.torch_target import module_target

        here, threads = open_device(device), updates.staging_threads
        target = module_target(model, model.pieces(), threads=threads, device=here, shadow=updates.shadow)
        kernels, home = target.home.choose().kernels, target.home
        secret = load_or_create_secret(Path(updates.secret_file))
        self._worker_rank = WorkerRank(
            target,
            address=updates.address,
            secret=secret,
            kernels=kernels,
            readers={name: mode.reader(secret, kernels, home) for name, mode in TRANSPORTS.items()},
            rank=rank,
            serving=start.version,
            content=start.content,
            live_kernels=here.choose().kernels,
            hooks=hooks,
            settings=StagingSettings(threads=threads, pace_bytes_per_s=updates.pace_bytes_per_s),
            bus=bus,
            deadline=Deadline.after(timeout_s),
            optional=model.draft_group() if updates.draft_weights == "keep" else (),
            in_place=None if updates.shadow != "none" else _in_place(updates, model, here),
            on_failure=on_failure,
        )
        self._held = HeldVersion(weights_text(start.version), self._worker_rank.swaps)
        self._target, self._device, self._secret, self._rank = target, here, secret, rank
        self._snapshot_writer: RankSnapshotWriter | None = None

    def start_snapshot_writer(
        self, snapshots: Snapshots, timeout_s: float, *, pace_bytes_per_s: float | None
    ) -> None:
        """Write snapshots of the live weights, when the engine asks for them."""
        live = LiveWeights(
            target=self._target,
            device=self._device,
            held=lambda: self._held,
            swaps=lambda: self._worker_rank.swaps,
        )
        self._snapshot_writer = RankSnapshotWriter(
            snapshots,
            self._secret,
            live,
            rank=self._rank,
            pace_bytes_per_s=pace_bytes_per_s,
            deadline=Deadline.after(timeout_s),
        )

    @property
    def target(self) -> TensorTarget:
        """The rank's weights."""
        return self._target

    @contextmanager
    def changing(self, deadline: Deadline) -> Iterator[None]:
        """Change live weights outside a round; afterwards the rank holds the same version as before."""
        with self._worker_rank.changing(deadline):
            yield
            self._held = HeldVersion(self._held.weights, self._worker_rank.swaps)

    def carry_out(self, entry: Swap) -> SwapDone:
        """Swap, all ranks or none. Returns the name of the weights that the rank holds then, or why it is torn."""
        settled = self._worker_rank.carry_out(Decision(entry.epoch, entry.undo, entry.timeout_s))
        if settled.serving is None and settled.torn is None:
            raise WrongState("without a version", "serving after a swap")
        weights = "" if settled.serving is None else weights_text(settled.serving)
        self._held = HeldVersion(weights, self._worker_rank.swaps)
        return SwapDone(weights, settled.torn)

    def check(self) -> None:
        """ChannelClosed if the rank cannot follow rounds any more: it would serve its version for ever, and nobody would notice."""
        if self._worker_rank.failure is not None:
            raise ChannelClosed(f"rank {self._rank} lost its leader: {self._worker_rank.failure}")

    def close(self) -> None:
        """Leave the replica."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.close()
        self._worker_rank.close()


def _in_place(updates: Updates, model: Model, device: Device) -> InPlaceSettings:
    return InPlaceSettings(
        chunk_bytes=updates.chunk_bytes,
        draft_chunk_bytes=updates.draft_chunk_bytes,
        draft=frozenset(name for group in model.draft_group() for name in group.tensors),
        synchronise=device.synchronise,
    )
