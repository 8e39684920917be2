"""The ipc benchmark at a small size: every figure is there, every contender did its work, bit for bit."""

from __future__ import annotations

import pytest

from liveweight.lab.bench.model_shapes import decoder, parameters, small_tensors
from liveweight.lab.bench.rounds.ipc import CONTENDERS, IpcSettings, bench_ipc
from liveweight.plan.digest_sums import DigestSums
from liveweight.transports.packing_source import RingSettings
from liveweight.worker.targets.torch_layout import gather, layout_of


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_of_the_benchmark_own_the_whole_decoder_between_them(world: int) -> None:
    specs = decoder(1)
    layouts = [layout_of(gather(parameters(specs, rank, world))) for rank in range(world)]
    counts = DigestSums(layouts)  # refuses regions that overlap in part, or leave elements to nobody
    assert {spec.name for spec in counts.expected} == {spec.name for spec in specs}


@pytest.mark.usefixtures("forked_python")
def test_a_small_run_has_every_figure() -> None:
    report = bench_ipc(IpcSettings(size_gb=0.01, ranks=2, rounds=2, tensors=200))
    assert report["tensors"] == 200
    assert report["bytes"] == sum(spec.size_bytes for spec in small_tensors(10_000_000, 200))
    for kind, verify in CONTENDERS:
        times = report["rounds"][kind]["verified_s" if verify else "plain_s"]
        assert 0 < times["best"] <= times["median"]
    assert report["rounds"]["fsdp2"]["verified_s"]["best"] > 0
    assert report["ratios"]["fsdp2_of_frozen"] > 0
    assert report["iterator"]["of_frozen"] > 0
    assert report["iterator"]["iterator_s"]["best"] > 0
    for name in ("limit_s", "cast_copy_s", "freeze_s", "cold_s"):
        assert report[name] > 0
    assert report["ring_bytes"] == RingSettings().size_bytes
    assert report["median_ratios"].keys() <= report["ratios"].keys()
    assert report["ring_peak_extra_bytes"] >= report["ring_bytes"]
    assert set(report["peak_extra_bytes"]) == {"trainer", "rank0", "rank1"}


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("tensors", [4_000, pytest.param(40_000, marks=pytest.mark.soak)])
def test_thousands_of_small_tensors_make_a_round(tensors: int) -> None:
    report = bench_ipc(
        IpcSettings(size_gb=0.0103, ranks=2, rounds=1, tensors=tensors, cast=False, sharded=False)
    )
    assert report["tensors"] == tensors
