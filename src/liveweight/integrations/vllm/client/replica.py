"""A vLLM as a replica: rounds go over our wire, as with any replica, and vLLM's own calls surround the commit.

Owns the order of a commit: begin an update, pause, call the leader, let the workers install, resume, end the update. Whatever fails before
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
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import KvPolicy, RoundId, fault_of

MODES: dict[KvPolicy | None, PauseMode] = {
    None: "keep",
    "recompute": "keep",
    "drop": "abort",
    "reuse": "reuse",
}
"""How running requests are paused at a commit, by KV policy."""
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
        """`terms` are sent to every worker in the handshake, see workers/backend.InitInfo."""
        self._name, self._controls, self._verify = name, controls, verify
        self._wire = WireReplica(address, secret)
        self._state_wire = WireReplica(address, secret)
        self._call_thread = ThreadPoolExecutor(1, thread_name_prefix="liveweight-vllm-commit")
        self._updates = UpdateCalls(name, controls, self._call_thread)
        self._handshake = VllmHandshake(
            name, controls, self._updates, self._call_thread, self._wire, self._state_wire, terms
        )
        self._opening = RoundOpening(name, self._handshake, self._wire)
        self._policy: KvPolicy | None = None
        self._lease: Deadline | None = None
        self._marked_behind = False
        self._round = Deadline.after(0.0)

    @property
    def name(self) -> str:
        """The name that the user gave."""
        return self._name

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        """See Replica."""
        self._handshake.ensure_own_leader(deadline)
        return self._wire.replica_state(deadline)

    def describe(self, body: m.Describe, deadline: Deadline) -> None:
        """See Replica. Refuses a draft model that vLLM has no call to update; leaving it out silently would be wrong."""
        if of_draft(body.manifest) and not self._handshake.drafts:
            raise Refused(f"{self._name} has no start_draft_weight_update: leave the draft's tensors out")
        self._wire.describe(body, deadline)

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica. Refuses the KV policy `reuse` if new requests could find prefixes of an earlier version."""
        if body.kv_policy == "reuse" and (why := self._controls.mixes_prefixes(deadline)) is not None:
            error = Refused(
                f"{self._name} would mix prefixes of two versions under the KV policy reuse: {why}"
            )
            raise ReplicaRefused(fault_of(error, step="open"))
        self._policy, self._round = body.kv_policy, deadline
        return self._opening.open(body, deadline)

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica. Begins vLLM's update while the workers verify: vLLM answers at the end of a step, and nobody waits for that."""
        if until == "verified":
            self._updates.begin_ahead(self._round)
        return self._wire.status(round_id, until, deadline)

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        """See Replica."""
        self._wire.compare(round_id, digests, deadline)

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica. vLLM must be paused before the vote lease ends."""
        self._opening.check_own(deadline)
        self._lease = Deadline.after(lease_s)
        self._wire.vote(round_id, lease_s, deadline)

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""

        def decided(_: Future[m.Committed]) -> RoundId | None:
            phase = self._state_wire.status(round_id, "committing", deadline).phase
            return round_id if phase == "committing" else None

        return self._swap(lambda: self._wire.commit(round_id, deadline), decided, deadline, undo=False)

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        """See Replica."""

        def decided(call: Future[m.Committed]) -> RoundId | None:
            while not call.done():
                if (found := self._state_wire.replica_state(deadline).round) is not None:
                    return found
            return None

        self._handshake.ensure_own_leader(deadline)
        return self._swap(lambda: self._wire.undo(publisher, deadline), decided, deadline, undo=True)

    def _swap(
        self,
        call_leader: Callable[[], m.Committed],
        decided: Callable[[Future[m.Committed]], RoundId | None],
        deadline: Deadline,
        *,
        undo: bool,
    ) -> m.Committed:
        """Send the leader the call, and have the workers install. The leader answers once all workers have reported their outcome.
        `decided` waits until the leader expects the install, and returns the round's id; None if the leader refused."""
        with self._vllm_paused(deadline, deadline if undo or self._lease is None else self._lease) as ended:
            answer = self._call_thread.submit(call_leader)
            problem = None
            try:
                decision = decided(answer)
                if decision is not None:
                    problem = self._install(decision, deadline, undo=undo)
            except (LiveWeightError, ReplicaRefused):
                ended(None)  # no worker has begun
                answer.exception()  # wait until the call has left the channel: the next call uses it
                raise
            try:
                committed = answer.result()
            except ReplicaRefused as refused:
                if problem is None and refused.fault.code != Torn.code:
                    ended(None)  # every worker is back on the version before
                raise
            self._ended_well(ended, committed)
            return committed

    def _ended_well(self, ended: Callable[[Version | None], None], committed: m.Committed) -> None:
        try:
            ended(committed.serving)
        except LiveWeightError as error:  # committed all the same: the coordinator asks again and learns it
            raise ChannelClosed(f"{self._name} serves it, and was not resumed: {error}") from error

    def _install(self, decision: RoundId, deadline: Deadline, *, undo: bool) -> LiveWeightError | None:
        """Have the workers install. Returns vLLM's error, if any; the outcome itself comes from the leader."""
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
    def _vllm_paused(self, deadline: Deadline, begun: Deadline) -> Iterator[Callable[[Version | None], None]]:
        """Pause vLLM for the block, by the deadline `begun` at the latest. vLLM resumes if the block reported its outcome through the
        yielded function, or if nothing was begun; otherwise vLLM stays paused, and the error says so."""
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
            self._handshake.in_doubt = True
            message = f"{refused.fault.message}; {self._name} stays paused"
            raise ReplicaRefused(replace(refused.fault, message=message), refused.serving) from refused
        except LiveWeightError:
            self._handshake.in_doubt = True
            raise

    def _begin(self, begun: Deadline, deadline: Deadline) -> bool:
        """Begin an update, unless one was begun ahead, and pause. Returns whether somebody had paused vLLM before. A failure is undone, and
        refuses the commit."""
        try:
            was_paused = self._updates.begin(begun) and not self._marked_behind
        except LiveWeightError as error:
            # An update of another trainer may be active: the next handshake deals with that.
            self._handshake.in_doubt = True
            raise ReplicaRefused(fault_of(error, step="commit")) from error
        try:
            mode = MODES[self._policy]
            self._controls.pause(mode, begun)  # even if vLLM is paused already: this drops the KV
            if mode == "reuse" and self._controls.mixes_prefixes(begun) is not None:
                self._controls.pause(
                    "keep", begun
                )  # a request without a salt came since the round was opened
        except LiveWeightError as error:
            self._end(None, was_paused=was_paused, deadline=_later(deadline))
            raise ReplicaRefused(fault_of(error, step="commit")) from error
        return was_paused

    def _end(self, serving: Version | None, *, was_paused: bool, deadline: Deadline) -> None:
        """Name the version, resume unless somebody else had paused, and end the update last. While vLLM is paused for us an update is
        active: if this trainer dies, the next one sees that."""
        named = serving is None or self._controls.name_version(serving, deadline)
        self._marked_behind = self._marked_behind and serving is None
        if not was_paused and not self._marked_behind:
            self._controls.resume(deadline)
        label = None if serving is None else str(serving)
        # vLLM serves again, but answers only after a long step, in which it recomputes the KV of all running requests.
        self._updates.end(label, deadline)
        if not named:
            self._handshake.settle(deadline)

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        """See Replica."""
        try:
            return self._wire.abort(round_id, reason, deadline)
        finally:
            self._updates.give_up(_later(deadline))
            self._handshake.finish_check(_later(deadline))

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        """See Replica. Pauses vLLM until this publisher's next round has committed. If somebody resumes vLLM, it serves its old version."""
        del version, reason
        self._handshake.settle(deadline)
        self._controls.pause("keep", deadline)
        self._marked_behind = True

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        """See Replica. Digests the host's copy of the installed tensors, not vLLM's model."""
        self._handshake.ensure_own_leader(deadline)
        return self._wire.verify(body, deadline)

    def disconnect(self) -> None:
        """Close the connection to the leader; the next call opens another."""
        self._wire.disconnect()

    def interrupt(self) -> None:
        """See Replica."""
        self._handshake.interrupted.set()
        self._wire.interrupt()
        self._state_wire.interrupt()

    def close(self) -> None:
        """See Replica. vLLM's workers stay as they are, for the next publisher. Waits for calls to vLLM that have begun."""
        self._updates.give_up(Deadline.after(GRACE_S))
        self._call_thread.shutdown(wait=True)
        self._wire.close()
        self._state_wire.close()


def _later(deadline: Deadline) -> Deadline:
    return Deadline(deadline.ends_s + GRACE_S, deadline.began_s)
