"""A served engine for the suites of this folder. Point `engine` at another one, and the contract is checked for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from liveweight.engine.config import EngineConfig
from tests.support.engine.echo_engine import EchoEngine
from tests.support.engine.tokenizer_dirs import write_byte_level
from tests.support.processes.http_server import Served, serving


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a chat template."""
    return write_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> EchoEngine:
    """What is served."""
    return EchoEngine(EngineConfig(model=str(model_dir), max_running=64, max_waiting=1024))


@pytest.fixture(scope="session")
def served(engine: EchoEngine) -> Iterator[Served[EchoEngine]]:
    """A server for tests that leave it as it was."""
    with serving(engine) as running:
        yield running


@pytest.fixture(scope="session")
def client(served: Served[EchoEngine]) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with served.openai() as connected:
        yield connected


@pytest.fixture(scope="session")
def http(served: Served[EchoEngine]) -> Iterator[httpx.Client]:
    """A plain client."""
    with served.http() as connected:
        yield connected


@pytest.fixture
def own(model_dir: Path) -> Iterator[Served[EchoEngine]]:
    """A server of the test's own, to be broken: room for two requests that run and two that wait."""
    config = EngineConfig(model=str(model_dir), max_running=2, max_waiting=2)
    with serving(EchoEngine(config)) as running:
        yield running
