"""Every example is run as its first lines say, in a directory of its own, and does what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT

EXAMPLES = ROOT / "examples"
WITHIN_S = 240.0
SHOWN = {
    "plain_loop.py": ["from the start: ", "step 4: loss ", "the engine holds the trainer's weights: True"],
    "stream_into_your_loader.py": [f"step {n}: 3 tensors, qkv is [{n}.0]" for n in (1, 2, 3)],
    "push_from_the_shell.sh": ["step_100", "match"],
}


def test_every_example_is_run_here() -> None:
    assert sorted(SHOWN) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_does_what_it_shows(name: str, short_path: Path) -> None:
    found = os.environ | {
        "TMPDIR": str(short_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLES / name)] if name.endswith(".py") else [str(EXAMPLES / name)]
    run = subprocess.run(command, env=found, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert run.returncode == 0, run.stderr
    for text in SHOWN[name]:
        assert text in run.stdout, run.stdout
    assert [path for path in short_path.rglob("*") if path.is_socket()] == []
