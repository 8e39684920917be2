"""A double of vLLM: workers as threads, each with a model of its own, driven by the four calls of vLLM's clients.

What vLLM itself does is the double's (lockstep calls, an update that is begun and ended, loading that may fail); all else is real.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch

import liveweight as lw
from liveweight.integrations.vllm.client.connect import REQUIRED
from liveweight.integrations.vllm.draft_model import PREFIX, load_both, optional
from liveweight.integrations.vllm.handshake_terms import HandshakeTerms
from liveweight.integrations.vllm.workers.rank import Loading, VllmRank, WorkerSeat
from liveweight.integrations.vllm.workers.target import Named
from liveweight.rounds.boundary import Decision
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.wire.credentials import load_or_create_secret

Weights = Mapping[str, torch.Tensor]


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A version of a small model: layers out of order, a head, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (24, 16), "model.embed_tokens.weight": (24, 16)}
    for layer in (10, 2, 0):
        shapes |= {f"model.layers.{layer}.{name}.weight": (16, 16) for name in ("q", "k", "norm")}
    shapes |= {"model.scale": (), "model.empty": (0, 4)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Held:
    """A tensor of a worker's, all of it."""

    worker: Worker
    tensor: str

    @property
    def source(self) -> Self:
        """The whole."""
        return self

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole."""
        return tensor

    def held(self) -> torch.Tensor | None:
        """What the worker computes with."""
        return None if "head" in self.tensor else self.worker.holds[self.tensor]


class Worker:
    """One worker's model, and how many of its next loads fail, each after so many tensors."""

    def __init__(self, start: Weights) -> None:
        self.holds = {name: tensor for name, tensor in start.items() if not name.startswith(PREFIX)}
        self.drafts = {
            name.removeprefix(PREFIX): tensor for name, tensor in start.items() if name.startswith(PREFIX)
        }
        self.draft_handed_over, self.draft_failures = False, 0
        self.order: list[str] = []
        self.failures: list[int] = []
        self.restored = self.learned = 0
        self.spoils = 0
        """So many of its next loads leave one weight otherwise than it should be."""

    def load(self, tensors: Named) -> None:
        """As vLLM loads: tensor after tensor, into what serves."""
        after, self.order = (self.failures.pop(0) if self.failures else None), []
        for number, (name, tensor) in enumerate(tensors):
            if number == after:
                raise RuntimeError(f"{name} does not load")
            self.order.append(name)
            self.holds[name] = tensor.clone()
        if self.spoils > 0:
            self.spoils -= 1
            self.holds["model.scale"] += 1

    def load_draft(self, tensors: Named) -> None:
        """Into the draft model, if there is one and vLLM has handed it over."""
        if self.draft_failures > 0:
            self.draft_failures -= 1
            raise RuntimeError("the draft does not load")
        if self.draft_handed_over:
            self.drafts = {name: tensor.clone() for name, tensor in tensors}

    def places(self, names: Iterable[str]) -> Iterator[Held]:
        """Where tensors lie; of heads nobody can tell, they are packed away."""
        yield from (Held(self, name) for name in names)

    def learn(self, installed: Callable[[str], torch.Tensor]) -> None:
        """Another version is about to be staged; the worker holds what the call says."""
        self.learned += 1
        for name, tensor in self.holds.items():
            assert torch.equal(installed(name), tensor), name

    def restore(self) -> None:
        """Layers have their tensors again."""
        self.restored += 1


class VllmWorkers:
    """The four calls, and pausing. `on_update` runs before workers install."""

    def __init__(self, world: int, secret: Path, start: Weights) -> None:
        self.workers, self.life = [Worker(start) for _ in range(world)], secrets.token_hex(4)
        self.secret, self.start = secret, dict(start)
        self.paused, self.active, self.version = False, False, "default"
        self.concurrent = True
        self.calls: list[str] = []
        self.resumes_refused = 0
        self.on_call: Callable[[], None] = lambda: None
        self.on_update: Callable[[], None] = lambda: None
        self.ranks: list[VllmRank] = []
        self._orphans: list[VllmRank] = []
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(world)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every worker connects to the trainer."""
        self._note("init")
        named = {name: init_info[name] for name in ("address", "session", "pace_bytes_per_s")}
        terms = HandshakeTerms(**named, timeout_s=init_info["timeout_s"])
        if not self.ranks:
            self.ranks = self._together(lambda rank: self._made(rank, terms))
        self._together(lambda rank: self.ranks[rank].handshake(terms))

    def _made(self, rank: int, terms: HandshakeTerms) -> VllmRank:
        world, worker = len(self.workers), self.workers[rank]
        seat = WorkerSeat(rank=rank, world=world, local_rank=rank, local_world=world, vllm=self.life)
        specs = (
            TensorSpec(
                name=name, dtype=DType(str(tensor.dtype).removeprefix("torch.")), shape=tuple(tensor.shape)
            )
            for name, tensor in self.start.items()
        )
        manifest = Manifest(tensors=tuple(specs))
        loading = Loading(
            manifest=manifest,
            optional=optional(manifest),
            load=partial(load_both, main=worker.load, draft=worker.load_draft),
            restore=worker.restore,
            start=partial(_pairs, self.start),
            learn=worker.learn,
            places=partial(worker.places, tuple(worker.holds)),
        )
        return VllmRank(seat, loading, terms, load_or_create_secret(self.secret))

    def start_weight_update(self) -> None:
        """Refused while one is active, as vLLM does."""
        self._note("start")
        if self.active:
            raise RuntimeError("a weight update is already active")
        self.active = True

    def start_draft_weight_update(self) -> None:
        """The same for the draft model, which every worker is handed."""
        self.start_weight_update()
        for worker in self.workers:
            worker.draft_handed_over = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Every worker installs, all at once."""
        self._note("update")
        self.on_update()
        order = dict(update_info)
        boot, verify = order.pop("boot"), order.pop("verify")
        self._together(lambda rank: self.ranks[rank].swap(Decision(**order), boot=boot, verify=verify))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The update is over."""
        self._note("finish")
        if not self.active:
            raise RuntimeError("no weight update is active")
        with self._changed:
            self.active = False
            self.version = self.version if weight_version is None else weight_version
            self._changed.notify_all()

    def update_weight_version(self, new_version: str) -> None:
        """What it says that it serves."""
        self.version = new_version

    def pause_generation(self, mode: str) -> None:
        """No step is taken from here on."""
        self._note(f"pause {mode}")
        self.paused = True

    def resume_generation(self) -> None:
        """Steps are taken again, unless the test wants otherwise."""
        self._note("resume")
        if self.resumes_refused > 0:
            self.resumes_refused -= 1
            raise RuntimeError("a test wants no resume")
        self.paused = False

    def receives(self, call: str, times: int) -> bool:
        """Whether it receives that call so many times, soon."""
        with self._changed:
            return self._changed.wait_for(lambda: self.calls.count(call) >= times, 60.0)

    def rests(self) -> bool:
        """Whether the update has been ended, soon: publishers do not wait for that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.active, 60.0)

    def restart(self, *, outlived: bool = False) -> None:
        """As a server that was killed and started again: on the weights of its start, and connected to nobody. `outlived`: its workers
        do not know that it is gone."""
        if outlived:
            self._orphans, self.ranks = [*self._orphans, *self.ranks], []
        self._end_ranks()
        self.workers, self.life = [Worker(self.start) for _ in self.workers], secrets.token_hex(4)
        self.paused, self.active, self.version = False, False, "default"

    def close(self) -> None:
        """End all workers."""
        self._end_ranks()
        for orphan in self._orphans:
            orphan.close()
        self._threads.shutdown()

    def _end_ranks(self) -> None:
        ranks, self.ranks = self.ranks, []
        self._together(lambda rank: ranks[rank].close() if ranks else None)

    def holds(self, wanted: Weights) -> bool:
        """Whether every worker's model is that version, to the bit."""
        return all(
            set(worker.holds) == set(wanted)
            and all(torch.equal(worker.holds[n], t) for n, t in wanted.items())
            for worker in self.workers
        )

    def _note(self, call: str) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        self.on_call()

    def _together(self, work: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(work, range(len(self.workers))))


class Four:
    """The four methods of vLLM's own clients, and no more."""

    def __init__(self, workers: VllmWorkers) -> None:
        for name in REQUIRED:
            setattr(self, name, getattr(workers, name))


def _pairs(start: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from start.items()


BASE, NEW = weights(0), weights(1)
MET = ["init", "start", "finish"]
EXCHANGED = ["start", "pause keep", "update", "resume", "finish"]
WHOLE = ["init", *EXCHANGED]


class Started(Protocol):
    """A vLLM of so many workers, on these weights; all end with the test."""

    def __call__(self, world: int, start: Weights = BASE) -> VllmWorkers: ...


def publisher(workers: VllmWorkers, source: object = NEW, **settings: object) -> lw.Publisher:
    """One that drives these workers."""
    return lw.Publisher(source, engines=[lw.vllm(workers)], secret=workers.secret, **settings)  # type: ignore[arg-type]
