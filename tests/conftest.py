"""What every suite has: a cluster of real processes, in a directory short enough for unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running
from tests.support.engines import Models
from tests.support.zygote import Zygote


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


@pytest.fixture
def cluster(short_path: Path, zygote: Zygote) -> Iterator[Cluster]:
    """Real processes that end with the test."""
    with running(short_path, zygote) as started:
        yield started


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoint directories of tiny models."""
    return Models(tmp_path_factory.mktemp("models"))
