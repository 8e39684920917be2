"""The engine that programs start and call: a checkpoint, served by rank processes.

Steps are the engine loop's (serving/engine_loop); which requests run is the scheduler's (serving/scheduler).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.serving.awaiting_weights import AwaitingWeights
from liveweight.engine.serving.cache_sizes import cache_blocks, context_of
from liveweight.engine.serving.counters import SchedulerLimits
from liveweight.engine.serving.engine_loop import EngineLoop, OnFailure
from liveweight.engine.serving.pauses import Pauses
from liveweight.engine.serving.rank_processes import Launch, RankProcesses, launch
from liveweight.engine.serving.requests import Sampling, Sink
from liveweight.engine.serving.scheduler import Scheduler
from liveweight.engine.serving.sequence import Sequence as Running
from liveweight.engine.serving.sleeping import EngineSleep, SleepResult, Tag
from liveweight.engine.serving.step_stream import weights_text
from liveweight.engine.status import PauseMode, Pausing, Status
from liveweight.engine.text.stream import TextStream
from liveweight.engine.text.tokenizer import Tokenizer
from liveweight.engine.updates.leader_client import LeaderClient, UpdateStatus
from liveweight.engine.updates.live_updates import DecisionInbox
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.engine.updates.update_services import UpdateServices
from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.errors import EngineStopping, RankLost, RequestInvalid, RoundAborted, WireError, WrongState
from liveweight.observe.bus import Bus
from liveweight.spec.manifest import Version
from liveweight.spec.version_demand import VersionDemand


class Engine:
    """A running engine. Its methods may be called from any thread; sinks are called on its own."""

    def __init__(self, config: EngineConfig, *, launch: Launch = launch, bus: Bus | None = None) -> None:
        directory = Path(config.model)
        self.config, self.spec = config, ModelSpec.read(directory)
        self.tokenizer = Tokenizer.load(directory)
        self.name = config.served_name or directory.resolve().name
        self.context, self.vocab = context_of(config, self.spec), self.spec.vocab
        blocks = cache_blocks(config, self.spec, self.context)
        self._numbers = itertools.count(1)
        with ExitStack() as stack:
            inbox = DecisionInbox()
            bus = bus or Bus()
            self._awaiting = AwaitingWeights(bus, begins=config.await_weights)
            stack.callback(self._awaiting.close)
            self._update_services = update_services = UpdateServices(config, self.name, inbox, bus, stack)
            self._leader_client, self._saver = update_services.leader_client, update_services.saver
            rank_config = config if self._saver is None else self._saver.config_for_ranks(config)
            ranks = RankProcesses(rank_config, blocks=blocks, context=self.context, launch=launch)
            self._resources = stack.pop_all()
        self.start = ranks.begin.version
        """The version that the engine was started on."""
        inbox.on_decision(ranks.wake)
        self._engine_loop = EngineLoop(
            self._scheduler(blocks, weights_text(self.start)),
            ranks,
            inbox,
            depth=2 if config.overlap else 1,
            kv_policy="recompute" if config.updates is None else config.updates.kv_policy,
            in_place=config.updates is not None and config.updates.shadow == "none",
            outlives_torn=config.restarts is None,
            served=lambda: self.served,
        )
        self._pauses = Pauses(self._engine_loop, self._check_open)
        self._sleep = self._make_sleep()
        self._requested_updates = update_services.requested_updates(self._pauses, self._resources)
        self._verifier = update_services.verifier(self._resources)
        if update_services.leader is not None:
            update_services.leader.report_not_serving(self._not_serving)
        self._thread = threading.Thread(
            target=self._engine_loop.run, args=(self._resources.close,), name="engine", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str | None:
        """Where publishers reach it; None without live updates."""
        return None if self._leader_client is None else self._leader_client.address

    @property
    def served(self) -> Version | None:
        """The version that all ranks hold, as the leader recorded it: of a swap under way, the one before until the outcome is decided."""
        leader = self._update_services.leader
        return self.start if leader is None else leader.served

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the ranks."""
        return self._engine_loop.ranks.pids

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        sink: Sink,
        demand: VersionDemand | None = None,
    ) -> int:
        """Take a request; its answer goes to `sink`, piece by piece. Returns the number to cancel it by.

        RequestInvalid, QueueFull, EngineStopping, RankLost, Torn or WeightsPending, when it is not taken; VersionNotServed where it demands
        another version. If weights change before its first token, the demand is checked again, and may end the answer with that error.
        """
        if not prompt:
            raise RequestInvalid("the prompt is empty")
        if not all(0 <= token < self.vocab for token in prompt):
            raise RequestInvalid(f"the prompt has token ids outside the vocabulary of {self.vocab}")
        if sampling.routing and not self.spec.sparse_layers:
            raise RequestInvalid("routed experts were asked for, and the model has none")
        if sampling.logprobs_mode is None:
            sampling = msgspec.structs.replace(sampling, logprobs_mode=self.config.logprobs_mode)
        number = next(self._numbers)
        sequence = Running(
            number, list(prompt), sampling, sink, TextStream(self.tokenizer, sampling.stop), demand
        )
        with self._engine_loop.lock:
            self._check_open()
            self._engine_loop.check_not_torn()
            self._awaiting.check()
            # The leader records a swap's outcome before a publisher learns it. No step of a new request precedes a swap that is under way,
            # and its end checks the demand again: so the leader's version is the right one here, also while this loop has not heard of it.
            self.check_demand(demand)
            self._engine_loop.scheduler.add(sequence)
        self._engine_loop.ranks.wake()
        return number

    def check_demand(self, demand: VersionDemand | None) -> None:
        """Raise VersionNotServed if the present version does not meet the demand; `submit` checks again. Returns at once."""
        if demand is not None:
            demand.check(self.served)

    def _not_serving(self) -> str | None:
        """What it does with new requests if it does not serve them. Called on the leader's thread, without the loop's lock."""
        if self._awaiting.reason is not None:
            return f"takes no requests: {self._awaiting.reason}"
        if self.paused != "running":
            return f"{self.paused}: new requests wait"
        return None

    def cancel(self, request: int) -> None:
        """End a request with what it has, soon. Nothing happens if it ended already."""
        with self._engine_loop.lock:
            self._engine_loop.cancelled.append(request)
        self._engine_loop.ranks.wake()

    def status(self) -> Status:
        """How the engine is now."""
        with self._engine_loop.lock:
            scheduler = self._engine_loop.scheduler
            state, waits = self._engine_loop.reported_state, None
            if state == "running":
                waits = self._awaiting.fault
                state = "asleep" if self._sleep.asleep else "running" if waits is None else "pending_weights"
            return Status(
                state=state,
                running=scheduler.running,
                waiting=scheduler.waiting,
                blocks_total=scheduler.pool.count,
                blocks_free=scheduler.pool.free,
                fault=self._engine_loop.fault or self._engine_loop.torn or waits,
                weights=scheduler.weights,
                paused=scheduler.pausing,
                asleep=self._sleep.asleep,
                counts=scheduler.counts.copy(),
            )

    @property
    def paused(self) -> Pausing:
        """Whether requests run, still finish, or are paused."""
        return self._engine_loop.scheduler.pausing

    @property
    def paused_by_operator(self) -> bool:
        """Whether an operator paused the requests."""
        return self._pauses.by_operator

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Let no step follow the present ones; new requests wait. Returns when no request runs.

        DeadlineExceeded if they do not in time: the engine goes on towards its pause. Twice is fine, also with another mode.
        """
        self._pauses.pause(mode, timeout_s)

    def resume(self) -> None:
        """Let requests run again."""
        self._pauses.resume()

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Release the memory of these: requests pause until `wake`. RoundOpen while a round is open."""
        with self._engine_loop.lock:
            self._check_open()
            self._engine_loop.check_not_torn()
        return self._sleep.sleep(tags, timeout_s)

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Restore the memory of these; requests go on when nothing is asleep any more. After an error the engine is still asleep."""
        with self._engine_loop.lock:
            self._check_open()
        return self._sleep.wake(tags, timeout_s)

    def drop_cache(self, timeout_s: float) -> int:
        """Release the cache's memory for a moment; running requests are filled again. Returns the bytes. WrongState while it sleeps."""
        with self._engine_loop.lock:
            self._check_open()
        return self._sleep.drop_cache(timeout_s)

    def abort_requests(self, requests: Sequence[int] | None = None) -> int:
        """End these requests (None: all of them, waiting ones too) with what they have; how many of them there were."""
        with self._engine_loop.lock:
            known = self._engine_loop.scheduler.numbers()
            ended = known if requests is None else [number for number in requests if number in set(known)]
            self._engine_loop.cancelled += ended
        self._engine_loop.ranks.wake()
        return len(ended)

    def update_status(self) -> UpdateStatus:
        """Rounds and versions, as the engine's leader reports them. WrongState without live updates."""
        update_status = self._with_leader_client("a question about live updates").update_status()
        saving = None if self._saver is None else self._saver.status()
        return replace(update_status, snapshots=saving, pending=self._awaiting.reason)

    def await_weights(self, reason: str) -> None:
        """Take no requests from now on, until a publisher has brought a version, or finds its own installed."""
        self._awaiting.begin(reason)

    def undo(self, timeout_s: float) -> Version | None:
        """Go back to the version before; what serves then. WrongState where there is none, as after an undo."""
        return self._with_leader_client("an undo").undo(timeout_s)

    def verify(self, request: VerificationRequest) -> VerificationResult:
        """Digest what all ranks hold now, and compare it. WrongState without live updates; see Verifier."""
        if self._verifier is None:
            raise WrongState("started without live updates", "a verification")
        try:
            return self._verifier.verify(request)
        except (RoundAborted, WireError):
            with self._engine_loop.lock:
                self._check_open()  # where the engine has lost a rank, RankLost says more
            raise

    def update_weights(self, request: RequestedVersion) -> UpdateResult:
        """Update the engine to a version of its source. WrongState without a source; after RoundFailed it serves the version it had."""
        self._with_leader_client("an update")
        if self._requested_updates is None:
            raise WrongState("started without a source (--weights-from)", "an update that is asked for")
        with self._engine_loop.lock:
            self._check_open()
        return self._requested_updates.update(request)

    def on_failure(self, callback: OnFailure) -> None:
        """Call back, on the engine's thread, when a rank was lost; at once if that has happened."""
        with self._engine_loop.lock:
            fault = self._engine_loop.fault
            if fault is None:
                self._engine_loop.on_failure.append(callback)
        if fault is not None:
            callback(fault)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no new requests, let the others finish for that long, end the rest with what they have, then end all processes."""
        with self._engine_loop.lock:
            if self._engine_loop.state == "running":
                self._engine_loop.state = "stopping"
            self._engine_loop.quiet.wait_for(
                lambda: self._engine_loop.state != "stopping" or not self._engine_loop.busy(), timeout_s
            )
            self._engine_loop.closing = True
        self._engine_loop.ranks.wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _scheduler(self, blocks: int, weights: str) -> Scheduler:
        config = self.config
        drafts = config.draft and self.spec.draft_layers > 0
        limits = SchedulerLimits(
            blocks=blocks,
            block_tokens=config.block_tokens,
            context=self.context,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            batch_tokens=config.batch_tokens,
            width=2 if drafts else 1,
            caching=config.prefix_cache,
        )
        return Scheduler(limits, weights=weights, ends=frozenset(self.spec.eos_ids))

    def _make_sleep(self) -> EngineSleep:
        leader_client, config = self._leader_client, self.config
        sleep = EngineSleep(
            self._engine_loop,
            self._pauses,
            leader_client,
            world=config.tp,
            start=self.start,
            directory=config.sleep_directory,
        )
        self._resources.callback(sleep.close)
        return sleep

    def _with_leader_client(self, wanted: str) -> LeaderClient:
        if self._leader_client is None:
            raise WrongState("started without live updates", wanted)
        return self._leader_client

    def _check_open(self) -> None:
        if self._engine_loop.fault is not None:
            raise RankLost(str(self._engine_loop.fault)) from self._engine_loop.fault
        if self._engine_loop.state != "running":
            raise EngineStopping("the engine is being stopped")
