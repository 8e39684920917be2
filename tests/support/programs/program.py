"""What the test programs share: commands as JSON lines on standard input, answers and moments on standard output.

A moment is an event of the round itself: the program reports it, and holds there until the test lets it go on.
"""

from __future__ import annotations

import json
import queue
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from liveweight.errors import LiveWeightError, RoundFailed
from liveweight.observe.events import AnyEvent

HOLD_LIMIT_S = 90.0
REPLICA = -1
"""The rank of an event that is the whole replica's."""


class Console:
    """Commands for the main thread, and holds that other threads wait in."""

    def __init__(self, reads: TextIO | None = None, writes: TextIO | None = None) -> None:
        """Standard input and output, unless others are given."""
        self._reads, self._writes = reads or sys.stdin, writes or sys.stdout
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._print = threading.Lock()
        self._hold: tuple[str, int | None] | None = None
        self._go = threading.Event()
        self.at_once: dict[str, Callable[[], None]] = {}
        """Commands that are carried out where they are read, while other threads may hold."""
        self.armed: str | None = None
        """Damage that the program does to itself once, when the test asked for it."""
        threading.Thread(target=self._read, daemon=True, name="console").start()

    def send(self, **facts: object) -> None:
        """One line to the test."""
        with self._print:
            self._writes.write(json.dumps(facts) + "\n")
            self._writes.flush()

    def on_event(self, event: AnyEvent) -> None:
        """Called by the bus: reports the event to the test, and holds where the test asked for it."""
        rank: int | None = getattr(event, "rank", None)
        self.moment(type(event).__name__, REPLICA if rank is None else rank)

    def moment(self, name: str, rank: int | None = None) -> None:
        """A moment has come; hold in it if the test asked for that."""
        if self._hold is not None and self._hold[0] == name and self._hold[1] in (None, rank):
            self._hold = None
            self.send(held=name, rank=rank)
            self._go.wait(HOLD_LIMIT_S)
            self._go.clear()

    def _read(self) -> None:
        for line in self._reads:
            command = json.loads(line)
            match command["do"]:
                case "hold":
                    self._hold = (command["event"], command.get("rank"))
                    self.send(id=command["id"])
                case "arm":
                    self.armed = command["what"]
                    self.send(id=command["id"])
                case "limit":
                    limit_memory(command["on"])
                    self.send(id=command["id"])
                case "go":
                    self._go.set()
                    self.send(id=command["id"])
                case do if do in self.at_once:
                    self.at_once[do]()
                    self.send(id=command["id"])
                case _:
                    self.commands.put(command)
        self.commands.put({"do": "stop", "id": -1})

    def serve(self, command: dict[str, Any], act: Callable[[dict[str, Any]], dict[str, object]]) -> None:
        """Run one command and answer it, with its error if it raises one of ours."""
        try:
            self.send(id=command["id"], **act(command))
        except LiveWeightError as error:
            self.send(id=command["id"], error=describe(error))


def describe(error: LiveWeightError) -> dict[str, object]:
    """An error's facts, as JSON has them."""
    facts: dict[str, object] = {
        "type": type(error).__name__,
        "code": error.code,
        "text": str(error),
        "retryable": error.retryable,
    }
    if isinstance(error, RoundFailed):
        facts |= {
            "replica": error.replica,
            "rank": error.rank,
            "step": error.step,
            "waited_s": error.waited_s,
            "serving": error.serving,
        }
    return facts


def limit_memory(on: bool) -> None:
    """Let every further mapping fail, or no longer."""
    used = 0
    if on:
        with Path("/proc/self/statm").open() as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used or hard, hard))
