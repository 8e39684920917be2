"""Hundreds of rounds: memory, descriptors and threads do not grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import model
from tests.support.processes.cluster import Cluster, Program

ROUNDS = 500


def weight_of(program: Program) -> dict[str, int]:
    """What a process holds: descriptors, threads, resident bytes."""
    status = Path(f"/proc/{program.pid}/status").read_text()
    fields = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    return {
        "descriptors": len(list(Path(f"/proc/{program.pid}/fd").iterdir())),
        "threads": int(fields["Threads"]),
        "resident_kb": int(fields["VmRSS"]),
    }


@pytest.mark.soak
@pytest.mark.parametrize("offer", ["frozen", "live"])
def test_five_hundred_rounds_leave_nothing_behind(cluster: Cluster, offer: str) -> None:
    ranks = cluster.replica(2)
    trainer = cluster.trainer(offer=offer)
    programs = [*ranks, trainer]
    for label in range(1, 51):
        assert "error" not in trainer.ask("publish", label=label)
    before = [weight_of(program) for program in programs]
    for label in range(51, ROUNDS + 1):
        assert "error" not in trainer.ask("publish", label=label)
        if label % 50 == 0:
            assert "error" not in trainer.ask("undo")
    after = [weight_of(program) for program in programs]
    for old, new in zip(before, after, strict=True):
        assert new["descriptors"] <= old["descriptors"]
        assert new["threads"] <= old["threads"]
        assert new["resident_kb"] <= old["resident_kb"] + 4096
    calls = [rank.begin("state") for rank in ranks]
    for number, (rank, call) in enumerate(zip(ranks, calls, strict=True)):
        assert rank.end(call)["fingerprint"] == model.expected(ROUNDS - 1, number, 2)
