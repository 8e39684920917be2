"""What ranks hold now, verified in real processes: beside rounds, never of a mixture, and with everyone who is at fault named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from liveweight.devices.kernels import choose_kernels
from liveweight.errors import LiveWeightError
from liveweight.plan.copies import COLUMNS
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import digest_array
from liveweight.spec.manifest import Manifest, Version
from liveweight.transports.port import GoOn, patient
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages import Describe, Open, Verdict, Verify
from liveweight.wire.messages.values import Offer
from liveweight.worker.receiver import RankReceiver
from liveweight.worker.targets.torch_target import TensorTarget
from tests.support.processes.cluster import Cluster, Program
from tests.support.rounds import assert_holds

WITHIN_S = 60.0


class Operator:
    """Calls a replica's leader to verify what its ranks hold."""

    def __init__(self, cluster: Cluster) -> None:
        self._replica = WireReplica(cluster.address(), load_or_create_secret(cluster.secret))
        self._pool = ThreadPoolExecutor(1)

    def begin(self, timeout_s: float = WITHIN_S, **fields: Any) -> Future[Verdict]:
        """Ask; the answer may take a while."""
        return self._pool.submit(self.verify, timeout_s, **fields)

    def verify(self, timeout_s: float = WITHIN_S, **fields: Any) -> Verdict:
        """Ask, and wait for the answer."""
        return self._replica.verify(Verify(timeout_s=timeout_s, **fields), Deadline.after(timeout_s))

    def refused(self, call: Future[Verdict]) -> LiveWeightError:
        """What the question was refused with."""
        with pytest.raises(ReplicaRefused) as refused:
            call.result(2 * WITHIN_S)
        return refused.value.to_error()

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown()
        self._replica.close()


@contextmanager
def asking(cluster: Cluster) -> Iterator[Operator]:
    operator = Operator(cluster)
    try:
        yield operator
    finally:
        operator.close()


def published(cluster: Cluster, world: int = 2, **options: Any) -> tuple[list[Program], Program, str]:
    """A replica at version 1, its trainer, and that version's digest."""
    ranks = cluster.replica(world, **options)
    trainer = cluster.trainer()
    return ranks, trainer, trainer.ask("publish", label=1)["digest"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("exchange", ["swap", "copy"])
def test_what_is_held_after_a_round_has_the_trainers_digest_and_after_an_undo_that_of_before(
    cluster: Cluster, world: int, exchange: str
) -> None:
    _, trainer, first = published(cluster, world, exchange=exchange)
    second = trainer.ask("publish", label=2)["digest"]
    with asking(cluster) as operator:
        after = operator.verify()
        assert (after.match, after.digest, str(after.found)) == (True, second, "2")
        assert len(after.seconds) == world
        assert trainer.ask("verify")["match"] is True
        trainer.ask("undo")
        back = operator.verify()
        assert (back.match, back.digest, str(back.found), str(back.serving)) == (True, first, "1", "1")
        verification = trainer.ask("verify")  # against what was published last, which was taken back
        assert (verification["match"], verification["version"], verification["replicas"][0]["digest"]) == (
            False,
            2,
            first,
        )


@pytest.mark.parametrize(
    ("name", "tensors"), [("layers.1.o", ["layers.1.o.weight"]), ("layers.0.norm", ["layers.0.norm.weight"])]
)
def test_a_bit_that_flips_in_live_memory_is_named_with_its_tensor_and_its_rank(
    cluster: Cluster, name: str, tensors: list[str]
) -> None:
    ranks, trainer, digest = published(cluster)
    calls = [rank.begin("state") for rank in ranks]
    for rank, call in zip(ranks, calls, strict=True):
        rank.end(call)
    ranks[1].ask("flip", name=name)
    with asking(cluster) as operator:
        found = operator.verify()
        assert (found.match, found.found, str(found.serving)) == (False, None, "1")
        assert found.digest != digest
        assert [(one.name, list(one.ranks)) for one in found.mismatches] == [(tensors[0], [1])]
        assert operator.verify(names=("layers.0.q.weight",)).match is True
        assert operator.verify(names=tuple(tensors)).match is False
    verification = trainer.ask("verify")
    assert (verification["match"], verification["replicas"][0]["mismatches"]) == (False, [[tensors[0], [1]]])
    trainer.ask("publish", label=2)
    assert trainer.ask("verify")["match"] is True  # a round heals it


def test_commits_do_not_wait_for_a_verification_which_begins_again_once(cluster: Cluster) -> None:
    ranks, trainer, _ = published(cluster)
    with asking(cluster) as operator:
        ranks[1].ask("hold", event="AuditBegan")
        call = operator.begin()
        ranks[1].held("AuditBegan")
        digest = trainer.ask("publish", label=2)["digest"]  # rank 1 reads, and steps and commits go on
        assert_holds(ranks, 2)
        ranks[1].ask("go")
        found = call.result(WITHIN_S)
        assert (found.match, found.digest, str(found.found)) == (True, digest, "2")

        ranks[1].ask("hold", event="AuditBegan")
        call = operator.begin()
        for label in (3, 4):
            ranks[1].held("AuditBegan")
            assert "error" not in trainer.ask("publish", label=label)
            if label == 3:
                ranks[1].ask("hold", event="AuditBegan")
            ranks[1].ask("go")
        error = operator.refused(call)
        assert (error.code, error.retryable) == ("LW-109", True)
        assert operator.verify().match is True
    assert_holds(ranks, 4)


def test_during_a_round_what_is_live_is_verified_and_the_round_goes_on(cluster: Cluster) -> None:
    ranks, trainer, digest = published(cluster)
    with asking(cluster) as operator:
        trainer.ask("hold", event="Voting")
        publishing = trainer.begin("publish", label=2)
        trainer.held("Voting")  # every rank has staged and verified version 2
        found = operator.verify()
        assert (found.match, found.digest, str(found.serving)) == (True, digest, "1")
        trainer.ask("go")
        second = trainer.end(publishing)["digest"]
        assert operator.verify().digest == second
    assert_holds(ranks, 2)


class HeldReader:
    """Rows without content, of which every batch waits to be let through."""

    rows = np.zeros((16384, len(COLUMNS)), dtype=np.int64)
    rows[:, 4], rows[:, 7], rows[:, 10] = 1, 1, 1 << 20
    overlaps = False

    def __init__(self) -> None:
        self.came, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.batches = 0

    def bind(self, *_: object) -> HeldReader:
        """Itself: it is the reading, too."""
        return self

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """Say that a batch has come, and wait."""
        del first, last, go_on
        self.batches += 1
        self.came.release()
        assert self.go.acquire(timeout=WITHIN_S)

    def check(self) -> None:
        """Nothing changes."""

    def end(self) -> None:
        """Nothing is under way."""

    def forget(self, source: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def test_a_rank_answers_in_the_middle_of_its_staging(cluster: Cluster) -> None:
    weights = {"w": torch.arange(1000, dtype=torch.float32)}
    secret, reader = load_or_create_secret(cluster.secret), HeldReader()
    target = TensorTarget(weights)
    with (
        RankReceiver(
            target,
            address=cluster.address(),
            secret=secret,
            kernels=choose_kernels(),
            readers={"ipc": reader},
        ),
        asking(cluster) as operator,
    ):
        publisher = WireReplica(cluster.address(), secret)
        publisher.describe(
            Describe(structure="s", manifest=target.layout.manifest()), Deadline.after(WITHIN_S)
        )
        opened = publisher.open(OPEN, Deadline.after(WITHIN_S))
        assert reader.came.acquire(timeout=WITHIN_S)
        call = operator.begin()
        while not call.done():
            reader.go.release()
            assert reader.came.acquire(timeout=WITHIN_S), "the rank staged to its end before it answered"
            futures.wait([call], 0.02)  # a batch, and a while for the answer, of 2048
        (spec,) = target.layout.tensors
        assert (
            call.result().digest
            == Manifest(tensors=(spec,))
            .with_digests([digest_array(weights["w"].numpy(), spec.dtype)])
            .digest()
        )
        reader.go.release(10_000)
        assert opened.round is not None
        publisher.abort(opened.round, "it was only to last", Deadline.after(WITHIN_S))
        publisher.close()


OPEN = Open(
    publisher="p",
    version=Version(run="r", label=1),
    structure="s",
    digests=None,
    offer=Offer(mode="ipc", kind="frozen", source="ipc:///nowhere", layout="l", generation=1),
    verify=False,
    timeout_s=WITHIN_S,
)


def test_a_stopped_rank_is_named_when_the_time_is_over(cluster: Cluster) -> None:
    ranks, trainer, _ = published(cluster)
    with asking(cluster) as operator:
        ranks[1].stop()
        error = operator.refused(operator.begin(timeout_s=1.0))
        assert error.code == "LW-301"
        assert "rank 1 to digest its weights" in str(error)
        ranks[1].signal(signal.SIGCONT)
        assert operator.verify().match is True
    assert trainer.ask("verify")["match"] is True


def test_a_killed_rank_is_named_at_once(cluster: Cluster) -> None:
    ranks, _, _ = published(cluster)
    with asking(cluster) as operator:
        ranks[1].ask("hold", event="AuditBegan")
        call = operator.begin()
        ranks[1].held("AuditBegan")
        ranks[1].kill()
        error = operator.refused(call)
        assert error.code == "LW-205"
        assert f"rank 1 (process {ranks[1].pid}) is gone" in str(error)


def test_a_publisher_says_of_every_engine_what_it_holds_and_waits_for_none_for_ever(cluster: Cluster) -> None:
    one, two = cluster.replica(1, "a"), cluster.replica(1, "b")
    trainer = cluster.trainer("ab", timeout_s=2.0)
    assert trainer.ask("verify")["error"]["code"] == "LW-107"  # nothing was published yet
    digest = trainer.ask("publish", label=1)["digest"]
    two[0].stop()
    verification = trainer.ask("verify")
    assert verification["match"] is None
    assert [replica["match"] for replica in verification["replicas"]] == [True, None]
    assert verification["replicas"][0]["digest"] == digest
    assert verification["replicas"][1]["code"] == "LW-301"
    two[0].signal(signal.SIGCONT)
    one[0].ask("flip", name="layers.0.norm")
    verification = trainer.ask("verify")
    assert (verification["match"], [replica["match"] for replica in verification["replicas"]]) == (
        False,
        [False, True],
    )


def test_names_that_nobody_has_are_refused(cluster: Cluster) -> None:
    published(cluster, 1)
    with asking(cluster) as operator:
        error = operator.refused(operator.begin(names=("layers.0.q.weight", "nothing", "nobody")))
    assert (error.code, str(error)) == ("LW-101", "refused: nothing unexpected, nobody unexpected")
