"""A rank's swap, interrupted at every beat: it never serves what was not decided, and goes back exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from liveweight.devices.memory import Memory
from liveweight.errors import DeadlineExceeded, OutcomeUnknown, Torn
from liveweight.rounds.boundary import Decision
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec, Version
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.listener import Listener
from liveweight.wire.messages import Message, Settled, Swapped
from liveweight.wire.messages.values import RoundId
from liveweight.worker.commit import Committer, Hook
from liveweight.worker.shadow_lock import ShadowLock

COMMIT = Decision(epoch=1, undo=False, timeout_s=20.0)
OLD, NEW = Version(run="r", label="old"), Version(run="r", label="new")
KEEP, BACK = Settled(keep=True, serving=NEW), Settled(keep=False, serving=OLD)


class Words:
    """A target whose weights are two strings."""

    layout: Layout = packed([TensorSpec(name="w", dtype=DType.UINT8, shape=(1,))])

    def __init__(self, fail_at: dict[int, Exception] | None = None) -> None:
        self.holds, self.other = "old", "new"
        self.swaps, self._fail_at = 0, fail_at or {}

    def live(self, tensors: Collection[str] | None = None) -> Sequence[Memory]:
        del tensors
        return []

    def shadow(self) -> Sequence[Memory]:
        return []

    def keep(self, tensors: Collection[str]) -> None:
        del tensors

    def swap(self) -> None:
        self.swaps += 1
        if self.swaps in self._fail_at:
            raise self._fail_at[self.swaps]
        self.holds, self.other = self.other, self.holds

    unread = 2

    def read_back(self) -> None:
        return None

    def release_shadow(self) -> None:
        return None


class Scene:
    """A committer, and a leader with prepared answers."""

    def __init__(self, committer: Committer, shadow_lock: ShadowLock, received: list[Swapped]) -> None:
        self.committer, self.shadow_lock, self.received = committer, shadow_lock, received


@contextmanager
def scene(
    directory: Path, target: Words, hooks: Sequence[Hook], answers: Sequence[Settled | None]
) -> Iterator[Scene]:
    """`answers` in order; None is silence."""
    secret, received, stop = Secret.generate(), list[Swapped](), threading.Event()
    codec: Codec[Message] = Codec(Message)
    listener: Listener[Message] = Listener(f"ipc://{directory}/leader", secret, codec)

    def answer_reports() -> None:
        left = list(answers)
        with listener:
            while not stop.is_set():
                try:
                    incoming = listener.receive(Deadline.after(0.05), "a rank")
                except DeadlineExceeded:
                    continue
                assert isinstance(incoming.body, Swapped)
                received.append(incoming.body)
                answer = left.pop(0)
                if answer is not None:
                    listener.send(incoming.peer, answer, incoming.call, Deadline.after(5.0))

    leader = threading.Thread(target=answer_reports)
    leader.start()
    shadow_lock = ShadowLock()
    shadow_lock.staged = RoundId(boot="b", epoch=1, publisher="p")
    try:
        with Channel(listener.address, secret, codec, deadline=Deadline.after(20.0)) as channel:
            committer = Committer(
                rank=1, seat=1, boot="b", target=target, hooks=hooks, channel=channel, shadow_lock=shadow_lock
            )
            yield Scene(committer, shadow_lock, received)
    finally:
        stop.set()
        leader.join()


def failing(at: set[int], error: type[BaseException] = RuntimeError) -> Callable[[], None]:
    """A hook that fails on these calls."""
    calls = iter(range(1, 100))

    def hook() -> None:
        if next(calls) in at:
            raise error("this hook fails")

    return hook


def test_a_commit_that_all_ranks_keep(short_path: Path) -> None:
    target = Words()
    with scene(short_path, target, [], [KEEP]) as s:
        assert s.committer.carry_out(COMMIT) == KEEP
        assert (target.holds, s.shadow_lock.doubt, s.shadow_lock.staged) == ("new", False, None)
        assert s.committer.resolve(1.0) is None


def test_whoever_reads_live_weights_can_tell_every_swap_before_it_begins(short_path: Path) -> None:
    target, seen = Words(), list[tuple[int, bool]]()
    swap = target.swap

    def noted() -> None:
        seen.append((s.shadow_lock.swaps, s.shadow_lock.doubt))
        swap()

    target.swap = noted  # type: ignore[method-assign]
    with scene(short_path, target, [], [BACK]) as s:
        s.committer.carry_out(COMMIT)
        assert seen == [(1, True), (2, True)]  # there, and back
        assert s.shadow_lock.certain(0)


def test_another_ranks_failure_takes_this_one_back_and_its_hooks_run_again(short_path: Path) -> None:
    target, ran = Words(), list[str]()
    with scene(short_path, target, [lambda: ran.append(target.holds)], [BACK]) as s:
        assert s.committer.carry_out(COMMIT) == BACK
    assert (target.holds, ran) == ("old", ["new", "old"])


def test_a_hook_that_fails_on_the_way_back_does_not_swap_a_second_time(short_path: Path) -> None:
    target = Words()
    with scene(short_path, target, [failing({2})], [BACK]) as s:
        with pytest.raises(RuntimeError):
            s.committer.carry_out(COMMIT)
        assert (target.holds, s.shadow_lock.doubt) == ("old", True)
        assert s.committer.resolve(5.0) == BACK
        assert (target.holds, target.swaps, s.shadow_lock.doubt) == ("old", 2, False)
        assert len(s.received) == 1


def test_a_hook_that_always_fails_is_told_to_the_leader_at_once(short_path: Path) -> None:
    target = Words()
    with scene(short_path, target, [failing(set(range(100)))], [BACK]) as s:
        with pytest.raises(RuntimeError):
            s.committer.carry_out(COMMIT)
        assert target.holds == "old"
        fault = s.received[0].fault
        assert fault is not None
        assert (fault.step, fault.rank, "this hook fails" in fault.message) == ("hooks", 1, True)
        with pytest.raises(RuntimeError):  # not fit to serve until its hooks run
            s.committer.resolve(5.0)


def test_an_interrupt_in_a_hook_leaves_doubt_and_the_next_boundary_goes_back(short_path: Path) -> None:
    target = Words()
    with scene(short_path, target, [failing({1}, KeyboardInterrupt)], [BACK]) as s:
        with pytest.raises(KeyboardInterrupt):
            s.committer.carry_out(COMMIT)
        assert (target.holds, s.shadow_lock.doubt, s.received) == ("new", True, [])
        assert s.committer.resolve(5.0) == BACK
        assert target.holds == "old"
        assert s.received[0].fault is not None


def test_a_target_that_cannot_swap_reports_it_and_holds_the_old(short_path: Path) -> None:
    target = Words({1: RuntimeError("no")})
    with scene(short_path, target, [], [BACK]) as s:
        assert s.committer.carry_out(COMMIT) == BACK
    assert target.holds == "old"


def test_a_torn_target_never_serves_again(short_path: Path) -> None:
    target = Words({1: Torn("the swap failed, and so did the way back")})
    with scene(short_path, target, [], [BACK]) as s:
        with pytest.raises(Torn):
            s.committer.carry_out(COMMIT)
        with pytest.raises(Torn):
            s.committer.resolve(5.0)
        assert s.shadow_lock.doubt
        fault = s.received[0].fault
        assert fault is not None
        assert fault.code == "LW-601"


def test_a_way_back_that_fails_does_not_serve_until_it_succeeds(short_path: Path) -> None:
    target = Words({2: RuntimeError("cannot go back"), 3: RuntimeError("cannot go back")})
    with scene(short_path, target, [], [BACK]) as s:
        with pytest.raises(RuntimeError, match="cannot go back"):
            s.committer.carry_out(COMMIT)
        with pytest.raises(RuntimeError, match="cannot go back"):
            s.committer.resolve(5.0)
        assert (target.holds, s.shadow_lock.doubt) == ("new", True)
        assert s.committer.resolve(5.0) == BACK
        assert (target.holds, s.shadow_lock.doubt) == ("old", False)


def test_an_answer_that_does_not_come_leaves_doubt_until_it_does(short_path: Path) -> None:
    target = Words()
    short = Decision(epoch=1, undo=False, timeout_s=0.1)
    with scene(short_path, target, [], [None, None, KEEP]) as s:
        s.committer.grace_s = 0.1
        with pytest.raises(OutcomeUnknown, match="rank 1 holds those that were staged"):
            s.committer.carry_out(short)
        with pytest.raises(OutcomeUnknown):
            s.committer.resolve(0.2)
        assert s.shadow_lock.doubt
        assert s.committer.resolve(20.0) == KEEP
        assert (target.holds, target.swaps, s.shadow_lock.doubt) == ("new", 1, False)


def test_a_decision_about_another_round_than_the_staged_one_swaps_nothing(short_path: Path) -> None:
    target = Words()
    with scene(short_path, target, [], [BACK]) as s:
        s.shadow_lock.staged = RoundId(boot="b", epoch=7, publisher="p")
        assert s.committer.carry_out(COMMIT) == BACK
    assert (target.swaps, target.holds) == (0, "old")


def test_an_interrupt_before_the_swap_is_no_success(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Words()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with scene(short_path, target, [], [BACK]) as s:
        with monkeypatch.context() as patched:
            patched.setattr(s.committer, "_swap_and_run_hooks", interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.committer.carry_out(COMMIT)
        assert s.committer.resolve(5.0) == BACK
        assert s.received[0].fault is not None
    assert (target.swaps, target.holds) == (0, "old")


def test_content_that_is_live_already_is_committed_and_undone_without_a_swap(short_path: Path) -> None:
    target = Words()
    undo = Decision(epoch=2, undo=True, timeout_s=20.0)
    with scene(short_path, target, [failing({1, 2})], [KEEP, KEEP, KEEP]) as s:
        s.shadow_lock.unchanged = True
        assert s.committer.carry_out(COMMIT) == KEEP
        assert s.committer.carry_out(undo) == KEEP
        assert [report.fault for report in s.received] == [None, None]
        assert (target.swaps, target.holds) == (0, "old")
