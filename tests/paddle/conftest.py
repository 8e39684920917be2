"""Paddle in an environment of its own: `make test-paddle` makes it and names its Python. There, a test that is skipped has failed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source_tree import ROOT

PADDLE_PYTHON = os.environ.get("LIVEWEIGHT_PADDLE_PYTHON")


class PaddleSide:
    """The process with Paddle; called as its functions are."""

    def __init__(self, python: str) -> None:
        command = [python, "-m", "tests.paddle.paddle_side"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def __call__(self, function: str, /, **arguments: Any) -> Any:
        """Its answer; AssertionError with the error there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process with Paddle ended during {function}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["said"]

    def kill(self) -> None:
        """As the kernel would: nothing is released by the process itself."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """End it: it has nobody to listen to."""
        self._process.communicate()


@pytest.fixture(scope="session")
def paddle_side() -> Iterator[PaddleSide]:
    """One process for all tests: Paddle takes seconds to load."""
    started = started_side()
    yield started
    started.close()


def started_side() -> PaddleSide:
    """A process with Paddle."""
    if PADDLE_PYTHON is None:
        pytest.skip("needs Paddle in an environment of its own: make test-paddle")
    return PaddleSide(str(Path(PADDLE_PYTHON).absolute()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where Paddle was promised, nothing may be left out."""
    report = yield
    if PADDLE_PYTHON is not None and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where Paddle is: {report.longrepr}"
    return report
