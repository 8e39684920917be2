"""What tests of faults ask of a replica of two ranks and its trainer, before a fault and after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from tests.support import model
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.real_servers import LOOK_AGAIN_S, until

WORLD = 2
LEFT_S = 20.0
"""How long what a round used may be there after it."""


def assert_holds(ranks: list[Program], label: int, version: object = None) -> None:
    """Every rank holds exactly that version's bits, and says so."""
    calls = [rank.begin("state") for rank in ranks]
    for number, (rank, call) in enumerate(zip(ranks, calls, strict=True)):
        state = rank.end(call)
        assert state["fingerprint"] == model.expected(label, number, len(ranks))
        assert state["version"] == (label if version is None else version)


def all_of(ranks: list[Program], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Every rank of a trainer runs every line; their answers."""
    calls = [rank.begin(do, **arguments) for rank in ranks]
    return [rank.end(call) for rank, call in zip(ranks, calls, strict=True)]


def publish_when_free(
    trainer: Program, label: int, within_s: float = 60.0, name: str | None = None
) -> dict[str, Any]:
    """Publish; while an old round still holds the replica, try again."""
    ends_s = time.monotonic() + within_s
    called: dict[str, Any] = {} if name is None else {"name": name}
    pause = threading.Event()
    while True:
        answer = trainer.ask("publish", label=label, **called)
        if answer.get("error", {}).get("code") != "LW-106" or time.monotonic() > ends_s:
            return answer
        pause.wait(LOOK_AGAIN_S)


def weights_of(programs: list[Program]) -> list[tuple[int, int]]:
    """Descriptors and threads of every process."""
    counted = []
    for program in programs:
        status = Path(f"/proc/{program.pid}/status").read_text()
        threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
        counted.append((len(list(Path(f"/proc/{program.pid}/fd").iterdir())), threads))
    return counted


def assert_no_growth(programs: list[Program], before: list[tuple[int, int]]) -> None:
    """No process has more descriptors or threads than before, once those of the last round have ended."""

    def none_grew() -> bool:
        now = weights_of(programs)
        return all(
            a <= b for new, old in zip(now, before, strict=True) for a, b in zip(new, old, strict=True)
        )

    until(none_grew, f"no more descriptors and threads than {before}", LEFT_S)


def ready(cluster: Cluster, offer: str, **options: Any) -> tuple[list[Program], Program]:
    """A replica at version 1, and its trainer."""
    ranks = cluster.replica(WORLD)
    trainer = cluster.trainer(offer=offer, **options)
    assert "error" not in trainer.ask("publish", label=1)
    return ranks, trainer
