"""Trainer and engine on two hosts, joined by a cable that is cut and disturbed while ranks read: in network namespaces, over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.two_hosts import ENGINE, TRAINER, NoNamespaces, TwoHosts, two_hosts
from tests.support.rounds import assert_holds, assert_no_growth, publish_when_free, weights_of

pytest.importorskip("nixl")

MODES = pytest.mark.parametrize("mode", ["gdr", "rdma"])
ADDRESS = f"tcp://{ENGINE}:7411"


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


def ready(cluster: Cluster, hosts: TwoHosts, mode: str, **options: Any) -> tuple[list[Program], Program]:
    """A replica of one rank on its host, at version 1, and a trainer on the other."""
    ranks = cluster.replica(1, address=ADDRESS, host=hosts.engine)
    trainer = cluster.trainer(engines=[ADDRESS], host=hosts.trainer, transfer_mode=mode, **options)
    assert "error" not in trainer.ask("publish", label=1)
    return ranks, trainer


@MODES
def test_rounds_go_from_host_to_host(cluster: Cluster, hosts: TwoHosts, mode: str) -> None:
    ranks, trainer = ready(cluster, hosts, mode)
    for label in (2, 3):
        assert trainer.ask("publish", label=label)["verified"]
        assert_holds(ranks, label)


@MODES
def test_a_version_is_streamed_from_host_to_host(cluster: Cluster, hosts: TwoHosts, mode: str) -> None:
    source = f"tcp://{TRAINER}:7414"
    (rank,) = cluster.replica(1, address=ADDRESS, host=hosts.engine, weights_from=source)
    trainer = cluster.trainer(engines=[ADDRESS], host=hosts.trainer, transfer_mode=mode, address=source)
    for label in (1, 2):
        assert "error" not in trainer.ask("publish", label=label)
        assert rank.ask("stream", label=label)["same"]


@MODES
def test_a_cable_cut_while_a_rank_reads_fails_the_round_and_the_next_one_succeeds(
    cluster: Cluster, hosts: TwoHosts, mode: str
) -> None:
    ranks, trainer = ready(cluster, hosts, mode, timeout_s=6.0, lease_s=2.0)
    before = weights_of([trainer])
    ranks[0].ask("hold", event="StagingBegan", rank=0)
    call = trainer.begin("publish", label=2)
    ranks[0].held("StagingBegan")
    hosts.cut()
    ranks[0].ask("go")
    assert "error" in trainer.end(call)
    assert_holds(ranks, 1)
    hosts.mend()
    assert "error" not in publish_when_free(trainer, 3)
    assert_holds(ranks, 3)
    assert_no_growth([trainer], before)


@MODES
@pytest.mark.parametrize("how", ["delay 20ms", "loss 5%", "rate 8mbit"], ids=["delayed", "lossy", "narrow"])
def test_a_disturbed_cable_makes_rounds_slower_and_not_wrong(
    cluster: Cluster, hosts: TwoHosts, mode: str, how: str
) -> None:
    try:
        hosts.disturb(*how.split())
    except NoNamespaces as error:
        pytest.skip(str(error))
    ranks, trainer = ready(cluster, hosts, mode)
    assert trainer.ask("publish", label=2)["verified"]
    assert_holds(ranks, 2)
