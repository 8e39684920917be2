"""What comes from outside a round, at every step of it: strangers at the sockets, somebody who asks all the time, a connection that is
cut, memory that cannot be had, a boundary that raised, a publisher that is closed while a replica is stopped.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import liveweight as lw
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, RoundFailed, WrongSecret
from liveweight.lab.torture.faults import cut
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.transports.registry import TRANSPORTS
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.messages import Message
from liveweight.worker.targets.torch_target import TensorTarget
from tests.support import model
from tests.support.engine.engines import WITHIN_S
from tests.support.processes.cluster import Cluster, Program
from tests.support.programs.program import REPLICA
from tests.support.rounds import WORLD, assert_holds, assert_no_growth, ready, weights_of
from tests.support.stepping import publisher

STEPS = {
    "open": ("RoundOpened", REPLICA),
    "stage": ("StagingBegan", 1),
    "verify": ("RankStaged", 1),
    "vote": ("VoteCast", REPLICA),
    "commit": ("Hook", 1),
}
"""A moment in every step of a round: the leader's, which is in rank 0's process, or rank 1's."""


def sockets(cluster: Cluster) -> list[Path]:
    """Where anything listens: the leader, the source, and the source's descriptors."""
    found = [path for path in cluster.directory.rglob("*") if path.is_socket()]
    assert len(found) >= 3
    return found


def garbage(cluster: Cluster) -> None:
    """Bytes that are no message, on every socket."""
    for path in sockets(cluster):
        for noise in (b"", b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.socket(socket.AF_UNIX) as stranger, suppress(BrokenPipeError, ConnectionResetError):
                stranger.connect(str(path))
                stranger.sendall(noise)


def wrong_secret(cluster: Cluster) -> None:
    """Strangers with a secret of their own, who are refused, at the leader and at the source."""
    codec: Codec[Message] = Codec(Message)
    source = next(path for path in sockets(cluster) if path.parent != cluster.directory)
    for address in (cluster.address(), f"ipc://{source}"):
        with pytest.raises((WrongSecret, ChannelClosed)):
            Channel(address, Secret.generate(), codec, deadline=Deadline.after(30.0))


@pytest.mark.parametrize("stranger", [garbage, wrong_secret])
def test_strangers_disturb_no_step_of_a_round(cluster: Cluster, stranger: Callable[[Cluster], None]) -> None:
    ranks, trainer = ready(cluster, "frozen")
    for label in (2, 3):  # both shadows are bound
        assert "error" not in trainer.ask("publish", label=label)
    before = weights_of([*ranks, trainer])
    for label, (moment, rank) in enumerate(STEPS.values(), start=4):
        holder = ranks[max(0, rank)]
        holder.ask("hold", event=moment, rank=rank)
        call = trainer.begin("publish", label=label)
        holder.held(moment)
        stranger(cluster)
        holder.ask("go")
        assert "error" not in trainer.end(call), moment
        assert_holds(ranks, label)
    assert_no_growth([*ranks, trainer], before)


def test_a_trainer_without_the_secret_is_told_so(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen")
    stranger = cluster.start_trainer(secret=str(cluster.directory / "another"))
    assert stranger.ended() == 1
    assert "error" not in trainer.ask("publish", label=2)
    assert_holds(ranks, 2)


# Those who ask, and those who are cut off.

LONG_S = 3600.0
"""For rounds that must not end by their own deadline."""
CONNECTIONS = 8


@pytest.fixture
def leader(cluster: Cluster) -> Iterator[WireReplica]:
    """A client that requests the leader's state all the time."""
    replica = WireReplica(cluster.address(), load_or_create_secret(cluster.secret))
    yield replica
    replica.close()


def ask_until_free(leader: WireReplica) -> None:
    """Ask without a pause until no round is open."""
    deadline = Deadline.after(WITHIN_S)
    while leader.replica_state(deadline).round is not None:
        deadline.check("the round to be given up")


def test_a_trainer_that_ends_is_noticed_also_where_somebody_asks_all_the_time(
    cluster: Cluster, leader: WireReplica
) -> None:
    ranks, trainer = ready(cluster, "frozen", timeout_s=LONG_S, lease_s=LONG_S)
    trainer.ask("hold", event="Committing")
    trainer.begin("publish", label=2)
    trainer.held("Committing")
    assert leader.replica_state(Deadline.after(WITHIN_S)).round is not None
    trainer.kill()
    ask_until_free(leader)
    assert_holds(ranks, 1)


def test_a_trainer_that_is_cut_off_gives_its_round_up_over_another_connection(
    cluster: Cluster, leader: WireReplica
) -> None:
    ranks, trainer = ready(cluster, "frozen", timeout_s=LONG_S, lease_s=LONG_S)
    trainer.ask("hold", event="Voting")
    call = trainer.begin("publish", label=2)
    trainer.held("Voting")
    for number in range(CONNECTIONS):
        cut(trainer.pid, number)
    trainer.ask("go")
    error = trainer.end(call)["error"]
    assert (error["code"], error["serving"], error["retryable"]) == ("LW-205", "1", True)
    assert leader.replica_state(Deadline.after(WITHIN_S)).round is None
    assert_holds(ranks, 1)
    assert "error" not in cluster.trainer(run="other").ask("publish", label=3)
    assert "error" not in trainer.ask("publish", label=4)
    assert_holds(ranks, 4)


# Memory that cannot be had.


def test_an_arena_that_cannot_be_had_fails_the_offer_and_no_more(cluster: Cluster) -> None:
    ranks = cluster.replica(WORLD)
    trainer = cluster.trainer()
    before = weights_of(ranks)
    trainer.ask("limit", on=True)
    error = trainer.ask("publish", label=1)["error"]
    assert error["code"] == "LW-502"
    trainer.ask("limit", on=False)
    assert_holds_the_first(ranks)
    assert_no_growth(ranks, before)
    assert "error" not in trainer.ask("publish", label=1)
    assert_holds(ranks, 1)


@pytest.mark.parametrize("offer", TRANSPORTS["ipc"].offers)
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_shadow_that_cannot_be_had_fails_the_round_by_name_and_no_more(
    cluster: Cluster, offer: str, rank: int
) -> None:
    ranks = cluster.replica(WORLD)
    trainer = cluster.trainer(offer=offer)
    ranks[rank].ask("limit", on=True)
    error = trainer.ask("publish", label=1)["error"]
    assert (error["code"], error["rank"], error["step"], error["serving"]) == ("LW-502", rank, "stage", None)
    ranks[rank].ask("limit", on=False)
    assert_holds_the_first(ranks)
    assert "error" not in trainer.ask("publish", label=1)
    assert_holds(ranks, 1)


def assert_holds_the_first(ranks: list[Program]) -> None:
    """The weights that the ranks began with, of which nobody knows the version."""
    for number, rank in enumerate(ranks):
        state = rank.ask("state")
        assert (state["fingerprint"], state["version"]) == (model.expected(0, number, len(ranks)), None)


# Boundaries that raised.


def test_a_boundary_that_raised_is_finished_by_the_next_call_without_a_second_broadcast(
    cluster: Cluster,
) -> None:
    ranks, trainer = ready(cluster, "frozen")
    ranks[1].ask("arm", what="hook, and on the way back")
    error = trainer.ask("publish", label=2)["error"]
    assert (error["rank"], error["step"], error["serving"]) == (1, "hooks", "1")
    ranks[1].expect("again")
    assert_holds(ranks, 1)  # a rank that had broadcast once more would be a step behind the other, for good
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


class Deadly(TensorTarget):
    """A target that ends the thread which asks for its shadow."""

    def shadow(self) -> Sequence[Memory]:
        raise SystemExit("the shadow ended this thread")


def test_the_death_of_the_background_thread_is_told_at_the_next_boundary(short_path: Path) -> None:
    target = Deadly({"w": torch.zeros(4, 3), "b": torch.zeros(3)})
    address = f"ipc://{short_path}/engine.sock"
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with (
        lw.Receiver(target, address=address, secret=short_path / "secret") as receiver,
        publisher(source, address, short_path, timeout_s=1.0) as sender,
    ):
        assert receiver.at_boundary() is None
        with pytest.raises(RoundFailed) as failed:
            sender.publish(1)
        assert (failed.value.rank, failed.value.step) == (0, "stage")
        with pytest.raises(
            ChannelClosed, match="rank 0 cannot take part in rounds any more: the shadow ended this thread"
        ):
            receiver.at_boundary()


# A publisher that is closed while its replica is stopped.


@pytest.mark.parametrize("moment", ["before", "StagingBegan", "Hook"])
def test_closing_is_prompt_while_a_replica_stands_still(cluster: Cluster, moment: str) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer(timeout_s=300.0, lease_s=200.0)
    assert "error" not in trainer.ask("publish", label=1)
    if moment == "before":
        ranks[0].stop()
        trainer.ask("offer", label=2)
    else:
        ranks[0].ask("hold", event=moment)
        trainer.ask("offer", label=2)
        ranks[0].held(moment)
        ranks[0].stop()
    began_s = time.monotonic()
    closed = trainer.ask("close")
    assert time.monotonic() - began_s < 30.0
    assert [name for name in closed["threads"] if "liveweight" in name] == []
    assert trainer.finish() == 0
    assert [path.name for path in cluster.directory.rglob("*") if path.is_socket()] == ["a.sock"]
    ranks[0].signal(signal.SIGCONT)
    if moment != "before":
        ranks[0].ask("go")
    assert ranks[0].ask("state")["version"] in ((1, 2) if moment == "Hook" else (1,))
