"""Programs in vLLM's own environment: the example with an `LLM`, and a trainer that drives vLLM as vLLM shows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import liveweight as lw
from tests.arch.source_tree import ROOT
from tests.vllm.serving import NAME, OWN_ENVIRONMENT, VLLM_PYTHON, WITHIN_S, Answer, Server

pytestmark = pytest.mark.timeout(1200)


OTHER_PYTHON = os.environ.get("LIVEWEIGHT_OTHER_PYTHON")
"""Of an environment with another torch than vLLM's, without vLLM: `make soak-vllm` makes it."""


def program(*arguments: str, place: Path, python: str | None = VLLM_PYTHON) -> str:
    """What it prints; AssertionError with what went wrong there. Its sockets and its own secret are in that place."""
    ended = subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env=os.environ | OWN_ENVIRONMENT | {"TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_a_trainer_of_vllms_own_kind_needs_only_another_backend(
    server: Server, before: Answer, fresh: Answer, base: Path, new: Path, place: Path
) -> None:
    where = ("--url", server.url, "--name", NAME, "--secret-file", str(server.secret))
    said = program("examples/vllm_rlhf_over_http.py", str(new), *where, place=place).splitlines()
    told = dict(line.split(" ", 1) for line in said if line.startswith(("before", "after", "version")))
    assert told["before"] != told["after"]
    assert told["version"] == "1"
    assert server.answer() == fresh
    assert not server.get("/is_paused")["is_paused"]
    assert server.get("/weight_info") == {"weight_version": "1"}
    with lw.Publisher(
        base, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
    ) as trainer:
        trainer.publish("back")
    assert server.answer() == before


@pytest.mark.soak
def test_a_trainer_has_another_torch_than_vllm(
    server: Server, before: Answer, fresh: Answer, base: Path, new: Path, place: Path
) -> None:
    module = ("-m", "tests.vllm.other_trainer_program")
    said = program(*module, server.url, str(server.secret), str(new), place=place, python=OTHER_PYTHON)
    version, matches = said.split()
    assert version.partition("+")[0] != torch.__version__.partition("+")[0]
    assert matches == "True"
    assert server.answer() == fresh
    with lw.Publisher(
        base, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
    ) as trainer:
        trainer.publish("back")
    assert server.answer() == before


@pytest.mark.soak
def test_the_example_publishes_verifies_and_goes_back(place: Path, base: Path, new: Path) -> None:
    said = program("examples/vllm_live_update.py", str(base), str(new), place=place)
    lines = [
        line for line in said.splitlines() if line.startswith(("started", "published", "verified", "went"))
    ]
    assert [line.split()[0] for line in lines] == ["started", "published", "verified", "went"], said
    assert lines[0].partition("[")[2] != lines[1].partition("[")[2]
    assert lines[3].endswith("initial")


@pytest.mark.soak
def test_an_async_llm_takes_an_update_while_it_generates(
    before: Answer, fresh: Answer, place: Path, base: Path, new: Path
) -> None:
    said = program("-m", "tests.vllm.async_program", str(base), str(new), place=place)
    lines = [line for line in said.splitlines() if line.startswith(("before", "after", "across"))]
    assert lines == [f"before {before[0]}", f"after {fresh[0]}", "across 200 True step_1"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
def test_an_actor_of_ray_takes_an_update_by_its_handle(place: Path, base: Path, new: Path, kind: str) -> None:
    said = program("-m", "tests.vllm.ray_program", kind, str(base), str(new), place=place)
    told = ("before", "after", "back", "across")
    parts = dict(line.split(" ", 1) for line in said.splitlines() if line.startswith(told))
    assert parts["before"] == parts["back"] != parts["after"]
    assert parts["across"] == "200 True step_1"


def test_only_loading_that_copies_and_nothing_else_is_replayed(place: Path) -> None:
    assert program("-m", "tests.vllm.tracing_program", place=place).endswith("traced\n")
