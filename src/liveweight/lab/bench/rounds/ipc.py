"""Rounds over shared memory beside the limit: one plain copy of the same bytes, by the same ranks, from the same memory.

One trainer process (this one) and a replica of several ranks. Contenders and limit take turns within every repetition; a round is
timed from `publish` to the last commit. Verified rounds include the source's digests.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from liveweight.devices.kernels import choose
from liveweight.errors import DigestMismatch
from liveweight.lab.bench.child_process import BenchProcess, reset_peak, resident_bytes
from liveweight.lab.bench.model_shapes import decoder, module_of, parameters, small_tensors
from liveweight.lab.bench.publishing import publishing
from liveweight.lab.bench.rounds.figures import figures_of, ratios_of, rounds_of
from liveweight.lab.bench.rounds.freeze import bench_freeze
from liveweight.lab.bench.rounds.fsdp2 import sharded_rounds
from liveweight.lab.bench.rounds.ipc_rank import WAIT_S
from liveweight.lab.bench.rounds.ipc_rank import main as rank_main
from liveweight.lab.bench.rounds.iterators import bench_iterators
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.offers.live import SharedModule, live_digest, share_module
from liveweight.trainer.settings import PublisherSettings
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.packing_source import RingSettings
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages.values import Offer
from liveweight.worker.targets.torch_layout import gather, layout_of

CONTENDERS: tuple[tuple[OfferKind, bool], ...] = (
    ("live", False),
    ("live", True),
    ("frozen", False),
    ("frozen", True),
    ("ring", False),
    ("ring", True),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IpcSettings:
    """What to measure. `tensors` 0: a decoder's shapes. `cast` also freezes from float32, which takes twice the bytes more; `sharded`
    also publishes from two ranks of a trainer, which takes twice the bytes more, too."""

    size_gb: float = 1.4
    replicas: int = 1
    ranks: int = 2
    rounds: int = 8
    tensors: int = 0
    threads: int = 1
    cast: bool = True
    sharded: bool = True


def bench_ipc(settings: IpcSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    size = int(settings.size_gb * 1e9)
    specs = small_tensors(size, settings.tensors) if settings.tensors else decoder(size)
    with Scene(specs, settings) as scene:
        ring = _cold_ring(scene)
        scene.reset_peaks()
        cold_s = scene.publish("frozen", verify=False)
        cold_live_s = scene.publish("live", verify=False)
        spans: list[float] = []
        times: dict[tuple[OfferKind, bool], list[float]] = {contender: [] for contender in CONTENDERS}
        for contender in CONTENDERS:
            scene.publish(*contender)  # warms the bindings of both shadows
        for _ in range(settings.rounds):
            spans.append(scene.limit())  # as often as each other: the best of more tries would be better
            for contender in CONTENDERS:
                times[contender].append(scene.publish(*contender))
        scene.check()
        peaks = scene.peaks()
        iterator = scene.iterated()
        scene.check()
        sharded = scene.sharded() if settings.sharded else []
        freeze = bench_freeze(scene.shared, settings.rounds) if settings.cast else {}
    limit_s = min(spans)
    return {
        "bytes": sum(spec.size_bytes for spec in specs),
        "tensors": len(specs),
        "ranks": settings.ranks,
        "cores": os.cpu_count(),
        "kernels": choose().name,
        "limit_s": limit_s,
        "limit_median_s": statistics.median(spans),
        "cold_s": cold_s,
        "cold_live_s": cold_live_s,
        **ring,
        "peak_extra_bytes": peaks,
        "iterator": iterator,
        "rounds": rounds_of(times) | ({"fsdp2": {"verified_s": figures_of(sharded)}} if sharded else {}),
        "ratios": ratios_of(times, limit_s)
        | ({"fsdp2_of_frozen": min(sharded) / min(times["frozen", True])} if sharded else {}),
        "median_ratios": ratios_of(times, statistics.median(spans), statistics.median),
        **freeze,
    }


def _cold_ring(scene: Scene) -> dict[str, Any]:
    """The first ring rounds, before anything is frozen: how long the very first took, and what the trainer held beside its weights."""
    scene.reset_peaks()
    cold_s = scene.publish("ring", verify=False)
    for _ in range(2):  # to either shadow of the ranks
        scene.publish("ring", verify=True)
    return {
        "cold_ring_s": cold_s,
        "ring_bytes": scene.ring.segments * scene.ring.segment_bytes,
        "ring_peak_extra_bytes": scene.peaks()["trainer"],
    }


class Scene:
    """The processes of the benchmark, connected and ready. The trainer's module lies in an arena; frozen rounds copy it once more."""

    def __init__(
        self,
        specs: list[TensorSpec],
        settings: IpcSettings,
        *,
        modes: tuple[str, ...] = ("ipc",),
        files: Path | None = None,
    ) -> None:
        """A publisher for each of the transfer modes; `files` is where those that write files do."""
        self._specs, self._settings, self._modes, self._files = specs, settings, modes, files
        self._stack = ExitStack()
        self._label = 0
        self.ring = RingSettings()
        self._readable: Offer | None = None

    def __enter__(self) -> Scene:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-bench-")))
        load_or_create_secret(directory / "secret")
        self._kernels = choose().kernels
        self._config = config = {
            "address": f"ipc://{directory}/leader.sock",
            "secret": str(directory / "secret"),
            "store": str(directory / "store"),
            "world": self._settings.ranks,
            "threads": self._settings.threads,
            "modes": self._modes,
            "specs": msgspec.to_builtins(self._specs),
        }
        replicas = [
            {"address": f"ipc://{directory}/leader{name}.sock", "store": f"{directory}/store{name}"}
            for name in ("", *range(1, self._settings.replicas))
        ]
        self._ranks = [
            stack.enter_context(BenchProcess(rank_main, config | replica | {"rank": rank}))
            for replica in replicas
            for rank in range(self._settings.ranks)
        ]
        self.shared = stack.enter_context(share_module(module_of(self._specs), SharedArena))
        deadline = Deadline.after(WAIT_S)
        for rank in self._ranks:
            rank.line.receive(deadline)
        stack.callback(self._stop)
        self._addresses = [replica["address"] for replica in replicas]
        self._made = {
            name: publishing(
                self.shared,
                addresses=self._addresses,
                directory=directory,
                files=self._files,
                timeout_s=WAIT_S,
                stack=stack,
                ring=self.ring,
                transfer_mode=name,
            )
            for name in self._modes
        }

    def _stop(self) -> None:
        for rank in self._ranks:
            rank.line.send(do="stop")
        for rank in self._ranks:
            rank.line.receive(Deadline.after(WAIT_S))

    @property
    def processes(self) -> dict[str, int]:
        """The ranks' process ids."""
        return {"trainer": os.getpid()} | {f"rank {n}": rank.pid for n, rank in enumerate(self._ranks)}

    def publish(self, kind: OfferKind, verify: bool, transfer_mode: str = "ipc") -> float:
        """One round of new content; seconds from the call to the last commit."""
        self._change()
        publisher, offers = self._made[transfer_mode].publisher, self._made[transfer_mode].offers
        publisher.settings = PublisherSettings(offer=kind, verify=verify, timeout_s=WAIT_S)
        began_s = time.monotonic()
        report = publisher.publish(self._label)
        took_s = time.monotonic() - began_s
        if (report.offer, report.verified, report.unchanged) != (kind, verify, False):
            raise RuntimeError(f"asked for a {kind} round, got {report}")
        if transfer_mode == "ipc" and kind != "ring":
            self._readable = offers.current
        return took_s

    def iterated(self) -> dict[str, Any]:
        """Rounds of the same tensors from an iterator, beside frozen ones."""
        return bench_iterators(
            self.shared,
            self._addresses,
            Path(self._config["secret"]).parent,
            rounds=self._settings.rounds,
            frozen_round=lambda: self.publish("frozen", verify=True),
            change=self._change,
        )

    def _change(self) -> None:
        self._label += 1
        change(self.shared, self._label)

    def sharded(self) -> list[float]:
        """Verified rounds of the same tensors from two ranks of a trainer; seconds of each."""
        return sharded_rounds(self._config, self._settings.rounds)

    def limit(self) -> float:
        """All ranks at once copy their share from the arena that was offered last; from the first's start to the last's end."""
        deadline = Deadline.after(WAIT_S)
        offer = msgspec.to_builtins(self._readable)
        for rank in self._ranks:
            rank.line.send(do="limit", offer=offer)
        for rank in self._ranks:
            rank.line.receive(deadline)
        for rank in self._ranks:
            rank.line.send(go=True)
        spans = [rank.line.receive(deadline)["span"] for rank in self._ranks]
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    def check(self) -> None:
        """Check that the ranks serve, bit for bit, what the trainer holds."""
        layouts = [
            layout_of(gather(parameters(self._specs, rank, self._settings.ranks)))
            for rank in range(self._settings.ranks)
        ]
        for first in range(0, len(self._ranks), self._settings.ranks):
            self._check(self._ranks[first : first + self._settings.ranks], layouts)

    def _check(self, ranks: list[BenchProcess], layouts: list[Layout]) -> None:
        """One replica's."""
        for rank in ranks:
            rank.line.send(do="digest")
        digest_sums, lanes = DigestSums(layouts), []
        for rank, layout in zip(ranks, layouts, strict=True):
            answers = rank.line.receive(Deadline.after(WAIT_S))["lanes"]
            lanes.append(lanes_from_bytes(bytes.fromhex(answers), len(layout.placements)))
        totals, torn = digest_sums.combine(lanes)
        expected = live_digest(self.shared, self._kernels, os.cpu_count() or 1)[
            digest_sums.sources(self.shared.manifest)
        ]
        differing = torn or digest_sums.differing(totals, expected)
        if differing:
            raise DigestMismatch(differing, "the benchmark's ranks")

    def reset_peaks(self) -> None:
        """Count extra memory from here: every process holds its weights, and no round has been."""
        self._resident = resident_bytes("VmRSS")
        reset_peak()
        for rank in self._ranks:
            rank.line.send(do="reset")
            rank.line.receive(Deadline.after(WAIT_S))

    def peaks(self) -> dict[str, int]:
        """By process: what a rank holds beyond its live weights, and a trainer beyond its parameters, at its peak."""
        figures = {"trainer": max(0, resident_bytes("VmHWM") - self._resident)}
        for number, rank in enumerate(self._ranks):
            rank.line.send(do="memory")
            figures[f"rank{number}"] = rank.line.receive(Deadline.after(WAIT_S))["peak_extra"]
        return figures


def change(shared: SharedModule, label: int) -> None:
    """New content, as an optimiser would leave it: something in every tensor."""
    for parameter in shared.module.parameters():
        parameter.view(-1)[0] = label % 128
