"""A hundred rounds over NIXL between two hosts whose cable is cut at random moments: whole after each, and nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rounds.test_nixl_rounds import registration_of
from tests.support import model
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.two_hosts import ENGINE, NoNamespaces, TwoHosts, two_hosts
from tests.support.rounds import publish_when_free

pytest.importorskip("nixl")

ROUNDS, SETTLED = 100, 30
"""After so many, everything that is kept has been made, and every fault has happened."""
ADDRESS = f"tcp://{ENGINE}:7413"
MOMENTS = {
    "before": None,
    "open": "RoundOpened",
    "stage": "StagingBegan",
    "verify": "RankStaged",
    "commit": "Hook",
}
"""When the cable is cut: before the round, or at a moment of the rank's."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


def weight_of(pid: int) -> dict[str, int]:
    """What a process holds: descriptors, threads, mappings, and resident bytes."""
    place = Path(f"/proc/{pid}")
    status = (place / "status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    return {
        "descriptors": len(list((place / "fd").iterdir())),
        "threads": int(fields["Threads"]),
        "mappings": len((place / "maps").read_text().splitlines()),
        "arenas": sum("memfd:" in line for line in (place / "maps").read_text().splitlines()),
        "resident_kb": int(fields["VmRSS"]),
    }


def cut_round(hosts: TwoHosts, rank: Program, trainer: Program, label: int, moment: str | None) -> None:
    """A round in which the cable is cut; afterwards it is mended. The rank holds one version whole."""
    call: Any = None
    if moment is None:
        hosts.cut()
        call = trainer.begin("publish", label=label)
    else:
        rank.ask("hold", event=moment)
        call = trainer.begin("publish", label=label)
        rank.held(moment)
        hosts.cut()
        rank.ask("go")
    trainer.end(call)  # failed, unknown, or committed already when it was cut
    assert_whole(rank)
    hosts.mend()


def publish_mended(trainer: Program, label: int, within_s: float = 120.0) -> None:
    """A round over a cable that is whole. On a busy machine its deadline, which is short for those that are cut, may be too short."""
    ends_s = time.monotonic() + within_s
    while "error" in (answer := publish_when_free(trainer, label)):
        assert answer["error"]["retryable"], answer
        assert time.monotonic() < ends_s, answer


def assert_whole(rank: Program) -> None:
    """It holds exactly the bits of the version that it says."""
    state = rank.ask("state")
    assert state["fingerprint"] == model.expected(state["version"], 0, 1)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["gdr", "rdma"])
def test_a_hundred_rounds_with_a_cable_cut_at_random_leave_nothing_behind(
    cluster: Cluster, hosts: TwoHosts, mode: str
) -> None:
    chance = random.Random(7)
    (rank,) = cluster.replica(1, address=ADDRESS, host=hosts.engine)
    trainer = cluster.trainer(
        engines=[ADDRESS], host=hosts.trainer, transfer_mode=mode, timeout_s=5.0, lease_s=2.0
    )
    settled: list[dict[str, int]] = []
    for number in range(1, ROUNDS + 1):
        if chance.random() < 0.5:
            cut_round(hosts, rank, trainer, 2 * number, MOMENTS[chance.choice(sorted(MOMENTS))])
        label = 2 * number + 1
        publish_mended(trainer, label)
        assert rank.ask("state")["fingerprint"] == model.expected(label, 0, 1)
        if number in (SETTLED, ROUNDS):
            settled.append(weight_of(rank.pid))
            settled.append(weight_of(trainer.pid))
            settled.append(weight_of(registration_of(trainer)))
    for before, after in zip(settled[:3], settled[3:], strict=True):
        assert after["arenas"] == before["arenas"]
        assert after["descriptors"] <= before["descriptors"] + 2, (before, after)
        assert after["threads"] <= before["threads"], (before, after)
        assert after["mappings"] <= before["mappings"] + 64, (before, after)
        assert after["resident_kb"] <= before["resident_kb"] + 16384, (before, after)
