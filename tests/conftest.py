"""What every suite has: a cluster of real processes, in a directory short enough for unix sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import Cluster, running
from tests.support.engines import Logits, Models
from tests.support.zygote import Zygote

os.environ.setdefault("UCX_LOG_FILE", "/dev/stderr")  # its own choice is stdout, where our programs talk


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
