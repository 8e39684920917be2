"""Our rounds beside other methods: the same tensors, one trainer, the same number of ranks, contenders in turn within every repetition.

A round is timed from the trainer's call until the last rank's live weights are new. Every contender's first rounds warm it up; one of them
starts from cleared ranks, whose weights are compared afterwards with the trainer's bit for bit.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from liveweight.devices.kernels import choose
from liveweight.errors import DigestMismatch
from liveweight.lab.bench.model_shapes import decoder, parameters, small_tensors
from liveweight.lab.bench.peers import ray_store
from liveweight.lab.bench.peers.contender import Group, PeerMethod, Rendezvous, Weights
from liveweight.lab.bench.peers.queues import QueueSender
from liveweight.lab.bench.peers.rank import METHODS, PeerRanks
from liveweight.lab.bench.rounds.ipc import IpcSettings, Scene, change
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.offers.live import live_digest
from liveweight.worker.targets.torch_layout import gather, layout_of

OURS: tuple[tuple[str, OfferKind, bool], ...] = (
    ("ipc", "live", False),
    ("ipc", "live", True),
    ("ipc", "frozen", False),
    ("ipc", "frozen", True),
    ("ipc", "ring", False),
    ("ipc", "ring", True),
    ("gdr", "live", False),
    ("gdr", "live", True),
    ("ipc_snapshot", "frozen", True),
)
BASE = "ipc_live_plain"
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """What to measure. `tensors` 0: a decoder's shapes."""

    size_gb: float = 1.4
    ranks: int = 2
    rounds: int = 5
    tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A contender, ready to run. `round` does not change the weights' content; `check` raises DigestMismatch."""

    name: str
    stands_for: str
    group: Group
    verified: bool
    round: Callable[[], float]
    check: Callable[[], None]


def bench_peers(settings: PeersSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    size = int(settings.size_gb * 1e9)
    specs = small_tensors(size, settings.tensors) if settings.tensors else decoder(size)
    with _scene(specs, settings) as (scene, contenders, absent):
        for contender in contenders:
            contender.check()
            contender.round()
        taken: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        limits = []
        for _ in range(settings.rounds):
            limits.append(scene.limit())
            for contender in contenders:
                taken[contender.name].append(contender.round())
        for contender in contenders:
            contender.check()
    return _report(settings, specs, contenders, taken, limits, absent)


@contextmanager
def _scene(
    specs: Sequence[TensorSpec], settings: PeersSettings
) -> Iterator[tuple[Scene, list[Contender], dict[str, str]]]:
    """Start all processes of all contenders. Also returns the contenders that cannot run here, with the reason."""
    absent = {} if find_spec("nixl") else {"gdr": "not installed: pip install 'liveweight[nixl]'"}
    if (why := ray_store.absent()) is not None:
        absent[ray_store.NAME] = why
    with ExitStack() as stack:
        files = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="peers-of-lw-", dir=MEMORY if MEMORY.is_dir() else None)
            )
        )
        modes = tuple(sorted({mode for mode, _, _ in OURS} - set(absent)))
        ours = IpcSettings(size_gb=settings.size_gb, ranks=settings.ranks, rounds=settings.rounds)
        scene = stack.enter_context(Scene(list(specs), ours, modes=modes, files=files))
        check = _Check(scene, specs, settings.ranks)
        contenders = [_ours(scene, *one) for one in OURS if one[0] in modes]
        weights = dict(scene.shared.module.named_parameters())
        contenders += _theirs(specs, settings.ranks, files, weights, check, stack)
        if ray_store.NAME not in absent:
            contenders.append(_ray(specs, settings.ranks, files, weights, check, stack))
        yield scene, contenders, absent


def _ours(scene: Scene, mode: str, offer: OfferKind, verify: bool) -> Contender:
    name = "_".join((mode, *(() if mode == "ipc_snapshot" else (offer,)), "verified" if verify else "plain"))

    def check() -> None:
        scene.publish(offer, verify, mode)
        scene.check()

    return Contender(
        name=name,
        stands_for=f"liveweight, {mode}, {offer} offer",
        group="ours",
        verified=verify,
        round=partial(scene.publish, offer, verify, mode),
        check=check,
    )


class _Check:
    """Compares what ranks hold with the trainer's weights, and gives those new content, as our own rounds do."""

    def __init__(self, scene: Scene, specs: Sequence[TensorSpec], ranks: int) -> None:
        self._scene, self._label = scene, 0
        self._layouts = [layout_of(gather(parameters(list(specs), rank, ranks))) for rank in range(ranks)]

    def change(self) -> None:
        """New content in every tensor."""
        self._label += 1
        change(self._scene.shared, -self._label)

    def same(self, lanes: Sequence[bytes], who: str) -> None:
        """Raises DigestMismatch if a rank holds anything else."""
        digest_sums, shared = DigestSums(self._layouts), self._scene.shared
        totals, torn = digest_sums.combine(
            [
                lanes_from_bytes(one, len(layout.placements))
                for one, layout in zip(lanes, self._layouts, strict=True)
            ]
        )
        wanted = live_digest(shared, choose().kernels, os.cpu_count() or 1)[
            digest_sums.sources(shared.manifest)
        ]
        differing = torn or digest_sums.differing(totals, wanted)
        if differing:
            raise DigestMismatch(differing, f"the ranks of {who}")


def _theirs(
    specs: Sequence[TensorSpec], ranks: int, files: Path, weights: Weights, check: _Check, stack: ExitStack
) -> list[Contender]:
    """The methods that share one set of rank processes, which hold the weights once."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    queues = tuple(context.Queue() for _ in range(ranks))
    rendezvous = Rendezvous(directory=files, specs=tuple(specs), ranks=ranks, queues=queues)
    processes = PeerRanks(rendezvous, context)
    stack.callback(processes.close)
    return [_peer_method(method, rendezvous, processes, weights, check, stack) for method in METHODS]


def _peer_method(
    method: PeerMethod,
    rendezvous: Rendezvous,
    processes: PeerRanks,
    weights: Weights,
    check: _Check,
    stack: ExitStack,
) -> Contender:
    processes.send("make", method.name)
    sender = method.sender(rendezvous, weights)
    stack.callback(sender.close)
    processes.receive()

    def once() -> float:
        check.change()
        if isinstance(sender, QueueSender):
            sender.refresh()
        processes.send("receive", method.name)
        processes.receive()
        began_s = time.monotonic()
        sender.send(processes.talks)
        return float(max(processes.receive())) - began_s

    def cleared() -> None:
        processes.send("clear")
        processes.receive()
        once()
        processes.send("lanes")
        check.same(processes.receive(), method.name)

    return Contender(
        name=method.name,
        stands_for=method.stands_for,
        group=method.group,
        verified=False,
        round=once,
        check=cleared,
    )


def _ray(
    specs: Sequence[TensorSpec], ranks: int, files: Path, weights: Weights, check: _Check, stack: ExitStack
) -> Contender:
    store = ray_store.RayStore(Rendezvous(directory=files, specs=tuple(specs), ranks=ranks), weights)
    stack.callback(store.close)

    def once() -> float:
        check.change()
        return store.round()

    def cleared() -> None:
        store.clear()
        once()
        check.same(store.lanes(), ray_store.NAME)

    return Contender(
        name=ray_store.NAME,
        stands_for=ray_store.STANDS_FOR,
        group="apart",
        verified=False,
        round=once,
        check=cleared,
    )


def _report(
    settings: PeersSettings,
    specs: Sequence[TensorSpec],
    contenders: Sequence[Contender],
    taken: dict[str, list[float]],
    limits: Sequence[float],
    absent: dict[str, str],
) -> dict[str, Any]:
    rows = {
        one.name: {
            "stands_for": one.stands_for,
            "group": one.group,
            "best_s": min(taken[one.name]),
            "median_s": statistics.median(taken[one.name]),
            "verified": one.verified,
            "ok": True,  # its checks, before and after, raise otherwise
        }
        for one in contenders
    }
    return {
        "bytes": sum(spec.size_bytes for spec in specs),
        "tensors": len(specs),
        "ranks": settings.ranks,
        "rounds": settings.rounds,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "limit_s": min(limits),
        "limit_median_s": statistics.median(limits),
        "contenders": rows,
        "absent": absent,
        **compared(rows),
    }


def compared(rows: dict[str, Any]) -> dict[str, Any]:
    """The ratios that matter. `speedup_best` is over the best contender of the compared group, `speedup_median` over the median one."""
    best = {name: row["best_s"] for name, row in rows.items()}
    groups = {
        group: [name for name, row in rows.items() if row["group"] == group]
        for group in ("in place", "copies twice", "apart")
    }
    speedups = sorted(best[name] / best[BASE] for name in groups["apart"])
    return {
        "speedup_best": speedups[0],
        "speedup_median": statistics.median(speedups),
        "of_in_place": best[BASE] / min(best[name] for name in groups["in place"]),
        "over_copies_twice": min(best[name] for name in groups["copies twice"]) / best[BASE],
        "verified_of_copies_twice": best["ipc_live_verified"]
        / min(best[name] for name in groups["copies twice"]),
    }
