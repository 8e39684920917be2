"""One round over replicas that answer late, wrongly or not at all: the report is what happened."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    OutcomeUnknown,
    RoundAborted,
    RoundFailed,
)
from liveweight.rounds.coordinator import RoundCoordinator
from liveweight.rounds.replica import ReplicaRefused
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, Offer, RoundId

MANIFEST = Manifest(tensors=(TensorSpec(name="w", dtype=DType.FLOAT32, shape=(1,)),))
OLD, NEW = Version(run="r", label=1, digest="a"), Version(run="r", label=2, digest="b")
GONE = ChannelClosed("gone")


@dataclass
class Engine:
    """A replica in memory. `fails` says what a step raises; `commits`, whether a commit takes place although its answer is lost."""

    name: str = "a"
    fails: dict[str, LiveWeightError | ReplicaRefused] = field(default_factory=dict)
    commits: bool = True
    quiet: int = 0
    slow: int = 0
    vote_takes: Deadline | None = None
    serving: Version = OLD
    done: list[str] = field(default_factory=list)
    marked: list[tuple[Version, str]] = field(default_factory=list)
    round_id: RoundId = field(default_factory=lambda: RoundId(boot="b", epoch=1, publisher="p"))

    def _do(self, step: str) -> None:
        self.done.append(step)
        if step in self.fails:
            raise self.fails[step]

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        del deadline
        self._do("replica_state")
        return m.ReplicaState(
            replica=self.name,
            boot="b",
            state="serving",
            expected=MANIFEST,
            serving=self.serving,
            undo=None,
            round=None,
        )

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        raise AssertionError(f"a round does not ask for it: {body}, {deadline}")

    def describe(self, body: m.Describe, deadline: Deadline) -> None:
        del body, deadline
        self._do("describe")

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        del body, deadline
        self._do("open")
        return m.Opened(round=self.round_id, serving=self.serving)

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        del round_id, deadline
        self._do(until)
        if self.quiet:
            self.quiet -= 1
            raise DeadlineExceeded("a sign of life", 0.5)
        self.slow -= 1
        return m.Progress(
            phase="open" if self.slow >= 0 else until,
            missing=(),
            fault=None,
            stage_s=0.1,
            verify_s=0.1,
            staged_bytes=4,
            readers=(),
        )

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        del round_id, digests, deadline
        self._do("compare")

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        del round_id, lease_s
        self._do("vote")
        while self.vote_takes is not None and not deadline.over:
            continue

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        del round_id, deadline
        if self.commits:
            self.serving = NEW
        self._do("commit")
        return m.Committed(serving=self.serving, undo=OLD, stall_s=0.0)

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        del round_id, reason, deadline
        self._do("abort")
        return ()

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        del deadline
        self._do("be marked behind")
        self.marked.append((version, reason))

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        del publisher, deadline
        self._do("undo")
        return m.Committed(serving=OLD, undo=NEW, stall_s=0.0)

    def interrupt(self) -> None:
        self._do("interrupt")

    def close(self) -> None:
        self._do("close")


def coordinator(
    *engines: Engine,
    quorum: int | None = None,
    lease_s: float = 5.0,
    meanwhile: Callable[[], None] = lambda: None,
    poll: Callable[[], None] = lambda: None,
    before_vote: Callable[[], None] = lambda: None,
    patience: Deadline | None = None,
    mark_behind: bool = False,
    boot: str | None = None,
) -> list[ReplicaProgress]:
    replicas = [ReplicaProgress(engine, boot=boot) for engine in engines]
    offer = Offer(mode="ipc", kind="frozen", source="s", layout="l", generation=1)
    with ThreadPoolExecutor(4) as pool:
        RoundCoordinator(
            replicas=replicas,
            order=m.Open(
                publisher="p",
                version=NEW,
                structure="s",
                digests=None,
                offer=offer,
                verify=False,
                timeout_s=9.0,
            ),
            description=m.Describe(structure="s", manifest=MANIFEST),
            quorum=len(engines) if quorum is None else quorum,
            lease_s=lease_s,
            deadline=Deadline.after(20.0),
            pool=pool,
            on_staged=lambda: None,
            closing=lambda: False,
            meanwhile=meanwhile,
            poll=poll,
            before_vote=before_vote,
            patience=patience,
            mark_behind=mark_behind,
        ).run()
    return replicas


def refusal(rank: int) -> ReplicaRefused:
    return ReplicaRefused(Fault(code="LW-502", message="no memory", step="stage", rank=rank), OLD)


def test_a_lost_answer_to_a_commit_that_took_place_is_a_commit() -> None:
    (progress,) = coordinator(Engine(fails={"commit": GONE}))
    assert progress.done
    assert progress.report().serving == NEW


def test_a_lost_answer_to_a_commit_that_did_not_take_place_is_a_failure() -> None:
    with pytest.raises(RoundFailed) as failed:
        coordinator(Engine(fails={"commit": GONE}, commits=False))
    assert (failed.value.step, failed.value.serving, failed.value.code) == ("commit", "1", "LW-205")


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("an answer", 5.0)])
def test_an_outcome_that_cannot_be_learned_is_unknown_not_failed(error: LiveWeightError) -> None:
    with pytest.raises(OutcomeUnknown, match="a was told to commit"):
        coordinator(Engine(fails={"commit": error, "replica_state": GONE}))


@pytest.mark.parametrize("step", ["open", "staged", "vote"])
@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("an answer", 5.0)], ids=["gone", "silent"])
def test_a_replica_that_does_not_answer_is_not_said_to_serve(step: str, error: LiveWeightError) -> None:
    with pytest.raises(RoundFailed) as failed:
        coordinator(Engine(fails={step: error}), quorum=1, patience=Deadline.after(0.2))
    text = str(failed.value)
    known = "what it serves is not known" if step == "open" else "it was last known to serve 1"
    assert f"It does not answer; {known}; a retry may help" in text
    assert "Still serving" not in text
    assert not failed.value.answers
    assert not failed.value.with_next_mode("gdr").answers


def test_a_replica_that_answers_still_serves_if_another_one_or_the_source_is_gone() -> None:
    def trainer_rank_gone() -> None:
        raise ChannelClosed("trainer rank 1 is gone")

    with pytest.raises(RoundFailed, match=r"trainer rank 1 is gone\. Still serving 1"):
        coordinator(Engine(slow=1), poll=trainer_rank_gone)
    with pytest.raises(RoundFailed, match=r"no memory\. Still serving 1"):
        coordinator(Engine(fails={"staged": refusal(0)}))


def test_votes_that_outlast_the_lease_fail_the_round_and_nobody_commits() -> None:
    slow, other = Engine(vote_takes=Deadline.after(60.0)), Engine(name="b")
    with pytest.raises(RoundFailed) as failed:
        coordinator(slow, other, lease_s=0.2)
    assert failed.value.step == "vote"
    assert all("commit" not in engine.done and "abort" in engine.done for engine in (slow, other))


def test_one_replica_that_refuses_keeps_all_from_committing() -> None:
    good, bad = Engine(), Engine(name="b", fails={"staged": refusal(3)})
    with pytest.raises(RoundFailed) as failed:
        coordinator(good, bad)
    assert (failed.value.replica, failed.value.rank, failed.value.serving) == ("b", 3, "1")
    assert "commit" not in good.done
    assert "abort" in good.done


def test_a_quorum_commits_without_the_one_that_refuses() -> None:
    good, bad = Engine(), Engine(name="b", fails={"staged": refusal(3)})
    replicas = coordinator(good, bad, quorum=1)
    assert [progress.done for progress in replicas] == [True, False]
    assert replicas[1].report().reason == "no memory"


def test_what_fell_out_of_a_round_that_reached_its_quorum_is_aborted_after_the_commit() -> None:
    good, slow = Engine(), Engine(name="b", fails={"staged": DeadlineExceeded("rank 0", 1.0)})
    never = Engine(name="c", fails={"open": refusal(0)})
    lost = Engine(name="d", fails={"commit": GONE, "replica_state": GONE})
    coordinator(good, slow, never, lost, quorum=1)
    assert good.done[-1] == "commit"
    assert slow.done[-1] == "abort"
    assert "abort" not in never.done  # no round was opened there
    assert "abort" not in lost.done  # it was told to commit


def test_a_part_that_fell_out_and_cannot_be_aborted_is_noted_as_one_that_may_still_read() -> None:
    slow = Engine(name="b", fails={"staged": DeadlineExceeded("rank 0", 1.0), "abort": GONE})
    replicas = coordinator(Engine(), slow, quorum=1)
    assert replicas[1].readers


def test_what_is_found_while_ranks_stage_ends_the_round_before_any_vote() -> None:
    engine = Engine()

    def invalidated() -> None:
        assert engine.done == ["open"]
        raise RoundAborted("moved")

    with pytest.raises(RoundFailed, match="moved"):
        coordinator(engine, meanwhile=invalidated)
    assert engine.done == ["open", "abort"]


def test_who_looks_while_ranks_stage_can_end_the_round_and_is_not_asked_afterwards() -> None:
    polls: list[str] = []

    def gone() -> None:
        polls.append("poll")
        raise GONE

    engine = Engine(slow=3)
    with pytest.raises(RoundFailed) as failed:
        coordinator(engine, poll=gone)
    assert (failed.value.code, failed.value.step, failed.value.serving) == ("LW-205", "stage", "1")
    assert failed.value.retryable
    assert (polls, engine.done) == (["poll"], ["open", "staged", "abort"])
    coordinator(fast := Engine(), poll=gone)
    assert (polls, fast.serving) == (["poll"], NEW)


def test_what_is_to_be_done_before_the_vote_is_done_once_all_have_verified() -> None:
    engine = Engine()

    def late() -> None:
        assert engine.done == ["open", "staged", "verified"]
        raise DeadlineExceeded("running requests to finish", 5.0)

    with pytest.raises(RoundFailed, match="running requests to finish") as failed:
        coordinator(engine, before_vote=late)
    assert (failed.value.code, failed.value.step) == ("LW-301", "vote")
    assert engine.done == ["open", "staged", "verified", "abort"]


def test_an_interrupted_commit_is_not_told_as_one_that_did_not_take_place() -> None:
    closed = RoundAborted("the publisher was closed")
    with pytest.raises(OutcomeUnknown):
        coordinator(Engine(fails={"commit": closed, "replica_state": closed}))


def test_the_first_failure_in_time_is_the_one_that_is_told() -> None:
    late, early = Engine(fails={"vote": refusal(1)}), Engine(name="b", fails={"open": refusal(2)})
    with pytest.raises(RoundFailed) as failed:
        coordinator(late, early, Engine(name="c"), quorum=2)
    assert (failed.value.replica, failed.value.rank) == ("b", 2)


def test_a_replica_that_is_silent_for_a_while_is_waited_for() -> None:
    (progress,) = coordinator(Engine(quiet=3))
    assert progress.done


def test_a_replica_whose_ranks_were_replaced_is_told_the_manifest_again() -> None:
    forgot = ReplicaRefused(Fault(code="LW-102", message="not described", step="open"), OLD)
    engine = Engine(fails={"open": forgot})
    with pytest.raises(RoundFailed):
        coordinator(engine)
    assert engine.done[:3] == ["open", "describe", "open"]


def test_a_replica_that_the_quorum_can_do_without_is_waited_for_only_so_long() -> None:
    good, slow = Engine(), Engine(name="slow", slow=1 << 30)
    replicas = coordinator(good, slow, quorum=1, patience=Deadline.after(0.2))
    assert [progress.done for progress in replicas] == [True, False]
    fault = replicas[1].fault
    assert fault is not None
    assert (fault.code, fault.step) == ("LW-301", "stage")
    assert "slow to be staged" in fault.message
    assert fault.waited_s < 10.0  # the round itself had 20 s


def test_a_replica_that_is_needed_has_all_of_the_rounds_time() -> None:
    replicas = coordinator(Engine(), Engine(name="slow", slow=3), patience=Deadline.after(0.0))
    assert [progress.done for progress in replicas] == [True, True]


def test_those_that_were_left_behind_mark_behind_if_that_is_wanted_and_no_others() -> None:
    good, bad, lost = (
        Engine(),
        Engine(name="bad", fails={"vote": GONE}),
        Engine(name="lost", fails={"open": GONE}),
    )
    coordinator(good, bad, lost, quorum=1, mark_behind=True)
    assert (good.marked, [version for version, _ in bad.marked], len(lost.marked)) == ([], [NEW], 1)
    unmarked = Engine(name="bad", fails={"vote": GONE})
    coordinator(Engine(), unmarked, quorum=1)
    assert unmarked.marked == []


def test_nobody_stands_back_after_a_round_that_failed() -> None:
    good, bad = Engine(), Engine(name="bad", fails={"vote": GONE})
    with pytest.raises(RoundFailed):
        coordinator(good, bad, mark_behind=True)
    assert (good.marked, bad.marked) == ([], [])


@pytest.mark.parametrize(("known", "restarted"), [(None, False), ("b", False), ("another", True)])
def test_a_replica_that_was_started_anew_is_told_by_its_boot_id(known: str | None, restarted: bool) -> None:
    (progress,) = coordinator(Engine(), boot=known)
    assert (progress.report().restarted, progress.boot) == (restarted, "b")
