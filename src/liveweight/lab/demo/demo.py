"""The whole demo: starts engines and a trainer, publishes the warm-up's weights, runs the live run, then the control run.

Owns the order of events, and the directory that holds all files of the demo.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.errors import LiveWeightError, RoundAborted
from liveweight.integrations.vllm.server_process import VllmLaunching
from liveweight.lab.demo.engine_servers import EngineServer, EngineServers
from liveweight.lab.demo.faults import plan
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.rollouts import Rollouts, RolloutSettings
from liveweight.lab.demo.learning.staleness import StalenessBound
from liveweight.lab.demo.publishing import Published, StepPublisher
from liveweight.lab.demo.records import (
    DemoRound,
    Listener,
    Phase,
    PhaseName,
    Run,
    Summary,
    TrainingStep,
    Warmed,
    summarise,
)
from liveweight.lab.demo.settings import DemoSettings, Launching
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.trainer_rounds import (
    MakePublisher,
    RoundListener,
    RoundProgress,
    SilentListener,
    TrainerRounds,
)
from liveweight.lab.demo.training_loop import Publish, RecoverEngines, TrainingLoop
from liveweight.lab.demo.vllm_servers import DemoVllmServer
from liveweight.lab.demo.watched_replica import WatchedReplica
from liveweight.wire.credentials import load_or_create_secret

KEPT = 3
"""Versions whose weights the trainer keeps beyond the staleness bound, for the on-policy check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """The demo's steps and summary."""

    steps: tuple[TrainingStep, ...]
    summary: Summary


def run_demo(
    settings: DemoSettings,
    launching: Launching | VllmLaunching,
    make_publisher: Callable[[Path], MakePublisher],
    *,
    emit: Listener,
    stop: Stop,
) -> DemoOutcome:
    """Run the demo. `make_publisher` gets the directory for its sockets and its secret. Raises RunStopped if `stop` was called."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-demo-")))
        demo = _Demo(settings, directory, make_publisher(directory), emit=emit, stop=stop)
        fleet = stack.enter_context(EngineServers(demo.servers(launching)))
        try:
            return demo.go(fleet)
        except LiveWeightError:
            stop.check()  # an error caused by stopping is no error
            raise


class _Demo:
    def __init__(
        self,
        settings: DemoSettings,
        directory: Path,
        make_publisher: MakePublisher,
        *,
        emit: Listener,
        stop: Stop,
    ) -> None:
        self._settings, self._directory, self._make_publisher = settings, directory, make_publisher
        self._emit, self._stop, self._since_s = emit, stop, time.monotonic()
        self._model = directory / "model"
        self._bound = StalenessBound(staleness=settings.staleness, batch=settings.training.prompts)

    def servers(self, launching: Launching | VllmLaunching) -> list[EngineServer]:
        return [self._server(number, launching) for number in range(self._settings.replicas)]

    def _server(self, number: int, launching: Launching | VllmLaunching) -> EngineServer:
        if isinstance(launching, VllmLaunching):
            return DemoVllmServer(number, self._directory, self._model, launching)
        tp, elastic = self._settings.tp, self._settings.chaos
        return EngineServer(number, self._directory, self._model, launching, tp=tp, elastic=elastic)

    def go(self, fleet: EngineServers) -> DemoOutcome:
        self._phase("start", self._settings.engines)
        init_model(self._model, self._settings.size, seed=self._settings.seed)
        load_or_create_secret(self._directory / "secret")
        fleet.launch()
        policy = Policy(self._model, self._settings.training, keep=self._settings.staleness + KEPT)
        self._warm_up(policy)
        fleet.await_ready(self._stop)
        warm = policy.weights()
        steps = self._live(policy, fleet)
        if self._settings.control:
            policy.restore(warm)
            steps += self._control(policy, fleet)
        summary = summarise(
            steps,
            seed=self._settings.seed,
            mode=self._settings.mode,
            kv_policy=self._settings.kv_policy,
            replicas=self._settings.replicas,
            took_s=time.monotonic() - self._since_s,
        )
        self._phase("end")
        self._emit(summary)
        return DemoOutcome(steps=tuple(steps), summary=summary)

    def _warm_up(self, policy: Policy) -> None:
        """Train a little on demonstrations with mistakes."""
        self._phase(
            "warmup", f"imitating answers of which {self._settings.task.noise:.0%} of the digits are wrong"
        )
        chance, count = random.Random(f"{self._settings.seed} warm-up"), self._settings.training.warmup_steps
        for step in range(1, count + 1):
            self._stop.check()
            loss = policy.imitate(self._settings.task, chance)
            self._emit(Warmed(at_s=self._now_s(), step=step, steps=count, loss=loss))

    def _live(self, policy: Policy, fleet: EngineServers) -> list[TrainingStep]:
        """Publish every step's weights."""
        self._phase("live", "every step is published into the running engines")
        settings = self._settings
        planned = plan(settings.steps, settings.replicas, settings.seed) if settings.chaos else {}
        rollouts = self._rollouts(fleet, self._bound)
        with self._rounds(policy, fleet, rollouts) as rounds:
            first = self._publish_warm(policy, rounds)
            publishing = StepPublisher(
                rounds=rounds, servers=fleet.servers, planned=planned, stop=self._stop, since_s=self._since_s
            )
            with rollouts:
                return self._loop("live", policy, rollouts, publishing.after, publishing.recover_engines).go(
                    [first]
                )

    def _control(self, policy: Policy, fleet: EngineServers) -> list[TrainingStep]:
        """The same again, but publish nothing: the engines keep the warm-up's weights."""
        self._phase("control", "the same, but nothing is published after the warm-up")
        rollouts = self._rollouts(fleet, replace(self._bound, enforced=False))
        with self._rounds(policy, fleet, SilentListener()) as rounds:
            self._publish_warm(policy, rounds)

        def publish_nothing(step: int, last: bool) -> Published:
            del last
            rollouts.offers(step)  # nothing is offered: only training limits generation
            rollouts.serves(step)
            return Published()

        with rollouts:
            return self._loop("control", policy, rollouts, publish_nothing, lambda _: False).go()

    def _publish_warm(self, policy: Policy, rounds: TrainerRounds) -> DemoRound:
        """Publish the first weights of a run. No fault is planned for this round."""
        policy.begin_rl()
        policy.keep(0)
        first = rounds.publish(0)
        if first.problem is not None:
            raise RoundAborted(f"the warm-up's weights were not taken: {first.problem}")
        return first

    def _loop(
        self, run: Run, policy: Policy, rollouts: Rollouts, publish: Publish, recover: RecoverEngines
    ) -> TrainingLoop:
        return TrainingLoop(
            run=run,
            steps=self._settings.steps,
            policy=policy,
            rollouts=rollouts,
            publish=publish,
            recover=recover,
            stop=self._stop,
            emit=self._emit,
            since_s=self._since_s,
        )

    def _rollouts(self, fleet: EngineServers, bound: StalenessBound) -> Rollouts:
        rollout_settings = RolloutSettings(group=self._settings.training.group, seed=self._settings.seed)
        return Rollouts(fleet.servers, self._settings.task, bound, rollout_settings, self._stop)

    def _rounds(self, policy: Policy, fleet: EngineServers, listener: RoundListener) -> TrainerRounds:
        """Connect a publisher to the fleet: a new run, whose labels are steps."""
        secret = load_or_create_secret(self._directory / "secret")
        progress = RoundProgress(
            len(fleet.servers), since_s=self._since_s, emit=self._emit, listener=listener
        )
        replicas = [
            WatchedReplica(server.number, server.replica(secret), progress.on_stage)
            for server in fleet.servers
        ]
        for one in replicas:
            self._stop.call(one.interrupt)
        publisher = self._make_publisher(policy.model, replicas)
        return TrainerRounds(publisher, replicas, stop=self._stop, since_s=self._since_s)

    def _phase(self, name: PhaseName, detail: str = "") -> None:
        self._stop.check()
        self._emit(Phase(at_s=self._now_s(), name=name, detail=detail))

    def _now_s(self) -> float:
        return time.monotonic() - self._since_s
