"""Rounds over NIXL through publisher and ranks, in real processes that connect over TCP, with the faults that one-sided reads bring."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.stopping import stop
from tests.support.rounds import WORLD, assert_holds, assert_no_growth, publish_when_free, weights_of

pytest.importorskip("nixl")

MODES = pytest.mark.parametrize("mode", ["gdr", "rdma"])
OFFERS = pytest.mark.parametrize("offer", ["frozen", "live"])


class TcpCluster:
    """A replica and trainers that know each other by host and port alone."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def ready(self, mode: str, offer: str, **options: Any) -> tuple[list[Program], Program]:
        """A replica at version 1, and its trainer."""
        ranks = self.cluster.replica(WORLD, address=self.address)
        trainer = self.trainer(mode, offer, **options)
        assert "error" not in trainer.ask("publish", label=1)
        return ranks, trainer

    def trainer(self, mode: str, offer: str, **options: Any) -> Program:
        """A trainer that is connected to the replica."""
        return self.cluster.trainer(offer=offer, transfer_mode=mode, engines=[self.address], **options)


@pytest.fixture
def tcp(cluster: Cluster) -> TcpCluster:
    return TcpCluster(cluster)


def registration_of(trainer: Program) -> int:
    """The process that lends the trainer's arenas."""
    children = Path(f"/proc/{trainer.pid}/task")
    found = [int(child) for task in children.iterdir() for child in (task / "children").read_text().split()]
    assert len(found) == 1
    return found[0]


@MODES
@OFFERS
def test_rounds_over_tcp_are_verified_bit_exact_and_undone(tcp: TcpCluster, mode: str, offer: str) -> None:
    ranks, trainer = tcp.ready(mode, offer)
    assert_holds(ranks, 1)
    for label in (2, 3):
        report = trainer.ask("publish", label=label)
        assert report["verified"]
        assert report["offer"] == offer
        assert_holds(ranks, label)
    assert trainer.ask("undo")["serving"] == [2]
    assert_holds(ranks, 2)


@MODES
def test_rounds_take_no_more_descriptors_threads_or_registrations_as_they_go_on(
    tcp: TcpCluster, mode: str
) -> None:
    ranks, trainer = tcp.ready(mode, "frozen")
    for label in (2, 3, 4):  # both shadows have been registered by then
        assert "error" not in trainer.ask("publish", label=label)
    before = weights_of([*ranks, trainer])
    for label in range(5, 13):
        assert "error" not in trainer.ask("publish", label=label)
    assert_no_growth([*ranks, trainer], before)
    assert_holds(ranks, 12)


@MODES
def test_a_lost_registration_is_replaced_and_costs_one_round_at_most(tcp: TcpCluster, mode: str) -> None:
    ranks, trainer = tcp.ready(mode, "frozen", timeout_s=20.0)
    registration = registration_of(trainer)
    os.kill(registration, signal.SIGKILL)
    answer = trainer.ask(
        "publish", label=2
    )  # the registration process may be seen to be gone before the round, or in its middle
    assert_holds(ranks, 1 if "error" in answer else 2)
    assert "error" not in publish_when_free(trainer, 3)
    assert_holds(ranks, 3)
    assert registration_of(trainer) != registration


@MODES
def test_a_stopped_registration_ends_the_round_within_its_deadline(tcp: TcpCluster, mode: str) -> None:
    """Over TCP nobody answers then; over shared memory the reads go on without it. Either way the round ends, and the next succeeds."""
    ranks, trainer = tcp.ready(mode, "frozen", timeout_s=5.0, lease_s=2.0)
    registration = registration_of(trainer)
    stop(registration)
    answer = trainer.ask("publish", label=2)
    os.kill(registration, signal.SIGCONT)
    assert_holds(ranks, 1 if "error" in answer else 2)
    assert "error" not in publish_when_free(trainer, 3)
    assert_holds(ranks, 3)
