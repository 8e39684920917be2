"""`liveweight serve` as a program: its one line, its signals, its exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.arch.source_tree import ROOT
from tests.support.processes.cli import Cli
from tests.support.processes.fork_server import Zygote

LONG = {"prompt": "the quick brown fox", "max_tokens": 50_000, "ignore_eos": True, "stream": True}


@contextmanager
def program(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The program, ended with the block if it has not ended before."""
    command = [sys.executable, "-m", "tests.support.programs.serve_program", "serve", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def url_of(started: subprocess.Popen[str]) -> str:
    """Where it serves, from the line that it prints when it does."""
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line, started.stderr and started.stderr.read()
    return url_in(line.rstrip("\n"))


def url_in(line: str) -> str:
    """The same, of the line itself."""
    wanted = r"serving echo on (http://127\.0\.0\.1:\d+), tp 2, updates at ipc:///\S+/engine-\d+\.sock"
    found = re.fullmatch(wanted, line)
    assert found is not None, line
    return found[1]


def ended(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said last."""
    _, errors = started.communicate(timeout=30)
    return started.returncode, errors


def streaming(url: str, lines: list[str], began: threading.Event, **changes: object) -> threading.Thread:
    """A client in a thread, which keeps what it gets."""

    def ask() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, **changes}, timeout=30) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    began.set()

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_what_runs_and_ends_with_0(model_dir: Path, number: signal.Signals) -> None:
    lines: list[str] = []
    began = threading.Event()
    with program(str(model_dir), "--tp", "2", "--port", "0", "--grace", "0.3") as started:
        client = streaming(url_of(started), lines, began)
        assert began.wait(20)
        started.send_signal(number)
        assert ended(started) == (0, "")
        client.join(10)
    assert '"finish_reason":"abort"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_a_short_request_finishes_within_the_grace(model_dir: Path) -> None:
    lines: list[str] = []
    began = threading.Event()
    with program(str(model_dir), "--tp", "2", "--port", "0", "--grace", "60") as started:
        client = streaming(url_of(started), lines, began, max_tokens=100)
        assert began.wait(20)
        started.terminate()
        assert ended(started) == (0, "")
        client.join(10)
    assert '"finish_reason":"length"' in lines[-2]


def test_a_lost_rank_ends_open_requests_and_the_program_with_3(model_dir: Path) -> None:
    lines: list[str] = []
    began = threading.Event()
    with program(str(model_dir), "--tp", "2", "--port", "0") as started:
        url = url_of(started)
        client = streaming(url, lines, began)
        assert began.wait(20)
        started.send_signal(signal.SIGUSR1)
        client.join(10)
        health = httpx.get(f"{url}/health")
        code, errors = ended(started)
    assert "LW-706" in lines[-1]
    assert (health.status_code, "rank 1" in health.text) == (503, True)
    assert code == 3
    assert errors.startswith("LW-706 rank 1 ended with signal 9. What to do: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it_too(tmp_path: Path, number: signal.Signals) -> None:
    with program(str(tmp_path / "slow"), "--port", "0") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "starting\n"
        started.send_signal(number)
        assert ended(started) == (0, "")


@pytest.fixture
def echo(zygote: Zygote) -> Cli:
    """The program, forked, for tests of what its options do."""
    return Cli(zygote, echo=True)


def test_what_keeps_it_from_starting_is_one_line_with_a_remedy(
    tmp_path: Path, model_dir: Path, echo: Cli
) -> None:
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    cases = {
        "LW-701 fault: model.safetensors is cut off": [str(tmp_path / "fault")],
        "LW-702 batch_tokens (5)": [str(model_dir), "--batch-tokens", "5"],
        "LW-702 the key is empty": [str(model_dir), "--api-key-file", str(tmp_path / "empty")],
        "LW-702 the key's file": [str(model_dir), "--api-key-file", str(tmp_path / "none")],
        "LW-702 the key is given twice": [str(model_dir), "--api-key", "a", "--api-key-file", "b"],
        "LW-702 the control key is given twice": [
            *(str(model_dir), "--control-key", "a", "--control-key-file", "b")
        ],
        "LW-702 a weights address": [str(model_dir), "--no-updates", "--weights-address", "ipc:///a"],
        "LW-702 a secret file": [str(model_dir), "--no-updates", "--secret-file", "a"],
        "LW-702 cannot serve on host.invalid": [str(model_dir), "--host", "host.invalid"],
    }
    for line, arguments in cases.items():
        failed = echo.run(tmp_path, "serve", *arguments, "--port", "0")
        code, errors = failed.returncode, failed.stderr
        assert (code, errors.startswith(line), errors.count("\n")) == (1, True, 1), errors
        assert ". What to do: " in errors


@pytest.mark.parametrize("given_by", ["argument", "file", "environment"])
def test_the_key_comes_from_an_argument_a_file_or_the_environment(
    tmp_path: Path, model_dir: Path, given_by: str, echo: Cli
) -> None:
    (tmp_path / "key").write_text("sk-1\n", encoding="utf-8")
    arguments = {"argument": ["--api-key", "sk-1"], "file": ["--api-key-file", str(tmp_path / "key")]}
    environment = {"LIVEWEIGHT_API_KEY": "sk-1"} if given_by == "environment" else {}
    given = [*arguments.get(given_by, []), "--tp", "2", "--port", "0"]
    with echo.started(tmp_path, "serve", model_dir, *given, **environment) as started:
        url = url_in(started.first_line())
        statuses = [
            httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("sk-1", "sk-2")
        ]
        started.send_signal(signal.SIGTERM)
        started.ended()
    assert statuses == [200, 401]


def test_a_missing_extra_is_told_by_the_pip_line(model_dir: Path) -> None:
    code = (
        "import sys\nsys.modules['uvicorn'] = None\n"
        f"sys.argv = ['liveweight', 'serve', {str(model_dir)!r}]\n"
        "from liveweight.cli.main import run\nrun()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("LW-501 serving needs: pip install 'liveweight[engine]'. What to do: ")


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys, liveweight.cli.main\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'tokenizers', 'jinja2', 'pydantic', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
