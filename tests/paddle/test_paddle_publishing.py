"""A trainer in Paddle, without torch, publishes into `liveweight serve`, which runs in another environment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from liveweight.cli.main import app
from tests.paddle.conftest import PaddleSide, started_side
from tests.support.engine.engines import WITHIN_S, Dtype, Models
from tests.support.processes.serve_processes import program, url_of

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Served:
    """An engine of two ranks in a process of its own."""

    url: str
    place: Path

    @property
    def version(self) -> dict[str, Any]:
        """The version that it reports."""
        version: dict[str, Any] = httpx.get(f"{self.url}/v1/weights", timeout=WITHIN_S).json()["version"]
        return version

    def text(self) -> str:
        """What it answers."""
        ask = {"prompt": "the quick brown fox", "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
        answer = httpx.post(f"{self.url}/v1/completions", json=ask, timeout=WITHIN_S)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def verified(self, directory: Path) -> int:
        """`liveweight verify`'s exit code: 0 the same to the bit, 3 something else."""
        return CliRunner().invoke(app, ["verify", str(directory), self.url]).exit_code

    def met_by(self, side: PaddleSide, layer: str, mode: str = "ipc") -> None:
        """A publisher of that layer, called as the layer is."""
        side(
            "meet",
            name=layer,
            layer=layer,
            url=self.url,
            directory=str(self.place),
            secret=str(self.place / "secret"),
            mode=mode,
        )


@contextmanager
def served(place: Path, model: Path) -> Iterator[Served]:
    options = ("--tp", "2", "--port", "0", "--weights-address", f"ipc://{place}/engine.sock")
    with program(str(model), *options, "--secret-file", str(place / "secret")) as started:
        yield Served(url_of(started), place)


def shapes_of(directory: Path) -> dict[str, list[int]]:
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict


def as_checkpoint(side: PaddleSide, layer: str, like: Path, directory: Path) -> Path:
    """The layer's weights in an HF directory, written by Paddle."""
    shutil.copytree(like, directory)
    side("checkpoint", name=layer, path=str(directory / "model.safetensors"))
    return directory


@pytest.mark.parametrize(
    ("theirs", "ours", "mode"),
    [
        ("float32", "float32", "ipc"),
        ("bfloat16", "bfloat16", "ipc"),
        ("float32", "bfloat16", "ipc"),
        ("bfloat16", "float32", "ipc_snapshot"),
    ],
)
def test_every_step_of_a_paddle_trainer_is_what_the_engine_serves(
    paddle_side: PaddleSide,
    models: Models,
    short_path: Path,
    tmp_path: Path,
    theirs: Dtype,
    ours: Dtype,
    mode: str,
) -> None:
    model = models.directory(dtype=ours)
    shapes = shapes_of(model)
    layer = f"{theirs} to {ours}"
    linear = paddle_side("build", name=layer, shapes=shapes, dtype=theirs, seed=3)
    assert any(shapes[name][0] == shapes[name][1] for name in linear), (
        "a square one, whose transpose has its shape"
    )
    with served(short_path, model) as engine:
        before = engine.text()
        engine.met_by(paddle_side, layer, mode)
        digests = set()
        for step in (1, 2):  # the second uses the bindings of the first
            paddle_side("train", name=layer, steps=1)
            said = paddle_side("publish", name=layer, version=f"step_{step}")
            assert (said["match"], said["torch"]) == (True, False)
            version = engine.version
            assert (version["label"], version["digest"]) == (f"step_{step}", said["digest"])
            digests.add(said["digest"])
        assert len(digests) == 2
        trained = as_checkpoint(paddle_side, layer, model, tmp_path / "trained")
        assert (engine.verified(trained), engine.verified(model)) == (0, 3)
        paddle_side("close", name=layer)
        assert engine.text() != before


def test_a_source_reads_parameters_where_they_lie(paddle_side: PaddleSide) -> None:
    assert paddle_side("source_facts") == {
        "names": [
            ["model.embed.weight", "model.head.weight"],
            ["model.square.weight"],
            ["model.square.bias"],
        ],
        "dtypes": ["bfloat16"],
        "in_place": True,
        "strides": [[1, 4], [4, 1]],
        "as_it_is": [4, 1],
        "held": True,
    }


def test_what_cannot_be_a_source_is_refused_by_name(paddle_side: PaddleSide) -> None:
    said = paddle_side("refusals")
    expected = {
        "no layer": ("Refused", "not int"),
        "state dict": ("Refused", "give transpose= their names, or False"),
        "unknown name": ("ManifestInvalid", "weights is to be transposed, and is not there"),
        "vector": ("ManifestInvalid", "bias is to be transposed, and has the shape [6]"),
        "dtype": ("ManifestInvalid", "a is complex64, which cannot be published"),
        "no tensor": ("ManifestInvalid", "a is not a Paddle tensor but int"),
        "changed": ("ManifestInvalid", "names changed after its manifest was made: more"),
    }
    assert {name: error for name, (error, _) in said.items()} == {
        name: error for name, (error, _) in expected.items()
    }
    assert [name for name, (_, text) in expected.items() if text not in said[name][1]] == [], json.dumps(said)


def test_a_killed_paddle_trainer_leaves_the_engine_at_its_version(
    paddle_side: PaddleSide, models: Models, short_path: Path
) -> None:
    model = models.directory()
    shapes = shapes_of(model)
    with served(short_path, model) as engine:
        first = started_side()
        first("build", name="killed", shapes=shapes, dtype="float32", seed=1)
        engine.met_by(first, "killed")
        said = first("publish", name="killed", version="step_1")
        first.kill()
        assert (engine.version["label"], engine.version["digest"]) == ("step_1", said["digest"])
        paddle_side("build", name="next", shapes=shapes, dtype="float32", seed=2)
        engine.met_by(paddle_side, "next")
        again = paddle_side("publish", name="next", version="step_1")
        paddle_side("close", name="next")
        assert (engine.version["digest"], again["match"]) == (again["digest"], True)
        assert again["digest"] != said["digest"]
