"""An engine that outlives its ranks: when one is lost, it restarts all of them, restores their version, and serves on.

Owns the present engine, which ends with the first rank that it loses, and the recovery thread, which replaces it. All ranks of a
replica are replaced: a collective that has lost one rank is dead for good. Publishers see a restarted replica: another boot id at the
same address. Calls into the old engine fail. Which version comes back is the restorer's choice (recovery/restoring).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Self

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.recovery.replacement_engines import ReplacementEngines, behind_of, missed
from liveweight.engine.recovery.restart_budget import RestartBudget
from liveweight.engine.recovery.restoring import RestoredVersion
from liveweight.engine.serving.counters import SchedulerCounts
from liveweight.engine.serving.engine_loop import OnFailure
from liveweight.engine.serving.rank_processes import Launch, launch
from liveweight.engine.serving.requests import Sampling, Sink
from liveweight.engine.serving.sleeping import SleepResult, Tag
from liveweight.engine.status import PENDING, PauseMode, Pausing, RecoveryStatus, State, Status
from liveweight.engine.updates.leader_client import UpdateStatus
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.errors import LiveWeightError, WeightsPending
from liveweight.observe.bus import Bus
from liveweight.observe.events import Recovered, RecoveryBegan
from liveweight.spec.manifest import Version
from liveweight.spec.version_demand import VersionDemand

GENERATION = 1 << 40
"""Request numbers of one engine are smaller; the quotient says which engine a request belongs to."""
POLL_S = 0.1


class RestartingEngine:
    """Same methods as Engine, for any thread. Without `restarts` in its configuration it only resumes from a snapshot at start."""

    def __init__(self, config: EngineConfig, *, launch: Launch = launch, bus: Bus | None = None) -> None:
        self._bus = bus or Bus()
        self._replacements = ReplacementEngines(config, launch, self._bus)
        self._lost: queue.SimpleQueue[LiveWeightError | None] = queue.SimpleQueue()
        self._changed = threading.Lock()
        self._on_failure: list[OnFailure] = []
        self._fault: LiveWeightError | None = None
        self._pending: LiveWeightError | None = None
        self._recovery: RecoveryStatus | None = None
        self._counts, self._generation = SchedulerCounts(), 0
        self._budget = None if config.restarts is None else RestartBudget(config.restarts)
        self._engine = engine = self._replacements.first()
        self.config = self._replacements.config
        self.spec, self.name, self.start = engine.spec, engine.name, engine.start
        self.context, self.vocab, self.tokenizer = engine.context, engine.vocab, engine.tokenizer
        if config.snapshots is not None and config.snapshots.resume:
            self._resume(engine)
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._thread.start()
        self._engine.on_failure(self._on_engine_failure)

    # For callers.

    @property
    def address(self) -> str | None:
        """Where publishers reach it, whichever its ranks are."""
        return None if self.config.updates is None else self.config.updates.address

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the present ranks."""
        return self._engine.pids

    @property
    def paused(self) -> Pausing:
        """Whether requests run, still finish, or are paused."""
        return self._engine.paused

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        sink: Sink,
        demand: VersionDemand | None = None,
    ) -> int:
        """See Engine; WeightsPending while ranks are being replaced."""
        with self._changed:
            engine, generation = self._check_engine(), self._generation
        return generation * GENERATION + engine.submit(prompt, sampling, sink, demand)

    def check_demand(self, demand: VersionDemand | None) -> None:
        """See Engine."""
        self._current_engine().check_demand(demand)

    def cancel(self, request: int) -> None:
        """See Engine. A request of ranks that are gone has ended."""
        generation, number = divmod(request, GENERATION)
        with self._changed:
            engine = self._engine if generation == self._generation else None
        if engine is not None:
            engine.cancel(number)

    def abort_requests(self, requests: Sequence[int] | None = None) -> int:
        """See Engine."""
        with self._changed:
            engine, generation = self._check_engine(), self._generation
        if requests is not None:
            parts = [divmod(request, GENERATION) for request in requests]
            requests = [number for of, number in parts if of == generation]
        return engine.abort_requests(requests)

    def status(self) -> Status:
        """See Engine; counts go on over restarts."""
        with self._changed:
            engine, pending, fault, before = self._engine, self._pending, self._fault, self._counts
        status = engine.status()
        status = replace(status, counts=status.counts.plus(before))
        if fault is not None:
            return replace(status, state="failed", fault=fault)
        if pending is None and (status.state != "failed" or self._budget is None):
            return status
        state: State = "stopping" if self._replacements.ending else "pending_weights"
        free, fault = status.blocks_total, pending or status.fault
        return replace(status, state=state, fault=fault, running=0, waiting=0, blocks_free=free)

    def update_status(self) -> UpdateStatus:
        """See Engine; while ranks are replaced, what is known without them."""
        with self._changed:
            engine, pending, recovery = self._engine, self._pending, self._recovery
        if pending is None:
            try:
                update_status = engine.update_status()
            except LiveWeightError:
                pending = self._pending
                if pending is None:  # else a rank was lost during the call
                    raise
            else:
                if recovery is not None and update_status.serving != recovery.version:
                    recovery = replace(recovery, behind=None)  # a later round has installed another version
                return replace(update_status, recovery=recovery)
        state = f"{PENDING} ({pending})"
        return UpdateStatus(state=state, serving=None, undo=None, round=None, rounds=(), recovery=recovery)

    def undo(self, timeout_s: float) -> Version | None:
        """See Engine."""
        return self._current_engine().undo(timeout_s)

    def verify(self, request: VerificationRequest) -> VerificationResult:
        """See Engine."""
        return self._current_engine().verify(request)

    def update_weights(self, request: RequestedVersion) -> UpdateResult:
        """See Engine."""
        return self._current_engine().update_weights(request)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """See Engine. A pause outlasts the ranks."""
        self._current_engine().pause(mode, timeout_s)

    def resume(self) -> None:
        """See Engine."""
        self._current_engine().resume()

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """See Engine. Replacement ranks are awake."""
        return self._current_engine().sleep(tags, timeout_s)

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """See Engine."""
        return self._current_engine().wake(tags, timeout_s)

    def drop_cache(self, timeout_s: float) -> int:
        """See Engine."""
        return self._current_engine().drop_cache(timeout_s)

    def on_failure(self, callback: OnFailure) -> None:
        """Call back, on another thread, when it gives up; at once if it has."""
        with self._changed:
            fault = self._fault
            if fault is None:
                self._on_failure.append(callback)
        if fault is not None:
            callback(fault)

    def stop(self, timeout_s: float = 0.0) -> None:
        """See Engine. Ranks that are being started are killed."""
        with self._changed:
            self._replacements.end()
            engine, pending = self._engine, self._pending
        if pending is None:
            engine.stop(timeout_s)
        self._lost.put(None)
        while self._thread.is_alive():
            if self._pending is not None:
                self._replacements.kill()
            self._thread.join(POLL_S)
        self._engine.stop()
        self._replacements.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _current_engine(self) -> Engine:
        with self._changed:
            return self._check_engine()

    def _check_engine(self) -> Engine:
        """The engine, or WeightsPending while its ranks are replaced. Call with the lock held."""
        if self._fault is None and self._pending is not None:
            raise WeightsPending(f"{self._pending}; its ranks are being started again")
        return self._engine

    # Recovery.

    def _resume(self, engine: Engine) -> None:
        """Restore the newest snapshot."""
        began_s = time.monotonic()
        try:
            restored = self._replacements.restore(engine, None)
        except BaseException:
            engine.stop()
            raise
        if restored.origin != "checkpoint" or restored.notes:
            self._bus.emit(self._record(restored, None, began_s))

    def _on_engine_failure(self, fault: LiveWeightError) -> None:
        """Called on the failed engine's thread."""
        if self._budget is not None:
            with self._changed:
                self._pending = fault
        self._lost.put(fault)

    def _run(self) -> None:
        while (fault := self._lost.get()) is not None:
            if self._replacements.ending:
                return
            try:
                self._recover(fault)
            except LiveWeightError as error:
                self._give_up(error)
                return
            except Exception as error:  # a bug must end the engine, not leave it pending
                logging.getLogger("liveweight").exception("the recovery failed")
                self._give_up(LiveWeightError(f"{type(error).__name__}: {error}"))
                return

    def _recover(self, fault: LiveWeightError) -> None:
        """Replace the failed engine; raises the reason to give up."""
        if self._budget is None:
            raise fault
        began_s, old, paused = time.monotonic(), self._engine, self._engine.paused_by_operator
        old.stop()
        while True:
            self._budget.spend(time.monotonic(), fault)
            self._bus.emit(RecoveryBegan(replica=self.name, reason=str(fault)))
            try:
                self._replacements.wait(self._budget.wait_s())
                engine, restored = self._replacements.next(old.served, paused=paused)
            except LiveWeightError as error:
                if self._replacements.ending:
                    raise
                fault = error
                continue
            self._budget.succeeded()
            self._take_over(engine, restored, old, began_s)
            return

    def _take_over(self, engine: Engine, restored: RestoredVersion, old: Engine, began_s: float) -> None:
        counts = old.status().counts
        with self._changed:
            self._counts = counts.plus(self._counts)
            self._engine, self._generation, self._pending = engine, self._generation + 1, None
            recovered = self._record(restored, missed(self._recovery, old.served), began_s)
        self._bus.emit(recovered)
        engine.on_failure(self._on_engine_failure)

    def _record(self, restored: RestoredVersion, wanted: Version | None, began_s: float) -> Recovered:
        behind, took_s = behind_of(restored, wanted), time.monotonic() - began_s
        self._recovery = RecoveryStatus(
            restarts=0 if self._budget is None else self._budget.restarts,
            version=restored.version,
            origin=restored.origin,
            behind=behind,
            notes=restored.notes,
            took_s=took_s,
        )
        return Recovered(
            replica=self.name,
            version=str(restored.version),
            origin=restored.origin,
            behind=None if behind is None else str(behind),
            notes=restored.notes,
            took_s=took_s,
        )

    def _give_up(self, fault: LiveWeightError) -> None:
        with self._changed:
            if self._replacements.ending:
                return
            self._fault = fault
            callbacks, self._on_failure = self._on_failure, []
        for callback in callbacks:
            callback(fault)
