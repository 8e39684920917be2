"""The example: a whole GRPO run, which needs few lines of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.arch.source_tree import ROOT
from tests.trl.harness import ServedEngine

EXAMPLE = "examples/trl_grpo.py"
MARK = "# liveweight"
WITHIN_S = 110.0


def rewards_of(program: Path, *arguments: str, place: Path) -> list[float]:
    """Run the program, and return the rewards that it prints."""
    command = [sys.executable, "-W", "ignore", str(program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Traceback" not in run.stderr, run.stderr[-3000:]  # also while it ends, and its publisher with it
    line = next(line for line in run.stdout.splitlines() if line.startswith("reward "))
    return [float(word) for word in line.split()[1:]]


def test_the_example_learns_from_an_engines_rollouts(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    before = engine.rounds()
    rewards = rewards_of(ROOT / EXAMPLE, str(model), engine.url, "--steps", "14", place=tmp_path)
    assert len(rewards) == 14
    assert rewards[0] < 0.1
    assert max(rewards) > 0.7
    assert engine.labels_since(before)[-1] == "step_13"


def test_the_example_without_our_lines_is_a_program_of_trls(model: Path, tmp_path: Path) -> None:
    lines = (ROOT / EXAMPLE).read_text(encoding="utf-8").splitlines()
    ours = [line for line in lines if line.endswith(MARK)]
    assert 1 <= len(ours) <= 5
    rest = "\n".join(line for line in lines if not line.endswith(MARK))
    assert "import liveweight" not in rest
    assert "from liveweight" not in rest
    plain = tmp_path / "plain.py"
    plain.write_text(rest, encoding="utf-8")
    assert len(rewards_of(plain, str(model), "--steps", "1", place=tmp_path)) == 1
