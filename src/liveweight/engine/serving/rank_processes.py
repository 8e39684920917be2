"""Rank processes, as the engine sees them: starts them, streams entries to each, and notices at once when one is gone.

Owns the processes: all have ended when `close` returns. The content of the entries is the scheduler's (serving/scheduler).
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from liveweight.engine.config import EngineConfig
from liveweight.engine.rank.start_version import named
from liveweight.engine.serving.step_channel import StepChannel
from liveweight.engine.serving.step_stream import (
    Answer,
    Begin,
    Loaded,
    RankFailed,
    RankReady,
    Setup,
    SleepEntry,
    SleepStepDone,
    Step,
    StepDone,
    Swap,
    SwapDone,
)
from liveweight.errors import LiveWeightError, RankLost
from liveweight.spec.deadline import Deadline
from liveweight.wire.waker import Waker

END_S = 5.0
SEND_S = 30.0


class RankProcess(Protocol):
    """A rank's process, as `subprocess` has it."""

    @property
    def pid(self) -> int:
        """Its id."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended; subprocess.TimeoutExpired."""


Done: TypeAlias = StepDone | SwapDone | SleepStepDone
"""The answer to an entry."""

Starting = TypeVar("Starting", Loaded, RankReady)

Launch: TypeAlias = Callable[[int, socket.socket], RankProcess]
"""(rank, its end of the stream) -> its process, which inherits that end."""


def launch(rank: int, end: socket.socket) -> RankProcess:
    """Start a rank as a program of its own."""
    code = f"from liveweight.engine.rank.process import main; main({end.fileno()}, parent={os.getpid()})  # rank {rank}"
    return subprocess.Popen([sys.executable, "-c", code], pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)


class RankProcesses:
    """All ranks of a replica. For one thread; `wake` is for any."""

    def __init__(self, config: EngineConfig, *, blocks: int, context: int, launch: Launch = launch) -> None:
        self._config = config
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._channels: list[StepChannel[Answer]] = []
        self._processes: list[RankProcess] = []
        self._sent: deque[tuple[str, float]] = deque()
        self._due = Deadline.after(0.0)
        self._answers: list[deque[Done]] = [deque() for _ in range(config.tp)]
        self._rendezvous = tempfile.TemporaryDirectory(prefix="liveweight-ranks-")
        try:
            for rank in range(config.tp):
                self._start(rank, launch)
            rendezvous = str(Path(self._rendezvous.name) / "rendezvous")
            for rank, channel in enumerate(self._channels):
                channel.send(Setup(config, rank, blocks, context, rendezvous))
            self.begin = self._begin(Deadline.after(config.start_timeout_s))
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, by rank."""
        return tuple(process.pid for process in self._processes)

    def send(self, entry: Step | Swap | SleepEntry) -> None:
        """Put an entry on every rank's stream."""
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(entry)
            except LiveWeightError as error:
                raise self._lost(rank, error) from error
        match entry:
            case Step(number=number):
                what, allowed_s = f"step {number}", 0.0
            case Swap(epoch=epoch, timeout_s=allowed_s):
                what = f"the swap of round {epoch}"
            case _:
                what, allowed_s = f"{type(entry).__name__}", entry.timeout_s
        self._sent.append((what, allowed_s + self._config.step_timeout_s))
        if len(self._sent) == 1:
            self._begin_waiting()

    def wake(self) -> None:
        """End the present wait, or the next one. Any thread."""
        self._waker.wake()

    def wait(self) -> list[tuple[Done, ...]]:
        """Wait for answers or a wake-up; the entries that all ranks have answered, oldest first, one answer per rank.

        RankLost names the rank that died, failed or did not answer in time.
        """
        timeout = self._due.remaining_s() if self._sent else None
        ready = self._selector.select(timeout)
        if not ready and self._sent:
            raise self._overdue()
        for key, _ in ready:
            if key.data is None:
                self._waker.take()
                continue
            for answer in self._arrived(key.data):
                self._on_answer(key.data, answer)
        return self._complete()

    def close(self, *, at_once: bool = False) -> None:
        """End the streams and with them the processes; those that do not end in time are killed.

        `at_once`: kill them now. For when one was lost, or all are still starting: they may wait for each other, and not read the stream.
        """
        for channel in self._channels:
            channel.close()
        deadline = Deadline.after(0.0 if at_once else END_S)
        for process in self._processes:
            try:
                process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._selector.close()
        self._waker.close()
        self._rendezvous.cleanup()

    def _start(self, rank: int, launch: Launch) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes.append(launch(rank, theirs))
        ours.settimeout(SEND_S)
        channel: StepChannel[Answer] = StepChannel(ours, Answer, peer=f"rank {rank}")
        self._channels.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, rank)

    def _begin(self, deadline: Deadline) -> Begin:
        """Name the version that the ranks have loaded, and let them begin with it."""
        begin = named(self._await_all(Loaded, "load its weights", deadline))
        for channel in self._channels:
            channel.send(begin)
        self._await_all(RankReady, "be ready", deadline)
        return begin

    def _await_all(self, kind: type[Starting], what: str, deadline: Deadline) -> tuple[Starting, ...]:
        """Wait for that answer of every rank."""
        answers: dict[int, Starting] = {}
        while len(answers) < self._config.tp:
            arrived = self._selector.select(deadline.remaining_s())
            if not arrived:
                missing = next(r for r in range(self._config.tp) if r not in answers)
                raise deadline.exceeded(f"rank {missing} to {what}")
            for key, _ in arrived:
                for answer in self._arrived(key.data):
                    if isinstance(answer, RankFailed):
                        raise answer.fault.to_error()
                    if isinstance(answer, kind):
                        answers[key.data] = answer
        return tuple(answers[rank] for rank in range(self._config.tp))

    def _arrived(self, rank: int) -> Sequence[Answer]:
        try:
            return self._channels[rank].arrived()
        except LiveWeightError as error:
            raise self._lost(rank, error) from error

    def _on_answer(self, rank: int, answer: Answer) -> None:
        match answer:
            case StepDone() | SwapDone() | SleepStepDone():
                self._answers[rank].append(answer)
            case RankFailed(fault=fault):
                raise RankLost(f"rank {rank} failed: {fault.message}")
            case Loaded() | RankReady():
                raise RankLost(f"rank {rank} started twice")

    def _complete(self) -> list[tuple[Done, ...]]:
        """Ranks answer in the stream's order, so the first answers of all belong together."""
        complete = []
        while all(self._answers):
            self._sent.popleft()
            self._begin_waiting()
            complete.append(tuple(answers.popleft() for answers in self._answers))
        return complete

    def _begin_waiting(self) -> None:
        """An entry's time begins when it is the oldest: what goes before it may take its own."""
        if self._sent:
            self._due = Deadline.after(self._sent[0][1])

    def _overdue(self) -> RankLost:
        """Ranks wait for each other, so one that hangs keeps all from answering: if one is stopped by a signal, only that one is named."""
        what, _ = self._sent[0]
        missing = [rank for rank, answers in enumerate(self._answers) if not answers]
        stopped = [rank for rank in missing if _is_stopped(self._processes[rank].pid)]
        named = " and ".join(
            f"rank {rank} (process {self._processes[rank].pid})" for rank in stopped or missing
        )
        state = ", stopped," if stopped else ""
        return RankLost(f"{named}{state} did not answer {what} for {self._due.waited_s():.0f} s")

    def _lost(self, rank: int, error: LiveWeightError) -> RankLost:
        """The error for a rank whose stream broke: its last message, or how its process ended."""
        message = self._channels[rank].last_message(RankFailed)
        if message is not None:
            return RankLost(f"rank {rank} failed: {message.fault.message}")
        process = self._processes[rank]
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return RankLost(f"rank {rank} (process {process.pid}): {error}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return RankLost(f"rank {rank} (process {process.pid}) {how}")


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped that process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
