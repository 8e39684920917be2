"""Real processes for a test: ranks and trainers, commanded over their standard streams, ended with the test."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from liveweight.engine.config import EngineConfig
from tests.support.processes.fork_server import Zygote
from tests.support.processes.stopping import stop
from tests.support.programs.conversation import ANSWER_S, Conversation


class Program(Conversation):
    """One process of a test, and what it says."""

    def __init__(self, zygote: Zygote, module: str, config: dict[str, Any]) -> None:
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        self.pid = zygote.start(module, config, its_input, its_output)
        self._pidfd = os.pidfd_open(self.pid)
        os.close(its_input)
        os.close(its_output)
        super().__init__(f"process {self.pid}", reads=os.fdopen(our_input), writes=os.fdopen(our_output, "w"))

    def signal(self, number: signal.Signals) -> None:
        """Continue or kill it; to stop it, `stop`."""
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        stop(self.pid)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            return
        self.gone()

    def gone(self, within_s: float = ANSWER_S) -> None:
        """Wait until the process has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(within_s * 1000):
            raise AssertionError(f"process {self.pid} did not end")

    def finish(self, within_s: float = ANSWER_S) -> int:
        """End it the ordinary way; its exit code."""
        self.begin("stop")
        return self.ended(within_s)

    def ended(self, within_s: float = ANSWER_S) -> int:
        """Wait until it ends; its exit code."""
        code: int = self.expect("exit", within_s=within_s)["exit"]
        self.gone(within_s)
        return code

    def close(self) -> None:
        """Make sure that it is gone."""
        self.kill()
        os.close(self._pidfd)
        super().close()


class Cluster:
    """The processes of one test, in one private directory."""

    def __init__(self, directory: Path, zygote: Zygote) -> None:
        self.directory, self._zygote = directory, zygote
        self.secret = directory / "secret"
        self._programs: list[Program] = []
        self._stores = 0

    def address(self, name: str = "a") -> str:
        """Where a replica's leader listens."""
        return f"ipc://{self.directory}/{name}.sock"

    def replica(self, world: int = 1, name: str = "a", **options: Any) -> list[Program]:
        """Start a replica's ranks and wait until all are ready."""
        self._stores += 1
        store = self.directory / f"store{self._stores}"
        ranks = [self.rank(rank, world, store, name, **options) for rank in range(world)]
        for rank in ranks:
            rank.expect("ready")
        return ranks

    def rank(self, rank: int, world: int, store: Path, name: str = "a", **options: Any) -> Program:
        """Start one rank."""
        config = {
            "address": self.address(name),
            "secret": str(self.secret),
            "rank": rank,
            "world": world,
            "store": str(store),
            "exchange": "swap",
            "shadow": "device",
            "threads": 1,
            "label": 0,
            "dtype": "bfloat16",
        }
        return self._start("tests.support.programs.rank_program", config | options)

    def trainer(self, names: str = "a", **options: Any) -> Program:
        """Start a trainer for these replicas and wait until it is connected to them."""
        trainer = self.start_trainer(names, **options)
        trainer.expect("ready")
        return trainer

    def start_trainer(self, names: str = "a", **options: Any) -> Program:
        """Start a trainer."""
        config = {
            "engines": [self.address(name) for name in names],
            "secret": str(self.secret),
            "directory": str(self.directory / f"trainer{len(self._programs)}"),
            "offer": "frozen",
            "verify": True,
            "timeout_s": 30.0,
            "lease_s": 10.0,
            "quorum": None,
            "run": "run",
            "dtype": "bfloat16",
        }
        return self._start("tests.support.programs.trainer_program", config | options)

    def start_trainer_ranks(self, world: int, names: str = "a", **options: Any) -> list[Program]:
        """Start the ranks of a trainer."""
        self._stores += 1
        config = {
            "engines": [self.address(name) for name in names],
            "secret": str(self.secret),
            "directory": str(self.directory / f"trainer{len(self._programs)}"),
            "store": str(self.directory / f"store{self._stores}"),
            "world": world,
            "style": "fsdp2",
            "timeout_s": 60.0,
            "lease_s": 10.0,
            "run": "run",
        }
        configs = [config | options | {"rank": rank} for rank in range(world)]
        return [self._start("tests.support.programs.trainer_rank_program", one) for one in configs]

    def trainer_ranks(self, world: int, names: str = "a", **options: Any) -> list[Program]:
        """Start the ranks of a trainer and wait until they are connected to each other and the replicas."""
        ranks = self.start_trainer_ranks(world, names, **options)
        for rank in ranks:
            assert "error" not in rank.expect("ready")
        return ranks

    def engine(self, config: EngineConfig, consoles: list[str]) -> Program:
        """Start an engine in a process of its own; it says when it is ready."""
        program_config = {"engine": msgspec.to_builtins(config), "consoles": consoles}
        return self._start("tests.support.programs.engine_program", program_config)

    def snapshots(self, role: str, store: Path, first: int = 0) -> Program:
        """Start a process that writes or prunes snapshots until it is killed, and wait until it begins."""
        program = self._start(
            "tests.support.programs.snapshot_program", {"role": role, "store": str(store), "first": first}
        )
        program.expect("ready")
        return program

    def finish(self, ranks: list[Program]) -> list[int]:
        """End a replica the ordinary way (one rank's stop reaches all); the exit codes."""
        ranks[0].begin("stop")
        return [rank.ended() for rank in ranks]

    def _start(self, module: str, config: dict[str, Any]) -> Program:
        program = Program(self._zygote, module, config)
        self._programs.append(program)
        return program

    def close(self) -> None:
        """End all processes."""
        for program in self._programs:
            program.close()


@contextmanager
def running(directory: Path, zygote: Zygote) -> Iterator[Cluster]:
    """A cluster that ends with the test, however it ends."""
    cluster = Cluster(directory, zygote)
    try:
        yield cluster
    finally:
        cluster.close()
