"""Every command and every code block of the README is run: what it shows is what happens."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import liveweight as lw
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from tests.arch.source_tree import ROOT
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.serve_processes import program, url_of

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAYS = ("serve", "offer")
"""Commands that run until they are ended; those after them may need what they say first."""
FIGURE = re.compile(r"\b[0-9a-f]{12,32}\b|\d+(\.\d+)?")


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(README) if found == kind]


def test_every_block_is_run_here() -> None:
    assert {kind for kind, _ in BLOCK.findall(README)} == {"", "sh", "console", "python"}
    assert (len(blocks("console")), len(blocks("python")), len(blocks(""))) == (3, 2, 1)
    commands = [line.partition("#")[0].strip() for text in blocks("sh") for line in text.splitlines()]
    assert commands == ["make demo", "make test", ".venv/bin/liveweight demo torn"]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_has_the_targets(target: str) -> None:
    """What they run has suites of its own; whether they run it is asked here."""
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"demo": "liveweight demo", "test": "pytest"}[target] in shown.stdout


class Shell:
    """Runs a transcript's commands in one directory; ports and socket paths are exchanged for free ones."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._running = directory, list[subprocess.Popen[str]]()
        self._ports: dict[str, str] = {}

    def own(self, text: str) -> str:
        """The text with this test's own ports and paths."""
        text = text.replace("/run/user/me", str(self._directory))
        return re.sub(r"(127\.0\.0\.1:|--port )(\d+)", self._port, text)

    def _port(self, found: re.Match[str]) -> str:
        if found[2] not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._ports[found[2]] = str(server.getsockname()[1])
        return found[1] + self._ports[found[2]]

    def run(self, command: str) -> list[str]:
        """The lines that it prints; of one that stays, the first."""
        words = self.own(command).split()
        assert words[0] == "liveweight"
        started = subprocess.Popen(
            [sys.executable, "-m", "liveweight.cli.main", *words[1:]],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )
        self._running.append(started)
        assert started.stdout is not None
        if words[1] in STAYS:
            return [started.stdout.readline().rstrip()]
        said, _ = started.communicate(timeout=WITHIN_S)
        assert started.returncode == 0
        return [line.rstrip() for line in said.splitlines()]

    def close(self) -> None:
        """End what still runs."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.communicate(timeout=WITHIN_S)


@contextmanager
def shell(directory: Path) -> Iterator[Shell]:
    opened = Shell(directory)
    try:
        yield opened
    finally:
        opened.close()


def transcript(text: str) -> list[tuple[str, list[str]]]:
    """Commands, each with the lines that follow it."""
    told: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            told.append((line[2:], []))
        else:
            told[-1][1].append(line)
    return told


def shape(line: str) -> list[str]:
    """The words of a line, whatever its figures are."""
    return FIGURE.sub("N", line).split()


@pytest.mark.timeout(600)
def test_the_first_five_minutes_go_as_they_are_told(short_path: Path) -> None:
    with shell(short_path) as terminal:
        for text in blocks("console")[:2]:
            for command, told in transcript(text):
                said = terminal.run(command)
                own = [shape(re.sub(r"ipc:\S+", "ipc", line)) for line in map(terminal.own, told)]
                assert [shape(re.sub(r"ipc:\S+", "ipc", line)) for line in said] == own, command


@pytest.mark.timeout(600)
def test_an_engine_takes_what_a_source_offers(short_path: Path) -> None:
    for name, seed in (("model", 0), ("new", 1)):
        init_model(short_path / name, SIZES["qwen3"]["tiny"], seed=seed)
    with shell(short_path) as terminal:
        for command, told in transcript(blocks("console")[2]):
            assert told == []
            said = terminal.run(command)
        assert "step_100" in said[-1]


def own_names(**names: object) -> dict[str, Any]:
    return {"__name__": "readme", **names}


def test_the_training_loop_publishes(models: Models) -> None:
    from transformers import AutoModelForCausalLM

    logged: list[dict[str, Any]] = []
    model = AutoModelForCausalLM.from_pretrained(models.directory())

    def train(batch: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(batch)

    with program(str(models.directory()), "--port", "0") as served:
        code = blocks("python")[0].replace("http://127.0.0.1:8000", url_of(served))
        names = own_names(model=model, data=[0.1, 0.2], train=train, log=logged.append)
        exec(compile(code, "README.md", "exec"), names)
    assert [figures["weight_sync/total_s"] > 0 for figures in logged] == [True, True]
    assert names["report"].version.label == 1


class UntilDone:
    """True until the thread has ended."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def __bool__(self) -> bool:
        return self._thread.is_alive()


def test_a_program_of_ones_own_receives(short_path: Path) -> None:
    address = f"ipc://{short_path}/engine.sock"
    model, new = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    began = threading.Event()

    def publish() -> None:
        began.wait(WITHIN_S)
        with lw.Publisher(new, engines=[address]) as publisher:
            publisher.publish(1)

    def step(_: Callable[..., object]) -> None:
        began.set()

    publishing = threading.Thread(target=publish)
    publishing.start()
    code = blocks("python")[1].replace("ipc:///run/user/me/engine.sock", address)
    try:
        exec(
            compile(code, "README.md", "exec"),
            own_names(model=model, step=step, serving=UntilDone(publishing)),
        )
    finally:
        publishing.join()
    assert torch.equal(model.weight, new.weight)
