"""How the ranks of a trainer become one publisher: they use their process group once, and our own channels from then on.

Rank 0 shakes hands with the engines, collects the shards that every rank announces, and compares both. Whatever fails at any rank, all
ranks get the error, and none waits beyond the deadline.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import DigestMismatch, LiveWeightError, MessageInvalid, Refused, Unavailable
from liveweight.observe.bus import Bus
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes, lanes_to_bytes
from liveweight.rounds.replica import Replica
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import to_hex
from liveweight.spec.manifest import KeptSet, Manifest, TensorSpec
from liveweight.trainer.fleet_publisher import FleetPublisher
from liveweight.trainer.handshake import describe_to, far_address, handshake
from liveweight.trainer.offers.freeze import Freezer
from liveweight.trainer.offers.live import SharedModule
from liveweight.trainer.offers.sharded import ShardedOffers
from liveweight.trainer.settings import PublisherSettings
from liveweight.trainer.sources.dtensor_shards import ShardPlan, Shards, cut_whole
from liveweight.trainer.sources.in_memory import ModuleSource, StateDictSource, as_source
from liveweight.trainer.sources.kept_tensors import (
    Keep,
    by_expected_name,
    kept_set,
    names_left_out,
    plan_keep,
)
from liveweight.trainer.sources.merged_adapters import MergedSource
from liveweight.trainer.sources.source import Source
from liveweight.trainer.spmd.other_rank import OtherRank
from liveweight.trainer.spmd.process_group import TrainerGroup
from liveweight.trainer.spmd.rank_server import RankRefused, RankServer
from liveweight.trainer.spmd.rank_zero import RankZero
from liveweight.trainer.spmd.shard_arena import NOTHING, ShardArena
from liveweight.transports.registry import Mode
from liveweight.transports.sharded import ShardServer
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages import (
    AnnounceShards,
    Message,
    RankRegistered,
    Refusal,
    RegisterRank,
    ShardsAccepted,
)
from liveweight.wire.messages.values import Fault, fault_of
from liveweight.wire.sockets import host_towards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmdSettings:
    """The settings that every rank of a trainer is given alike. Only rank 0 calls `connect`, which reaches the engines."""

    secret: Secret
    directory: Path
    mode: Mode
    host: str | None
    device: Device
    kernels: Kernels
    threads: int
    bus: Bus
    settings: PublisherSettings
    name: str
    run: str
    engines: int
    connect: Callable[[Deadline], list[Replica]]
    keep: Keep | None = None


def join_ranks(model: object, group: ProcessGroup, settings: SpmdSettings) -> RankZero | OtherRank:
    """Make this rank's publisher. Every rank of the group calls it; the group is not used again afterwards."""
    if not settings.mode.sharded or settings.settings.offer != "frozen":
        raise Refused(
            f"a trainer of several ranks has frozen offers over modes that read memory, "
            f"not {settings.settings.offer} ones over {settings.mode.name}"
        )
    if isinstance(model, SharedModule):
        raise Refused("a trainer of several ranks freezes its shards: give it the module itself")
    deadline = Deadline.after(settings.settings.timeout_s)
    ranks = TrainerGroup(group, deadline)
    hosts = ranks.hosts()
    if len(set(hosts)) > 1 and settings.mode.reach == "one host":
        raise Refused(
            f"{settings.mode.name} reaches one host, and the trainer's ranks are on {len(set(hosts))}: "
            "gdr and rdma reach them"
        )
    if ranks.rank == 0:
        return _join_as_rank_zero(model, ranks, settings, deadline)
    address = ranks.broadcast_address("")
    if not address:
        raise Unavailable("trainer rank 0 could not listen for the others; its own error says why")
    return _join_as_other_rank(model, ranks.rank, ranks.world, address, settings, deadline)


def _join_as_rank_zero(
    model: object, ranks: TrainerGroup, settings: SpmdSettings, deadline: Deadline
) -> RankZero:
    rank_server: RankServer | None = None
    try:
        rank_server = RankServer(
            _rank_server_address(ranks, settings), settings.secret, world=ranks.world, bus=settings.bus
        )
    finally:
        ranks.broadcast_address("" if rank_server is None else rank_server.address)
    with ExitStack() as stack:
        stack.callback(rank_server.close)
        try:
            rank_zero = _collect_ranks(model, rank_server, settings, deadline, stack)
        except RankRefused as refused:
            rank_server.dismiss(Refusal(fault=refused.fault))
            raise refused.fault.to_error() from None
        except LiveWeightError as error:
            rank_server.dismiss(Refusal(fault=_fault(error, 0)))
            raise
        stack.pop_all()
    return rank_zero


def _collect_ranks(
    model: object, rank_server: RankServer, settings: SpmdSettings, deadline: Deadline, stack: ExitStack
) -> RankZero:
    """Shake hands with the engines, wait for the other ranks, and compare what the engines expect with what the ranks hold."""
    weights = _RankWeights.of(model, 0)
    rank_server.wait_for_registrations(deadline)
    replicas = settings.connect(deadline)
    for replica in replicas:
        stack.callback(replica.close)
    agreed = handshake(replicas, deadline, settings.settings.quorum)
    towards = far_address(replicas) or ""
    rank_server.answer(RankRegistered(expected=agreed.expected, run=settings.run, towards=towards))
    cut = weights.cut(agreed.expected, settings)
    arena = _shard_arena(cut, 0, _own_host(settings, towards), settings)
    stack.callback(arena.close)
    announced = [_announcement(0, arena, cut), *rank_server.wait_for_shards(deadline)]
    offers = ShardedOffers(
        announced,
        mode=settings.mode.name,
        poll=rank_server.poll,
        bus=settings.bus,
        kept=_kept_set(weights, cut, announced, agreed.expected, settings),
    )
    describe_to(replicas, offers, agreed, deadline)
    shard_server = ShardServer(_shard_server_address(arena.source, settings), settings.secret, offers.layouts)
    stack.callback(shard_server.close)
    offers.shard_server_address = shard_server.address
    publisher = FleetPublisher(
        name=settings.name,
        run=settings.run,
        replicas=replicas,
        offers=offers,
        settings=settings.settings,
        boots=agreed.boots,
        served=agreed.served,
    )
    rank_server.answer(ShardsAccepted(size_bytes=offers.size_bytes))
    return RankZero(
        weights.model,
        arena=arena,
        rank_server=rank_server,
        shard_server=shard_server,
        offers=offers,
        publisher=publisher,
        serving=None if agreed.serving is None else str(agreed.serving),
    )


def _join_as_other_rank(
    model: object, rank: int, world: int, address: str, settings: SpmdSettings, deadline: Deadline
) -> OtherRank:
    with ExitStack() as stack:
        channel = Channel(address, settings.secret, Codec[Message](Message), deadline=deadline)
        stack.callback(channel.close)
        weights, fault = _try(lambda: _RankWeights.of(model, rank), rank)
        body = RegisterRank(rank=rank, world=world, fault=fault)
        registered = channel.request(body, deadline, "trainer rank 0 to reach the engines and all ranks")
        if weights is None or not isinstance(registered, RankRegistered):
            raise _refusal(registered)
        host = _own_host(settings, registered.towards or address)
        announcement, arena = _open_arena(weights, registered.expected, rank, host, settings)
        if arena is not None:
            stack.callback(arena.close)
        accepted = channel.request(announcement, deadline, "trainer rank 0 to compare what all ranks hold")
        if arena is None or not isinstance(accepted, ShardsAccepted):
            raise _refusal(accepted)
        stack.pop_all()
    return OtherRank(
        weights.model,
        rank=rank,
        arena=arena,
        channel=channel,
        name=settings.name,
        run=registered.run,
        engines=settings.engines,
        settings=settings.settings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWeights:
    """The weights of one rank: shards of a model; or a source of whole tensors, which rank 0 alone offers (`shards` None)."""

    model: object
    shards: Shards | None
    source: Source | None

    @classmethod
    def of(cls, model: object, rank: int) -> _RankWeights:
        source = as_source(model)
        if isinstance(source, ModuleSource) or (isinstance(source, MergedSource) and source.sharded):
            return cls(model=model, shards=Shards(source.module), source=None)
        if isinstance(source, StateDictSource) and isinstance(model, Mapping):
            return cls(model=model, shards=Shards(model), source=None)
        return cls(model=model, shards=None, source=source if rank == 0 else None)

    def cut(self, expected: Manifest, settings: SpmdSettings) -> _RankCut:
        """What to freeze for engines that expect that, and what they keep."""
        keep = settings.keep
        if self.shards is not None:
            if keep is None:
                return _RankCut(plan=self.shards.cut(expected))
            names = names_left_out(keep, self.shards.specs_for(expected), self.shards.gradients())
            kept = self.shards.cut(expected, names, without=False)
            return _RankCut(plan=self.shards.cut(expected, names), kept_shards=kept)
        if self.source is None:
            return _RankCut()
        planned = plan_keep(keep, self.source, expected)
        _, published = planned.reduce(self.source, expected)
        return _RankCut(plan=cut_whole(published, expected), kept=planned.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankCut:
    """What one rank freezes. Of what engines keep: the parts that it holds, or, where rank 0 has whole tensors, all of it."""

    plan: ShardPlan | None = None
    kept_shards: ShardPlan | None = None
    kept: KeptSet | None = None


def _open_arena(
    weights: _RankWeights, expected: Manifest, rank: int, host: str | None, settings: SpmdSettings
) -> tuple[AnnounceShards, ShardArena | None]:
    """The arena of a rank other than 0, and what rank 0 is told of it; without one, why."""

    def make() -> tuple[AnnounceShards, ShardArena]:
        cut = weights.cut(expected, settings)
        arena = _shard_arena(cut, rank, host, settings)
        return _announcement(rank, arena, cut), arena

    made, fault = _try(make, rank)
    return made or (AnnounceShards(rank=rank, source="", layout=NOTHING, fault=fault), None)


def _shard_arena(cut: _RankCut, rank: int, host: str | None, settings: SpmdSettings) -> ShardArena:
    transport_source = (
        None
        if cut.plan is None
        else settings.mode.transport_source(settings.directory, settings.secret, settings.device, host)
    )
    return ShardArena(
        cut.plan, transport_source, settings.kernels, rank=rank, threads=settings.threads, bus=settings.bus
    )


def _announcement(rank: int, arena: ShardArena, cut: _RankCut) -> AnnounceShards:
    """What a rank tells rank 0. Its parts of what engines keep are digested in the host's memory, and freed."""
    own = AnnounceShards(rank=rank, source=arena.source, layout=arena.layout)
    kept = cut.kept_shards
    if kept is None:
        return own
    freezer = Freezer(kept.own, kept.offered, CPU.choose().kernels, kept.parts)
    memory = Memory.from_array(np.empty(freezer.layout.memories_bytes[0], dtype=np.uint8))
    lanes = freezer.freeze(kept.source, memory, threads=1, digest=True).lanes
    digests = b"" if lanes is None else lanes_to_bytes(lanes)
    return msgspec.structs.replace(own, kept_layout=freezer.layout, kept_lanes=digests)


def _kept_set(
    weights: _RankWeights,
    cut: _RankCut,
    announced: Sequence[AnnounceShards],
    expected: Manifest,
    settings: SpmdSettings,
) -> KeptSet | None:
    """What engines keep: the ranks' digests of their parts, added up."""
    if settings.keep is None or weights.shards is None:
        return cut.kept
    digested: dict[str, TensorSpec] = {}
    shares = [(one.kept_layout, one.kept_lanes) for one in announced if one.kept_layout is not None]
    if shares:
        sums = DigestSums([layout for layout, _ in shares])
        totals, torn = sums.combine(
            [lanes_from_bytes(lanes, len(layout.placements)) for layout, lanes in shares]
        )
        if torn:
            raise DigestMismatch(torn, "the trainer's ranks hold different copies of one kept tensor")
        found = sums.expected.with_digests([to_hex(lanes) for lanes in totals])
        digested = by_expected_name(found, expected)
    offered = [spec for one in announced for spec in one.layout.tensors]
    return kept_set(settings.keep, expected, weights.shards.specs_for(expected), digested, offered)


def _try(make: Callable[[], Made], rank: int) -> tuple[Made | None, Fault | None]:
    """Returns what `make` made, or the fault to send to all ranks."""
    try:
        return make(), None
    except LiveWeightError as error:
        return None, _fault(error, rank)


def _fault(error: LiveWeightError, rank: int) -> Fault:
    named = type(error).retold(f"trainer rank {rank}: {error}")
    return fault_of(named, step="enlist", rank=rank)


def _refusal(reply: Message) -> LiveWeightError:
    if isinstance(reply, Refusal):
        return reply.fault.to_error()
    return MessageInvalid(f"trainer rank 0 answered with {type(reply).__name__}")


def _rank_server_address(ranks: TrainerGroup, settings: SpmdSettings) -> str:
    """Where the rank server listens: a socket of this host, or TCP if ranks are on other hosts."""
    if len(set(ranks.hosts())) == 1:
        return f"ipc://{settings.directory / secrets.token_hex(8)}"
    try:
        return f"tcp://{settings.host or socket.gethostbyname(socket.gethostname())}:0"
    except OSError as error:
        raise Unavailable(f"this host has no address of its own name ({error}): give `host`") from error


def _own_host(settings: SpmdSettings, towards: str) -> str | None:
    """The address of this host for engine ranks to connect to: that of the interface towards them."""
    if settings.host is not None or settings.mode.reach != "any host" or not towards:
        return settings.host
    return host_towards(towards)


def _shard_server_address(source: str, settings: SpmdSettings) -> str:
    """Where the shard server listens: on the same network as the arena's transport source."""
    if source.startswith("tcp://"):
        return f"{source.rpartition(':')[0]}:0"
    return f"ipc://{settings.directory / secrets.token_hex(8)}"
