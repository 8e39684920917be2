"""vLLM in an environment of its own: `make test-vllm` makes it and names its Python. There, a test that is skipped has failed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.vllm.models import llama, saved
from tests.vllm.serving import VLLM_PYTHON, Answer, Server, served


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints, logs and the secret are."""
    if VLLM_PYTHON is None:
        pytest.skip("needs vLLM in an environment of its own: make test-vllm")
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def base(place: Path) -> Path:
    """The checkpoint that the server is started on."""
    return saved(llama(0), place / "base")


@pytest.fixture(scope="session")
def new(place: Path) -> Path:
    """Another one of the same model."""
    return saved(llama(1), place / "new")


@pytest.fixture(scope="session")
def server(place: Path, base: Path) -> Iterator[Server]:
    """One server for all tests: vLLM takes a long time to start."""
    with served(base, place) as started:
        yield started


@pytest.fixture(scope="session")
def spare(place: Path, new: Path) -> Iterator[Server]:
    """A server that was started on the other checkpoint: what it answers is what a fresh one does. The last test may break it."""
    with served(new, place) as started:
        yield started


@pytest.fixture(scope="session")
def fresh(spare: Server) -> Answer:
    """What a vLLM answers that was started on the other checkpoint."""
    return spare.answer()


@pytest.fixture(scope="session")
def before(server: Server) -> Answer:
    """What the server answers before anything is published."""
    return server.answer()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where vLLM was promised, nothing may be left out."""
    report = yield
    if VLLM_PYTHON is not None and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where vLLM is: {report.longrepr}"
    return report
