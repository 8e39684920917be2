"""Rounds from a one-shot iterator beside frozen rounds of the same module: how long each takes, and what the trainer holds more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from liveweight.api import Publisher
from liveweight.lab.bench.child_process import reset_peak, resident_bytes
from liveweight.lab.bench.rounds.figures import figures_of
from liveweight.lab.bench.rounds.ipc_rank import WAIT_S
from liveweight.trainer.offers.live import SharedModule


def bench_iterators(
    shared: SharedModule,
    addresses: Sequence[str],
    directory: Path,
    *,
    rounds: int,
    frozen_round: Callable[[], float],
    change: Callable[[], None],
) -> dict[str, Any]:
    """Verified rounds of both kinds, alternating. `change` gives the module other content. The publisher of iterators has its own arena,
    which its first rounds make: the peak is counted over these and all others."""
    held = resident_bytes("VmRSS")
    reset_peak()
    with Publisher(
        engines=addresses, directory=directory, secret=directory / "secret", timeout_s=WAIT_S
    ) as publisher:

        def iterator_round(label: int) -> float:
            change()
            began_s = time.monotonic()
            report = publisher.publish(label, tensors=shared.module.named_parameters())
            took_s = time.monotonic() - began_s
            if (report.offer, report.verified, report.unchanged) != ("frozen", True, False):
                raise RuntimeError(f"asked for a round from an iterator, got {report}")
            return took_s

        for warm in range(2):  # both shadows of the ranks
            frozen_round()
            iterator_round(warm)
        frozen, iterated = [], []
        for number in range(rounds):
            frozen.append(frozen_round())
            iterated.append(iterator_round(number + 2))
        peak = resident_bytes("VmHWM") - held
    return {
        "frozen_s": figures_of(frozen),
        "iterator_s": figures_of(iterated),
        "of_frozen": min(iterated) / min(frozen),
        "median_of_frozen": statistics.median(iterated) / statistics.median(frozen),
        "peak_extra_bytes": max(0, peak),
    }
