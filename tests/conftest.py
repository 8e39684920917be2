"""What every suite has: a cluster of real processes, in a directory short enough for unix sockets."""

from __future__ import annotations

import gc
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liveweight.lab.bench import child_process
from liveweight.lab.bench.engine import idle
from liveweight.lab.torn_demo import engine_process, processes
from liveweight.lab.torn_demo.torn_demo import TP
from liveweight.lab.torture.fork_server import Forked
from tests.support.engine.engines import Logits, Models
from tests.support.processes.cli import Cli
from tests.support.processes.cluster import Cluster, running
from tests.support.processes.fork_server import Zygote
from tests.support.surroundings import own_home, settle


def pytest_configure(config: pytest.Config) -> None:
    """In the session's process and in each of its workers, which share one home."""
    settle()
    if not hasattr(config, "workerinput"):
        config.add_cleanup(own_home().cleanup)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not go through all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A private directory whose socket paths fit (108 bytes); gone after the test."""
    directory = Path(tempfile.mkdtemp(prefix="lw-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Where the test programs are forked from."""
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="session")
def cli(zygote: Zygote) -> Cli:
    """The program, for tests of what its commands do."""
    return Cli(zygote)


@pytest.fixture
def forked_python(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that benchmarks and the torn demo start are forked: they do the same, but for importing torch."""

    def popen(
        command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, process_group: int | None = None
    ) -> Forked:
        assert stdin == subprocess.DEVNULL
        ranks = TP if engine_process.__name__ in command[2] else 0
        return Forked(zygote.run_code(command[2], pass_fds[0], ranks=ranks, apart=process_group == 0))

    names = ("DEVNULL", "TimeoutExpired")
    theirs = SimpleNamespace(Popen=popen, **{name: getattr(subprocess, name) for name in names})
    for module in (child_process, idle, processes):
        monkeypatch.setattr(module, "subprocess", theirs)


@pytest.fixture
def cluster(short_path: Path, zygote: Zygote) -> Iterator[Cluster]:
    """Real processes that end with the test."""
    with running(short_path, zygote) as started:
        yield started


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoint directories of tiny models."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def transformers_logits() -> Callable[[Path], Logits]:
    """HF's own logits for a directory, in float32."""
    loaded: dict[Path, Any] = {}

    def of(directory: Path) -> Logits:
        if directory not in loaded:
            from transformers import AutoModelForCausalLM

            loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

        def logits(tokens: Sequence[int]) -> torch.Tensor:
            with torch.no_grad():
                table: torch.Tensor = loaded[directory](torch.tensor([list(tokens)])).logits[0]
            return table

        return logits

    return of
