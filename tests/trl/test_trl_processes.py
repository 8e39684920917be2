"""Trainers of several processes: one asks engines for all, and all have the same outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from liveweight.integrations.vllm.server_process import free_port
from tests.arch.source_tree import ROOT
from tests.trl.harness import WITHIN_S, ServedEngine


@contextmanager
def trainer_ranks(model: Path, place: Path, url: str, spread: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of one trainer, ended with the block."""
    port, started = free_port(), []
    try:
        for rank in range(2):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [
                *(sys.executable, "-W", "ignore", "-m", "tests.trl.ranks_program"),
                *(str(model), str(place), url, spread),
            ]
            with (place / f"rank-{rank}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def heard(process: subprocess.Popen[str], place: Path) -> dict[str, Any]:
    """The next thing that it says; TRL prints its logs on stdout, too."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"'):
            said: dict[str, Any] = json.loads(line)
            return said
    raise AssertionError("\n".join(path.read_text()[-3000:] for path in place.glob("rank-*.log")))


@pytest.mark.parametrize("spread", ["ddp", "fsdp2", "fsdp2-lora"])
def test_two_processes_learn_from_one_engine_and_fail_together(
    model: Path, tmp_path: Path, place: Path, spread: str
) -> None:
    with (
        ServedEngine(model, place) as own,
        trainer_ranks(model, tmp_path, own.url, spread) as ranks,
    ):
        first, second = (heard(rank, tmp_path) for rank in ranks)
        assert (first["index"], second["index"]) == (0, 1)
        assert first["verified"] is True
        assert first["sharded"] is second["sharded"] is spread.startswith("fsdp2")
        assert first["publishes"] is True
        assert second["publishes"] is spread.startswith("fsdp2")  # each publishes the shards that it holds
        assert first["difference"] < 1e-4
        assert first["rewards"] == second["rewards"]
        assert len(first["seconds"]) == 2
        assert own.rounds()[0][0] == "step_0"
        assert [label for label, _ in own.rounds()] == ["step_0", "step_1", "step_2"]
        own.kill()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        errors = [heard(rank, tmp_path)["error"] for rank in ranks]
        assert all(own.url in error for error in errors)
        assert [rank.wait(WITHIN_S) for rank in ranks] == [0, 0]
