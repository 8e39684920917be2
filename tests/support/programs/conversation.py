"""Messages between a test and one of its programs: commands there, answers and moments back, a JSON line each."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

ANSWER_S = 60.0


class Conversation:
    """The test's side. Messages of the program are read at once, and kept until the test wants them."""

    def __init__(self, name: str, *, reads: TextIO, writes: TextIO) -> None:
        self._name, self._reads, self._writes = name, reads, writes
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._calls = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(ConnectionError):
            for line in self._reads:
                self._said.put(json.loads(line))
        self._said.put(None)

    def expect(self, key: str, value: object = None, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The next message that has that key (and value); the others are kept."""
        ends_s = time.monotonic() + within_s
        looked = 0
        while True:
            for number in range(looked, len(self._kept)):
                message = self._kept[number]
                if key in message and value in (None, message[key]):
                    return self._kept.pop(number)
            looked = len(self._kept)
            try:
                said_now = self._said.get(timeout=max(0.0, ends_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{self._name} did not say {key} within {within_s} s, but {self._kept}"
                ) from None
            if said_now is None:
                raise AssertionError(f"{self._name} ended before it said {key}, but said {self._kept}")
            self._kept.append(said_now)

    def begin(self, do: str, **arguments: object) -> int:
        """Give a command; `end` has its answer."""
        self._calls += 1
        self._writes.write(json.dumps({"do": do, "id": self._calls, **arguments}) + "\n")
        self._writes.flush()
        return self._calls

    def end(self, call: int, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer to a command."""
        return self.expect("id", call, within_s)

    def ask(self, do: str, within_s: float = ANSWER_S, **arguments: object) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        return self.end(self.begin(do, **arguments), within_s)

    def held(self, event: str, within_s: float = ANSWER_S) -> None:
        """Wait until the program holds in that moment."""
        self.expect("held", event, within_s)

    def close(self) -> None:
        """When the program is gone."""
        self._reader.join()
        self._reads.close()
        with suppress(BrokenPipeError):
            self._writes.close()
