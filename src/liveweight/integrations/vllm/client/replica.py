"""A vLLM as a publisher drives it: rounds over our wire, like any replica's, and vLLM's own calls around the commit.

Owns the order of a commit: begin an update, pause, tell the leader, let the workers install, resume, end the update. Whatever fails before
the workers install leaves vLLM as it was; afterwards vLLM is resumed only where all workers are known to hold one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from liveweight.errors import ChannelClosed, LiveWeightError, Refused, Torn
from liveweight.integrations.vllm.client.controls import PauseMode, VllmControls
from liveweight.integrations.vllm.client.handshake import VllmHandshake
from liveweight.integrations.vllm.client.open_round import RoundOpening
from liveweight.integrations.vllm.client.update_calls import UpdateCalls
from liveweight.integrations.vllm.draft_model import of_draft
from liveweight.integrations.vllm.handshake_terms import Verify
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire import messages as m
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import KvPolicy, RoundId, fault_of

MODES: dict[KvPolicy | None, PauseMode] = {
    None: "keep",
    "recompute": "keep",
    "drop": "abort",
    "reuse": "reuse",
}
"""How requests that run at a commit are held, by KV policy."""
GRACE_S = 10.0
"""How long ending an update and resuming may take beyond the deadline: a vLLM that stays paused is worse than a late answer."""


class VllmReplica:
    """Implements rounds/replica's port."""

    def __init__(
        self,
        name: str,
        controls: VllmControls,
        *,
        address: str,
        secret: Secret,
        terms: dict[str, Any],
        verify: Verify,
    ) -> None:
        """`terms`: what every worker is told when it is met, see backend.InitInfo."""
        self._name, self._controls, self._verify = name, controls, verify
        self._wire = WireReplica(address, secret)
        self._looker = WireReplica(address, secret)
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="liveweight-vllm-commit")
        self._updates = UpdateCalls(name, controls, self._teller)
        self._meeting = VllmHandshake(
            name, controls, self._updates, self._teller, self._wire, self._looker, terms
        )
        self._opening = RoundOpening(name, self._meeting, self._wire)
        self._policy: KvPolicy | None = None
        self._lease: Deadline | None = None
        self._stood_back = False
        self._round = Deadline.after(0.0)

    @property
    def name(self) -> str:
        """What the user called it."""
        return self._name

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        """See Replica."""
        self._meeting.make_sure(deadline)
        return self._wire.replica_state(deadline)

    def describe(self, structure: str, manifest: Manifest, deadline: Deadline) -> None:
        """See Replica. A draft that vLLM cannot be told to take is refused, not left out."""
        if of_draft(manifest) and not self._meeting.drafts:
            raise Refused(f"{self._name} has no start_draft_weight_update: leave the draft's tensors out")
        self._wire.describe(structure, manifest, deadline)

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica. The KV policy `reuse` is refused where vLLM would hand old prefixes to new requests, too."""
        if body.kv_policy == "reuse" and (why := self._controls.mixes_prefixes(deadline)) is not None:
            error = Refused(
                f"{self._name} would mix prefixes of two versions under the KV policy reuse: {why}"
            )
            raise ReplicaRefused(fault_of(error, step="open"))
        self._policy, self._round = body.kv_policy, deadline
        return self._opening.open(body, deadline)

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica. vLLM's update begins while its workers verify: it answers at the end of a step, for which nobody waits then."""
        if until == "verified":
            self._updates.begin_ahead(self._round)
        return self._wire.status(round_id, until, deadline)

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        """See Replica."""
        self._wire.compare(round_id, digests, deadline)

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica. Its yes holds for a while, in which vLLM has to come to a standstill."""
        self._opening.check_own(deadline)
        self._lease = Deadline.after(lease_s)
        self._wire.vote(round_id, lease_s, deadline)

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""

        def decided(_: Future[m.Committed]) -> RoundId | None:
            phase = self._looker.status(round_id, "committing", deadline).phase
            return round_id if phase == "committing" else None

        return self._swap(lambda: self._wire.commit(round_id, deadline), decided, deadline, undo=False)

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        """See Replica."""

        def decided(told: Future[m.Committed]) -> RoundId | None:
            while not told.done():
                if (found := self._looker.replica_state(deadline).round) is not None:
                    return found
            return None

        self._meeting.make_sure(deadline)
        return self._swap(lambda: self._wire.undo(publisher, deadline), decided, deadline, undo=True)

    def _swap(
        self,
        tell: Callable[[], m.Committed],
        decided: Callable[[Future[m.Committed]], RoundId | None],
        deadline: Deadline,
        *,
        undo: bool,
    ) -> m.Committed:
        """Tell the leader, whose answer comes once all workers have said how it went, and let them do it. `decided` waits until the
        leader expects that, and has the round's id; None where it refused."""
        with self._replica_state_still(
            deadline, deadline if undo or self._lease is None else self._lease
        ) as ended:
            told = self._teller.submit(tell)
            problem = None
            try:
                decision = decided(told)
                if decision is not None:
                    problem = self._install(decision, deadline, undo=undo)
            except (LiveWeightError, ReplicaRefused):
                ended(None)  # no worker was told
                told.exception()  # its channel is free before anybody else uses it
                raise
            try:
                committed = told.result()
            except ReplicaRefused as refused:
                if problem is None and refused.fault.code != Torn.code:
                    ended(None)  # every worker has come back from it, with the version before
                raise
            self._ended_well(ended, committed)
            return committed

    def _ended_well(self, ended: Callable[[Version | None], None], committed: m.Committed) -> None:
        try:
            ended(committed.serving)
        except LiveWeightError as error:  # it is committed all the same: whoever asks again hears so
            raise ChannelClosed(f"{self._name} serves it, and was not resumed: {error}") from error

    def _install(self, decision: RoundId, deadline: Deadline, *, undo: bool) -> LiveWeightError | None:
        """What vLLM had against it; how it went, the leader says."""
        order = {
            "boot": decision.boot,
            "epoch": decision.epoch,
            "undo": undo,
            "timeout_s": max(0.001, deadline.remaining_s()),
            "verify": self._verify,
        }
        try:
            self._controls.update(order, _later(deadline))
        except LiveWeightError as error:
            return error
        return None

    @contextmanager
    def _replica_state_still(
        self, deadline: Deadline, begun: Deadline
    ) -> Iterator[Callable[[Version | None], None]]:
        """vLLM takes no step inside, where it must be by the deadline `begun`. It goes on afterwards if it was said how it ended, or if
        nothing was begun; else it stays paused, and the error says so."""
        was_paused = self._begin(begun, deadline)
        done = False

        def ended(serving: Version | None) -> None:
            nonlocal done
            self._end(serving, was_paused=was_paused, deadline=_later(deadline))
            done = True

        try:
            yield ended
        except ReplicaRefused as refused:
            if done:
                raise
            self._meeting.in_doubt = True
            said = f"{refused.fault.message}; {self._name} stays paused"
            raise ReplicaRefused(replace(refused.fault, message=said), refused.serving) from refused
        except LiveWeightError:
            self._meeting.in_doubt = True
            raise

    def _begin(self, begun: Deadline, deadline: Deadline) -> bool:
        """Begin an update, unless that is done, and pause; whether somebody had paused it. What fails here is undone, and refuses the
        commit."""
        try:
            was_paused = self._updates.begin(begun) and not self._stood_back
        except LiveWeightError as error:
            # An update of somebody else may be active: that is looked after when vLLM is met again.
            self._meeting.in_doubt = True
            raise ReplicaRefused(fault_of(error, step="commit")) from error
        try:
            mode = MODES[self._policy]
            self._controls.pause(mode, begun)  # a paused one forgets its KV, too
            if mode == "reuse" and self._controls.mixes_prefixes(begun) is not None:
                self._controls.pause("keep", begun)  # since the round was opened somebody came without a salt
        except LiveWeightError as error:
            self._end(None, was_paused=was_paused, deadline=_later(deadline))
            raise ReplicaRefused(fault_of(error, step="commit")) from error
        return was_paused

    def _end(self, serving: Version | None, *, was_paused: bool, deadline: Deadline) -> None:
        """Name the version, resume unless somebody else had paused, and end the update, last of all: as long as vLLM is paused for us,
        one is active, and tells so to whoever comes after a trainer that died."""
        named = serving is None or self._controls.name_version(str(serving), deadline)
        self._stood_back = self._stood_back and serving is None
        if not was_paused and not self._stood_back:
            self._controls.resume(deadline)
        label = None if serving is None else str(serving)
        # vLLM serves again, and hears of it only after a long step: the KV of all running requests is computed anew.
        self._updates.end(label, deadline)
        if not named:
            self._meeting.settle(deadline)

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        """See Replica."""
        try:
            return self._wire.abort(round_id, reason, deadline)
        finally:
            self._updates.give_up(_later(deadline))
            self._meeting.rest(_later(deadline))

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        """See Replica. It is paused until this publisher's next round has committed; whoever resumes it lets it serve what it has."""
        del version, reason
        self._meeting.settle(deadline)
        self._controls.pause("keep", deadline)
        self._stood_back = True

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        """See Replica. What is digested is the host's copy of what was installed."""
        self._meeting.make_sure(deadline)
        return self._wire.verify(body, deadline)

    def disconnect(self) -> None:
        """Let go of the connection to the leader; the next call makes another."""
        self._wire.disconnect()

    def interrupt(self) -> None:
        """See Replica."""
        self._meeting.interrupted.set()
        self._wire.interrupt()
        self._looker.interrupt()

    def close(self) -> None:
        """See Replica. vLLM's workers stay as they are, for the next publisher. What was begun to be told to vLLM is told."""
        self._updates.give_up(Deadline.after(GRACE_S))
        self._teller.shutdown(wait=True)
        self._wire.close()
        self._looker.close()


def _later(deadline: Deadline) -> Deadline:
    return Deadline(deadline.ends_s + GRACE_S, deadline.began_s)
