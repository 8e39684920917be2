"""The torture run: an engine, clients, one strike after the other; at the end the counts that must be zero."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES, VLLM_TINY
from liveweight.errors import DeadlineExceeded, Unavailable
from liveweight.integrations.vllm.server_process import VllmLaunching
from liveweight.lab.torture.client_load import ClientLoad
from liveweight.lab.torture.fault_plan import strikes
from liveweight.lab.torture.fork_server import ForkServer
from liveweight.lab.torture.leaks import Leaks
from liveweight.lab.torture.replay import PublishedContents, Replay
from liveweight.lab.torture.targets.embedded import EmbeddedTarget
from liveweight.lab.torture.targets.in_place import InPlaceTarget
from liveweight.lab.torture.targets.target import RECOVER_S, TortureTarget
from liveweight.lab.torture.targets.vllm import VllmTortureTarget
from liveweight.spec.deadline import Deadline

Name: TypeAlias = Literal["embedded", "in-place", "vllm"]
TARGETS: dict[Name, Callable[[ForkServer, Path, PublishedContents], TortureTarget]] = {
    "embedded": EmbeddedTarget,
    "in-place": InPlaceTarget,
}
CONTENTS = 3
REPLAY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureSettings:
    """The settings of a run. `program` is the module that runs the fork server; `vllm` is how to start that target."""

    program: str
    target: Name = "embedded"
    kills: int = 100
    seed: int = 0
    clients: int = 4
    tokens: int = 48
    vllm: VllmLaunching | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureResult:
    """The counts. `found` lists what was late, lost or leaked, and which rounds failed without a strike."""

    target: Name
    kills: int
    seed: int
    torn_tokens: int
    late_waits: int
    leaks: int
    lost: int
    rounds: int
    committed: int
    tokens: int
    requests_failed: int
    restarts: int
    missed: int
    took_s: float
    found: tuple[str, ...] = ()
    struck: dict[str, int] = field(default_factory=dict)
    moments: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the result is as expected: with liveweight nothing is torn, late, leaked or lost, and updates committed. The in-place
        target must show torn tokens; otherwise the detector would detect nothing."""
        if self.target == "in-place":
            return self.torn_tokens > 0
        spotless = self.torn_tokens == self.late_waits == self.leaks == self.lost == 0
        return spotless and self.committed > 0 and self.tokens > 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {name: getattr(self, name) for name in self.__slots__} | {"holds": self.holds}


def torture(settings: TortureSettings, on_strike: Callable[[int, TortureTarget], None]) -> TortureResult:
    """Run the torture. Calls `on_strike` after every strike with their number so far. All processes have exited on return."""
    import torch

    torch.set_num_threads(1)
    began_s, leaks = time.monotonic(), Leaks()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-torture-")))
        versions = PublishedContents([_content(directory, settings, number) for number in range(CONTENTS)])
        fork_server = stack.enter_context(ForkServer(settings.program))
        target = _target(settings, fork_server, directory, versions)
        with Replay(versions, attributed=target.attributed) as replay:
            with target:
                load = ClientLoad(
                    target.engine,
                    clients=settings.clients,
                    tokens=settings.tokens,
                    patience_s=RECOVER_S,
                    finished=replay.put,
                )
                with load:
                    _strike_all(settings, target, load, leaks, on_strike)
            replay.finish(Deadline.after(REPLAY_S))
        leaks.check_after(*target.left())
        return _result(settings, target, load, replay, leaks, time.monotonic() - began_s)


def _target(
    settings: TortureSettings, fork_server: ForkServer, directory: Path, versions: PublishedContents
) -> TortureTarget:
    if settings.target != "vllm":
        return TARGETS[settings.target](fork_server, directory, versions)
    if settings.vllm is None:
        raise Unavailable("torturing vLLM needs the Python of its environment")
    return VllmTortureTarget(fork_server, directory, versions, settings.vllm)


def _strike_all(
    settings: TortureSettings,
    target: TortureTarget,
    load: ClientLoad,
    leaks: Leaks,
    on_strike: Callable[[int, TortureTarget], None],
) -> None:
    load.went_on(Deadline.after(RECOVER_S))
    chosen = (strike for strike in strikes(settings.seed, target.menu) if target.takes(strike))
    for number in range(1, settings.kills + 1):
        target.strike(next(chosen))
        try:
            load.went_on(Deadline.after(RECOVER_S))
        except DeadlineExceeded:
            target.counts.lost += 1  # the engine reports that it serves, and does not
        if number % target.check_every == 0:
            leaks.check(target.processes())
        on_strike(number, target)


def _content(directory: Path, settings: TortureSettings, number: int) -> Path:
    """Make a checkpoint. Contents differ in every weight but the norms'."""
    size = VLLM_TINY if settings.target == "vllm" else SIZES["qwen3"]["tiny"]
    init_model(directory / str(number), size, seed=settings.seed * CONTENTS + number)
    return directory / str(number)


def _result(
    settings: TortureSettings,
    target: TortureTarget,
    load: ClientLoad,
    replay: Replay,
    leaks: Leaks,
    took_s: float,
) -> TortureResult:
    counts = target.counts
    return TortureResult(
        target=settings.target,
        kills=settings.kills,
        seed=settings.seed,
        torn_tokens=replay.torn,
        late_waits=counts.late + load.late,
        leaks=len(leaks.found),
        lost=counts.lost,
        rounds=counts.rounds,
        committed=counts.committed,
        tokens=replay.tokens,
        requests_failed=load.failed,
        restarts=counts.restarts,
        missed=counts.missed,
        took_s=took_s,
        found=(*counts.notes, *leaks.found),
        struck=dict(sorted(counts.struck.items())),
        moments=dict(sorted(counts.moments.items())),
        outcomes=dict(sorted(counts.outcomes.items())),
    )
