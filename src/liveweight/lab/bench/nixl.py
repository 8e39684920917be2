"""One-sided reads beside NIXL itself: the rates of staging, plain and verified, over that of one bare READ of the same bytes.

One source, a rank that reads everything, and two ranks that read a half each at once. Contenders take turns within every repetition, and
read into the same memory. Offers are live. The time covers binding, reading and, if verified, the rank's own digest: a round without its
messages.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from liveweight.devices.kernels import choose
from liveweight.errors import DigestMismatch
from liveweight.lab.bench.child_process import BenchProcess
from liveweight.lab.bench.model_shapes import decoder, module_of, parameters
from liveweight.lab.bench.nixl_rank import WAIT_S
from liveweight.lab.bench.nixl_rank import main as rank_main
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.offers.live import SharedModule, share_module
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.nixl.source import NixlSource
from liveweight.wire.credentials import load_or_create_secret
from liveweight.worker.targets.torch_layout import gather, layout_of

CONTENDERS = ("bare", "plain", "verified", "halves")


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings:
    """How many bytes are read, and how often."""

    size_gb: float = 0.5
    rounds: int = 8


def bench_nixl(settings: NixlSettings) -> dict[str, Any]:
    """Measure. DigestMismatch if the bytes read are not those that the source holds."""
    specs = decoder(int(settings.size_gb * 1e9))
    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        scene = _Scene(specs, stack)
        for name in CONTENDERS:
            scene.run(name)  # attaches, plans, registers and faults the memory in
        scene.check()
        for _ in range(settings.rounds):
            for name in CONTENDERS:
                taken[name].append(scene.run(name))
        scene.check()
    return _report(sum(spec.size_bytes for spec in specs), taken)


class _Scene:
    """A source in this process, and three ranks: one with everything, two with halves."""

    def __init__(self, specs: list[TensorSpec], stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-bench-")))
        secret = load_or_create_secret(directory / "secret")
        self._specs = specs
        self._shared: SharedModule = stack.enter_context(share_module(module_of(specs), SharedArena))
        transport_source = NixlSource(directory, secret, name="gdr")
        stack.callback(transport_source.close)
        self._offer = transport_source.offer(self._shared.layout, [self._shared.arena], "live")
        config = {"secret": str(directory / "secret"), "specs": msgspec.to_builtins(specs)}
        self._ranks = {
            (rank, world): stack.enter_context(
                BenchProcess(rank_main, config | {"rank": rank, "world": world})
            )
            for rank, world in ((0, 1), (0, 2), (1, 2))
        }
        for child in self._ranks.values():
            child.line.receive(Deadline.after(WAIT_S))
        stack.callback(self._stop)

    def run(self, name: str) -> float:
        """One contender: from the first rank's start to the last one's end."""
        world = 2 if name == "halves" else 1
        answers = self._request("plain" if name == "halves" else name, world)
        return float(max(one["span"][1] for one in answers) - min(one["span"][0] for one in answers))

    def check(self) -> None:
        """Check that the ranks have staged, bit for bit, what the source holds."""
        for world in (1, 2):
            layouts = [layout_of(gather(parameters(self._specs, rank, world))) for rank in range(world)]
            digest_sums = DigestSums(layouts)
            self._request("plain", world)  # a bare READ leaves the bytes in the source's order
            lanes = [
                lanes_from_bytes(bytes.fromhex(one["lanes"]), len(layout.placements))
                for one, layout in zip(self._request("digest", world), layouts, strict=True)
            ]
            totals, torn = digest_sums.combine(lanes)
            held = self._shared.digest(choose().kernels, os.cpu_count() or 1, self._shared.layout)
            differing = torn or digest_sums.differing(
                totals, held[digest_sums.sources(self._shared.manifest)]
            )
            if differing:
                raise DigestMismatch(differing, "the benchmark's ranks")

    def _request(self, what: str, world: int) -> list[dict[str, Any]]:
        ranks = [child for (_, of), child in self._ranks.items() if of == world]
        for child in ranks:
            child.line.send(do=what, offer=msgspec.to_builtins(self._offer))
        return [child.line.receive(Deadline.after(WAIT_S)) for child in ranks]

    def _stop(self) -> None:
        for child in self._ranks.values():
            child.line.send(do="stop")


def _report(size_bytes: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    best = {name: min(times) for name, times in taken.items()}
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "bytes": size_bytes,
        "cores": os.cpu_count(),
        "rounds": len(taken["bare"]),
        "rates_gb_s": {name: size_bytes / seconds / 1e9 for name, seconds in best.items()},
        **{f"{name}_s": {"best": best[name], "median": median[name]} for name in CONTENDERS},
        "plain_ratio": best["bare"] / best["plain"],
        "verified_ratio": best["bare"] / best["verified"],
        "two_rank_ratio": best["halves"] / best["plain"],
        "median_plain_ratio": median["bare"] / median["plain"],
        "median_verified_ratio": median["bare"] / median["verified"],
        "median_two_rank_ratio": median["halves"] / median["plain"],
    }
