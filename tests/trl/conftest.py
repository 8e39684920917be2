"""TRL in an environment of its own: `make test-trl` makes it and runs these tests there. There, a test that is skipped has failed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from tests.trl.harness import ServedEngine

TRL = find_spec("trl") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL and its libraries warn of their own next releases."""
    for item in items:
        if "tests/trl/" in item.path.as_posix():
            for category in ("FutureWarning", "DeprecationWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints and logs are."""
    if not TRL:
        pytest.skip("needs TRL in an environment of its own: make test-trl")
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="session")
def model(place: Path) -> Path:
    """The checkpoint that trainers and engines start with."""
    directory = place / "model"
    init_model(directory, SIZES["qwen3"]["tiny"])
    return directory


@pytest.fixture(scope="session")
def engine(model: Path, place: Path) -> Iterator[ServedEngine]:
    """One engine for all tests that do it no harm."""
    with ServedEngine(model, place, "--tp", "2") as started:
        yield started


@pytest.fixture(scope="session")
def other_engine(model: Path, place: Path) -> Iterator[ServedEngine]:
    """A second one of the same model."""
    with ServedEngine(model, place) as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where TRL is, nothing may be left out."""
    report = yield
    if TRL and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where TRL is: {report.longrepr}"
    return report
