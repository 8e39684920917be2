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
    "fsdp2.py --ranks 2 --steps 2": ["running step 2: answer ", "published step 2, 64628 bytes, exact: True"],
    "fsdp2.py --ranks 4 --steps 2": ["running step 2: answer ", "published step 2, 64628 bytes, exact: True"],
    "plain_loop.py": ["from the start: ", "step 4: loss ", "the engine holds the trainer's weights: True"],
    "stream_into_your_loader.py": [f"step {n}: 3 tensors, qkv is [{n}.0]" for n in (1, 2, 3)],
    "push_from_the_shell.sh": ["verified ", " tensors · digest ", " · serving step_100"],
}
"""The command, and its output."""
LONG = pytest.mark.soak
"""Four ranks do what two do."""


ELSEWHERE = {
    **dict.fromkeys(
        ("vllm_live_update.py", "vllm_rlhf_over_http.py"), ROOT / "tests" / "vllm" / "test_vllm_programs.py"
    ),
    "trl_grpo.py": ROOT / "tests" / "trl" / "test_trl_example.py",
}
"""What needs another environment, and which tests run it there."""


def test_every_example_is_run() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert {command.split()[0] for command in SHOWN} | set(ELSEWHERE) == names
    assert all(f'"examples/{name}"' in tests.read_text() for name, tests in ELSEWHERE.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shown", [pytest.param(shown, marks=LONG if "--ranks 4" in shown else ()) for shown in sorted(SHOWN)]
)
def test_an_example_does_what_it_shows(shown: str, short_path: Path) -> None:
    name, *options = shown.split()
    found = os.environ | {
        "TMPDIR": str(short_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    interpreter = [sys.executable] if name.endswith(".py") else []
    command = [*interpreter, str(EXAMPLES / name), *options]
    run = subprocess.run(command, env=found, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert run.returncode == 0, run.stderr
    for text in SHOWN[shown]:
        assert text in run.stdout, run.stdout
    assert [path for path in short_path.rglob("*") if path.is_socket()] == []
