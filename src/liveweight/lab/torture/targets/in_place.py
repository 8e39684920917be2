"""The in-place target: a trainer writes buckets straight into live weights, as most peers do. Shows that the detector detects.

The engine is paused while buckets are written and resumed afterwards, even if the trainer died. Clients continue ended requests by sending
them again, over a refilled cache. This is the torn demo's left side, struck again and again.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.serving.rank_processes import RankProcess
from liveweight.lab.torn_demo.in_place_update import HOOK
from liveweight.lab.torture.client_load import Submitting
from liveweight.lab.torture.fault_plan import MENU, Strike
from liveweight.lab.torture.fork_server import Forked, ForkServer
from liveweight.lab.torture.replay import PublishedContents
from liveweight.lab.torture.targets.target import CHECK_EVERY, RECOVER_S, SLACK_S, StrikeCounts
from liveweight.lab.torture.trainer_main import Publish, WritingConfig
from liveweight.lab.torture.trainer_process import TrainerProcess
from liveweight.spec.deadline import Deadline

RANKS = 2
BUCKETS = 8
BUCKET_S = 0.02


class InPlaceTarget:
    """See Target."""

    attributed, menu, check_every = False, MENU, CHECK_EVERY

    def __init__(self, fork_server: ForkServer, directory: Path, versions: PublishedContents) -> None:
        del directory
        self.counts = StrikeCounts()
        self._fork_server, self._versions = fork_server, versions
        self._label = 0
        self._forked: list[Forked] = []
        self._trainer: TrainerProcess | None = None
        self._pause = threading.Event()

    def __enter__(self) -> Self:
        # No prefix cache: it would return keys and values of the weights before.
        config = EngineConfig(
            model=str(self._versions.directories[0]),
            tp=RANKS,
            kv_bytes=16 << 20,
            prefix_cache=False,
            hooks=(HOOK,),
            start_timeout_s=RECOVER_S / 3,
        )
        self._engine = Engine(config, launch=self._launch)
        return self

    def __exit__(self, *_: object) -> None:
        if self._trainer is not None:
            self._trainer.kill()
        self._engine.stop()

    def engine(self) -> Submitting:
        """See Target."""
        return Submitting(self._engine)

    def takes(self, strike: Strike) -> bool:
        """See Target. One-sided writes have no connection to cut, and no verification that would notice a flipped bit."""
        return strike.whom == "trainer" and strike.kind in ("kill", "stop")

    def processes(self) -> dict[int, str]:
        """See Target."""
        return {os.getpid(): "the engine"}

    def left(self) -> tuple[list[Forked], list[Path]]:
        """See Target."""
        return self._forked, []

    def strike(self, strike: Strike) -> None:
        """See Target."""
        trainer = self._ready_trainer()
        self._label += 1
        content = self._versions.of_label(self._label)
        self._engine.pause("abort", RECOVER_S)
        trainer.begin(Publish(label=self._label, content=content, pids=self._engine.pids))
        trainer.ended(strike.part * BUCKETS * BUCKET_S)
        self.counts.note(strike, "writing", hit=True)
        self.counts.rounds += 1
        if strike.kind == "kill" or strike.stop_s is None:
            trainer.kill()
        else:
            with suppress(ProcessLookupError):
                os.kill(trainer.process.pid, signal.SIGSTOP)
                self._pause.wait(strike.stop_s)
                os.kill(trainer.process.pid, signal.SIGCONT)
            if trainer.ended(RECOVER_S + SLACK_S) is not None:
                self.counts.committed += 1
        self._engine.resume()

    def _launch(self, rank: int, end: socket.socket) -> RankProcess:
        del rank
        forked = self._fork_server.fork("rank", end)
        self._forked.append(forked)
        return forked

    def _ready_trainer(self) -> TrainerProcess:
        if self._trainer is not None and self._trainer.alive:
            return self._trainer
        config = WritingConfig(
            checkpoints=tuple(map(str, self._versions.directories)),
            ranks=RANKS,
            buckets=BUCKETS,
            bucket_s=BUCKET_S,
        )
        self._trainer = TrainerProcess(self._fork_server, "writer", config, Deadline.after(RECOVER_S))
        self._forked.append(self._trainer.process)
        return self._trainer
