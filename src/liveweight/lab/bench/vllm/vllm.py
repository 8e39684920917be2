"""What an update costs a vLLM that serves: the pause that its clients see, and the time until it serves the new version.

One run, one server, the same model, clients and trainer for three contenders that take turns: ours; vLLM's own `reload_weights` from
files in shared memory, the trainer's save counted; and a plain backend of four phases that streams the same bytes, layer by layer,
without staging. All of them pause vLLM alike, and drop its caches.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liveweight.checkpoint import CheckpointSource
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import Size
from liveweight.errors import DigestMismatch
from liveweight.integrations.vllm.client.http_controls import HttpControls
from liveweight.integrations.vllm.engine import vllm
from liveweight.integrations.vllm.server_process import VllmServerConfig, free_port, serving
from liveweight.integrations.vllm.workers.target import in_layers
from liveweight.lab.bench.vllm.clients import CALL_S, Clients, answer, call_workers
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.local_publisher import publishing_to
from liveweight.trainer.sources.in_memory import as_source
from liveweight.wire.credentials import load_or_create_secret

if TYPE_CHECKING:
    import torch

SHARED = Path("/dev/shm")
EXTENSION = "liveweight.lab.bench.vllm.plain_worker.Plain"
SIZE = Size(
    hidden=1024,
    layers=12,
    heads=16,
    kv_heads=4,
    head_dim=64,
    intermediate=4096,
    vocab=32768,
    max_positions=4096,
)
"""About 0.26 B parameters: 0.5 GB in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What to measure: vLLM's Python, how many turns of every contender after the first one, beside how many clients, with answers of so
    many tokens. A turn is two updates."""

    python: Path
    environment: Mapping[str, str]
    updates: int = 3
    clients: int = 2
    tokens: int = 16


@dataclass(slots=True)
class _Scene:
    """A server that serves, its clients, and a trainer that has two versions of the weights, of which it holds one at a time."""

    url: str
    shared: Path
    weights: dict[str, torch.Tensor]
    versions: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    specs: list[TensorSpec]
    publish: Callable[[str], object]
    steps: itertools.count[int]

    def ours(self) -> None:
        """One round."""
        self.publish(f"step_{next(self.steps)}")

    def reload(self) -> None:
        """Save, pause, let every worker load the files, resume."""
        from safetensors.torch import save_file

        save_file(self.weights, self.shared / "saved" / "model.safetensors")
        with _Paused(self.url):
            call_workers(self.url, "reload_weights", weights_path=str(self.shared / "saved"))

    def plain(self) -> None:
        """Pause, begin, every layer as it is packed, end, resume."""
        with _Paused(self.url):
            call_workers(self.url, "plain_start")
            for number, (_, layer) in enumerate(itertools.groupby(self.specs, key=_layer)):
                path, table = self._packed(number, list(layer))
                call_workers(self.url, "plain_bucket", str(path), json.dumps(table))
            call_workers(self.url, "plain_finish")
        for path in self.shared.glob("bucket-*"):
            path.unlink()

    def _packed(self, number: int, specs: list[TensorSpec]) -> tuple[Path, list[Any]]:
        import torch

        path, table, offset = self.shared / f"bucket-{number}", [], 0
        with path.open("wb") as bucket:
            for spec in specs:
                bucket.write(self.weights[spec.name].reshape(-1).view(torch.uint8).numpy().tobytes())
                table.append([spec.name, spec.dtype.value, list(spec.shape), offset])
                offset += spec.size_bytes
        return path, table

    def train(self, version: int) -> None:
        """The next weights, in place, as an optimiser would have them."""
        for name, tensor in self.versions[version].items():
            self.weights[name].copy_(tensor)


class _Paused:
    """Pause vLLM for the block, and drop its caches."""

    def __init__(self, url: str) -> None:
        self._controls = HttpControls(url)

    def __enter__(self) -> None:
        self._controls.pause("keep", Deadline.after(CALL_S))

    def __exit__(self, *_: object) -> None:
        self._controls.resume(Deadline.after(CALL_S))


def _layer(spec: TensorSpec) -> str:
    """What is packed together: a layer, or what belongs to none."""
    parts = spec.name.split(".")
    return next((part for part in parts if part.isdigit()), "")


def bench_vllm(settings: VllmSettings) -> dict[str, Any]:
    """The report, as it is written: seconds of every contender, best and median of its updates, and ours divided by theirs. The first
    turn of all, in which memory is had for the first time, is told apart."""
    with ExitStack() as stack:
        directory, shared = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-of-lw-", dir=place)))
            for place in (None, SHARED)
        )
        scene = _scene(settings, directory, shared, stack)
        clients = Clients(scene.url, settings.clients, settings.tokens)
        stack.callback(clients.close)
        contenders = {"ours": scene.ours, "reload": scene.reload, "plain": scene.plain}
        first = _measured(scene, clients, contenders, 1)
        found = _measured(scene, clients, contenders, settings.updates)
        size = sum(spec.size_bytes for spec in scene.specs)
    return {
        "bytes": size,
        "updates": settings.updates,
        "clients": settings.clients,
        "tokens": settings.tokens,
        "usual_gap_s": statistics.median(row["usual_gap_s"] for rows in found.values() for row in rows),
        "first": first,
        "runs": found,
        **_compared(found, min),
        "by_median": _compared(found, statistics.median),
    }


def _compared(
    found: Mapping[str, list[dict[str, float]]], of_all: Callable[[list[float]], float]
) -> dict[str, Any]:
    """One figure of all updates of every contender, and ours divided by theirs."""
    figures = {
        name: {key: of_all([row[key] for row in rows]) for key in ("pause_s", "total_s")}
        for name, rows in found.items()
    }
    ratios = {
        f"{what}_ratio": {
            name: figures["ours"][f"{what}_s"] / figures[name][f"{what}_s"] for name in ("reload", "plain")
        }
        for what in ("pause", "total")
    }
    return {**figures, **ratios}


def _scene(settings: VllmSettings, directory: Path, shared: Path, stack: ExitStack) -> _Scene:
    models = [directory / f"model-{seed}" for seed in range(2)]
    for seed, model in enumerate(models):
        init_model(model, SIZE, tied=False, dtype="bfloat16", seed=seed)
    shutil.copytree(
        models[0], shared / "saved", ignore=lambda _, names: [n for n in names if "safetensors" in n]
    )
    wanted = VllmServerConfig(
        python=settings.python,
        model=models[0],
        directory=directory,
        environment=settings.environment,
        port=free_port(),
        options=("--max-model-len", "2048", "--max-num-seqs", "16", "--worker-extension-cls", EXTENSION),
    )
    stack.enter_context(serving(wanted))
    sources = [CheckpointSource(model) for model in models]
    versions = [{name: tensor.clone() for name, tensor in source.tensors()} for source in sources]
    weights = {name: tensor.clone() for name, tensor in versions[0].items()}
    held = load_or_create_secret(directory / "secret")
    published = publishing_to(
        [vllm(wanted.url).replica(held, directory / "secret")],
        as_source(weights),
        name="bench",
        directory=directory,
        secret=held,
        timeout_s=CALL_S,
        stack=stack,
    )
    return _Scene(
        url=wanted.url,
        shared=shared,
        weights=weights,
        versions=(versions[0], versions[1]),
        specs=in_layers(sources[0].manifest()),
        publish=published.publisher.publish,
        steps=itertools.count(),
    )


def _measured(
    scene: _Scene, clients: Clients, contenders: Mapping[str, Callable[[], None]], updates: int
) -> dict[str, list[dict[str, float]]]:
    """Every contender brings the new weights, and then the old ones; what each answers afterwards must be the same."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    answers: dict[int, list[Any]] = {}
    for _ in range(updates):
        for name, update in contenders.items():
            for version in (1, 0):
                scene.train(version)
                clients.flowing(4)
                began_s = time.monotonic()
                update()
                ended_s = time.monotonic()
                clients.flowing(4)
                found[name].append(
                    {
                        "pause_s": clients.longest_gap_s(began_s, ended_s),
                        "total_s": ended_s - began_s,
                        "usual_gap_s": clients.usual_gap_s(began_s, ended_s),
                    }
                )
                said = answer(scene.url)
                if answers.setdefault(version, said) != said:
                    raise DigestMismatch([f"the answer of version {version} after {name}"], scene.url)
    return found
