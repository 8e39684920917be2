"""The nixl benchmark at a small size: every figure is there, and what was read is, bit for bit, what the source holds."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from liveweight.lab.bench.model_shapes import decoder
from liveweight.lab.bench.nixl import CONTENDERS, NixlSettings, bench_nixl


@pytest.mark.usefixtures("forked_python")
def test_a_small_run_has_every_figure() -> None:
    report = bench_nixl(NixlSettings(size_gb=0.01, rounds=1))
    assert report["bytes"] == sum(spec.size_bytes for spec in decoder(10_000_000))
    for name in CONTENDERS:
        assert 0 < report[f"{name}_s"]["best"] <= report[f"{name}_s"]["median"]
        assert report["rates_gb_s"][name] > 0
    for name in ("plain_ratio", "verified_ratio", "two_rank_ratio"):
        assert report[name] > 0
