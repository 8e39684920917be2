"""A rank's part of a replica's rounds, wherever its program gets its decisions from.

Composes the two channels to the leader, the staging thread in the background, and the committer on the main thread. How decisions reach
all ranks at one step is the program's: rounds/boundary in SPMD programs, the step stream (engine/serving/step_stream) in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypedDict

from liveweight.devices.kernels import Kernels
from liveweight.observe.bus import Bus
from liveweight.rounds.boundary import Decision
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import OptionalGroup, Version
from liveweight.transports.port import Reader
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages import Message, Settled
from liveweight.worker.commit import Committer, Hook
from liveweight.worker.in_place_commit import InPlaceCommitter
from liveweight.worker.in_place_overwrite import InPlaceSettings, OverwriteQueue
from liveweight.worker.join import JoinContent, join
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.shadow_lock import ShadowLock
from liveweight.worker.staging_thread import StagingSettings, StagingThread
from liveweight.worker.targets.target import Target


class _CommitterArguments(TypedDict):
    """The arguments that both committers have in common."""

    rank: int
    seat: int
    boot: str
    hooks: Sequence[Hook]
    channel: Channel[Message]
    shadow_lock: ShadowLock


class WorkerRank:
    """One rank, joined to the leader at `address`. Every method is for the main thread.

    `optional` are the groups of tensors that an offer may leave out; in such a round the rank keeps its own. `content` is what is
    known of the weights that it joins with; `live_kernels` are those of the device that these lie on, if it is not the shadow's.
    With `in_place` there is no shadow: a commit overwrites what is live. `met`: see Join; WrongState where the leader is another engine's.
    """

    def __init__(
        self,
        target: Target,
        *,
        address: str,
        secret: Secret,
        kernels: Kernels,
        readers: Mapping[str, Reader],
        rank: int,
        serving: Version | None,
        hooks: Sequence[Hook],
        settings: StagingSettings,
        bus: Bus,
        deadline: Deadline,
        optional: Sequence[OptionalGroup] = (),
        content: JoinContent | None = None,
        live_kernels: Kernels | None = None,
        in_place: InPlaceSettings | None = None,
        met: str = "",
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._shadow_lock = shadow_lock = ShadowLock()
        overwrites = None if in_place is None else OverwriteQueue(in_place)
        with ExitStack() as stack:
            orders = stack.enter_context(_channel(address, secret, deadline))
            joined = join(
                orders,
                rank=rank,
                target=target,
                serving=serving,
                content=content,
                optional=optional,
                in_place=overwrites is not None,
                met=met,
                deadline=deadline,
            )
            # Not before: only the leader that took the rank in is known to be the right one at that address.
            calls = stack.enter_context(_channel(address, secret, deadline))
            self._boot = joined.boot
            arguments: _CommitterArguments = {
                "rank": rank,
                "seat": joined.seat,
                "boot": joined.boot,
                "hooks": hooks,
                "channel": calls,
                "shadow_lock": shadow_lock,
            }
            self._committer: Committer | InPlaceCommitter
            if overwrites is None:
                self._committer = Committer(target=target, **arguments)
            else:
                self._committer = InPlaceCommitter(overwrites=overwrites, **arguments)
            self._staging_thread = StagingThread(
                rank=rank,
                channel=orders,
                target=target,
                digest=ShadowDigest(target.layout, kernels),
                readers=readers,
                settings=settings,
                shadow_lock=shadow_lock,
                kernels=kernels if live_kernels is None else live_kernels,
                replica=joined.replica,
                bus=bus,
                overwrites=overwrites,
                on_failure=on_failure,
            )
            stack.callback(self._staging_thread.close)
            self._resources = stack.pop_all()

    @property
    def boot(self) -> str:
        """The incarnation of the replica that it joined."""
        return self._boot

    @property
    def failure(self) -> BaseException | None:
        """Why the rank cannot take part in rounds any more; None if it can."""
        return self._staging_thread.failure

    @property
    def swaps(self) -> int:
        """Raised before every swap of weights, also one that goes back: live memory is what it was while it stays the same.
        For any thread."""
        return self._shadow_lock.swaps

    @property
    def pace_bytes_per_s(self) -> float | None:
        """The limit on staging, from the next round on; None: no limit."""
        return self._staging_thread.settings.pace_bytes_per_s

    @pace_bytes_per_s.setter
    def pace_bytes_per_s(self, bytes_per_s: float | None) -> None:
        self._staging_thread.settings = replace(self._staging_thread.settings, pace_bytes_per_s=bytes_per_s)

    def carry_out(self, decision: Decision) -> Settled:
        """Swap shadow and live weights, or overwrite the live weights, and receive the outcome.

        If it raises, the rank must not serve; see `resolve`.
        """
        return self._committer.carry_out(decision)

    @contextmanager
    def changing(self, deadline: Deadline) -> Iterator[None]:
        """Change live weights outside a round: no round stages meanwhile, and readers of live weights notice the change."""
        with self._shadow_lock.held(deadline):
            self._shadow_lock.staged = None
            self._shadow_lock.swaps += 1
            yield

    def resolve(self, timeout_s: float) -> Settled | None:
        """Finish a swap that was interrupted. None: there was none."""
        return self._committer.resolve(timeout_s)

    def close(self) -> None:
        """Leave the replica: threads, channels and mappings end. The weights stay as they are."""
        self._resources.close()


def _channel(address: str, secret: Secret, deadline: Deadline) -> Channel[Message]:
    return Channel(address, secret, Codec[Message](Message), deadline=deadline)
