"""Trainers of several processes, as programs of their own, and what they say in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from liveweight.integrations.vllm.server_process import free_port
from tests.arch.source_tree import ROOT
from tests.trl.harness import WITHIN_S


@contextmanager
def trainer_ranks(
    program: str, *arguments: str, place: Path, world: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of one trainer, ended with the block."""
    port, started = free_port(), []
    try:
        for rank in range(world):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, "-W", "ignore", "-m", f"tests.trl.{program}", *arguments]
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


def tell_all(ranks: list[subprocess.Popen[str]]) -> None:
    """Let them go on."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def exit_codes(ranks: list[subprocess.Popen[str]]) -> list[int]:
    """Wait until they have ended."""
    return [rank.wait(WITHIN_S) for rank in ranks]
