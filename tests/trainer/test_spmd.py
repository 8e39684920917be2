"""Rounds from a trainer of several ranks: nothing is gathered, and the engines' ranks hold exactly the trainer's bits."""

from __future__ import annotations

import threading

import pytest
import torch

import liveweight as lw
from tests.support.processes.cluster import Cluster
from tests.support.programs.trainer_rank_program import BIG, BIGS
from tests.support.rounds import all_of, assert_holds

SLACK_BYTES = 32 << 20
"""Threads, sockets, plans; the shards of a rank in that test are twice as much."""

STYLES = [
    (2, 1, "fsdp2"),
    (2, 2, "columns"),
    (2, 4, "rows"),
    (4, 1, "copies of rows"),
    (4, 2, "fsdp2 offloaded"),
    (4, 4, "rows and columns"),
    (2, 2, "gathered"),
    (3, 2, "one-shot"),
]
"""Trainer ranks, engine ranks, and how the trainer holds the model. Tensors of 3 x 5 leave uneven and empty shards."""


@pytest.mark.parametrize(("world", "tp", "style"), STYLES)
def test_engines_follow_all_ranks_of_a_trainer(cluster: Cluster, world: int, tp: int, style: str) -> None:
    ranks = cluster.replica(tp, threads=2)
    trainer = cluster.trainer_ranks(world, style=style)
    for label in (1, 2):
        assert all_of(trainer, "offer", label=label) == [{"id": 2 * label - 1}] * world
        reports = all_of(trainer, "wait")
        assert reports == [reports[0]] * world
        assert (reports[0]["version"], reports[0]["verified"]) == (label, True)
        assert_holds(ranks, label)
    assert [rank.finish() for rank in trainer] == [0] * world
    assert cluster.finish(ranks) == [0] * tp


def test_one_sided_reads_take_every_part_from_a_rank_that_holds_it(cluster: Cluster) -> None:
    pytest.importorskip("nixl")
    ranks = cluster.replica(2)
    trainer = cluster.trainer_ranks(2, style="columns", transfer_mode="rdma")
    for label in (1, 2):
        assert [report.get("version") for report in all_of(trainer, "publish", label=label)] == [label] * 2
        assert_holds(ranks, label)


def test_no_rank_ever_holds_more_than_its_shards_and_its_arena(cluster: Cluster) -> None:
    held = {name: torch.zeros(BIG, dtype=torch.bfloat16) for name in BIGS}
    address, over = cluster.address(), threading.Event()
    with lw.Receiver(held, address=address, secret=cluster.secret) as receiver:
        engine = threading.Thread(target=lambda: serve(receiver, over))
        engine.start()
        trainer = cluster.trainer_ranks(2, style="big")
        before = all_of(trainer, "memory")
        for label in (1, 2):
            assert [report.get("version") for report in all_of(trainer, "publish", label=label)] == [
                label
            ] * 2
        after = all_of(trainer, "memory")
        over.set()
        engine.join()
        assert all((tensor == 2).all() for tensor in held.values())
    whole = sum(tensor.numel() * 2 for tensor in held.values())
    for was, now in zip(before, after, strict=True):
        assert now["arenas"] == [whole // 2]
        assert now["peak"] - was["now"] < whole // 2 + SLACK_BYTES, "a gather would have taken the whole"


def test_engines_keep_what_all_ranks_leave_out_if_it_is_the_ranks_own(cluster: Cluster) -> None:
    held = {name: torch.ones(BIG, dtype=torch.bfloat16) for name in BIGS}
    address, over = cluster.address(), threading.Event()
    with lw.Receiver(held, address=address, secret=cluster.secret) as receiver:
        engine = threading.Thread(target=lambda: serve(receiver, over))
        engine.start()
        trainer = cluster.trainer_ranks(2, style="big", keep=["big.3.*"])
        reports = all_of(trainer, "publish", label=2)
        assert [report["version"] for report in reports] == [2, 2]
        assert [rank.finish() for rank in trainer] == [0, 0]
        values = [float(tensor[0, 0]) for tensor in held.values()]
        held["big.3.weight"][-1, -1] = 5.0  # in the part of rank 1
        refused = [
            rank.expect("ready")["error"]
            for rank in cluster.start_trainer_ranks(2, style="big", keep=["big.3.*"])
        ]
        over.set()
        engine.join()
    assert values == [2.0, 2.0, 2.0, 1.0]
    assert {error["code"] for error in refused} == {"LW-113"}
    assert all("big.3.weight" in error["text"] for error in refused)


def serve(receiver: lw.Receiver, over: threading.Event) -> None:
    """An engine that takes every version, until it is over."""
    while not over.is_set():
        receiver.at_boundary(idle_s=0.01)
