"""The comparisons at a small size: every contender moved every byte, and one that left some out would be noticed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from liveweight.cli.main import app
from liveweight.errors import DigestMismatch
from liveweight.lab.bench.engine.idle import ENGINES, IdleSettings, bench_idle, paired
from liveweight.lab.bench.model_shapes import module_of, small_tensors
from liveweight.lab.bench.peers.contender import PeerShare, buckets
from liveweight.lab.bench.peers.peers import OURS, PeersSettings, _Check, bench_peers, compared
from liveweight.lab.bench.peers.rank import METHODS, lanes_of
from liveweight.lab.bench.report import write_report
from liveweight.lab.bench.rounds.growth import GrowthSettings, bench_growth, exponent
from liveweight.trainer.offers.live import share_module
from liveweight.transports.ipc.arena import SharedArena

RANKS = 2


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_python")
def test_every_contender_takes_part_or_is_said_to_be_absent() -> None:
    report = bench_peers(PeersSettings(size_gb=0.01, ranks=RANKS, rounds=2, tensors=60))
    rows, absent = report["contenders"], report["absent"]
    wanted = {method.name for method in METHODS} | ({"ray"} - set(absent))
    assert wanted <= set(rows)
    assert len(set(rows) - wanted) == sum(mode not in absent for mode, _, _ in OURS)
    assert ("ray" in absent) == (find_spec("ray") is None)
    for row in rows.values():
        assert row["ok"]
        assert 0 < row["best_s"] <= row["median_s"]
    assert {name for name, row in rows.items() if row["verified"]} <= {
        name for name in rows if name.endswith("_verified")
    }
    assert 0 < report["speedup_best"] <= report["speedup_median"]
    assert report["limit_s"] > 0


def test_the_report_has_the_figures_and_says_what_is_absent(tmp_path: Path) -> None:
    row = {"stands_for": "it", "group": "ours", "best_s": 0.5, "median_s": 0.75, "verified": True, "ok": True}
    ratios = dict.fromkeys(
        ("of_in_place", "over_copies_twice", "verified_of_copies_twice", "speedup_best", "speedup_median"),
        1.5,
    )
    figures = {"bytes": 10**9, "tensors": 3, "ranks": 2, "rounds": 5, "limit_s": 0.25}
    found = {**figures, **ratios, "contenders": {"one": row}, "absent": {"ray": "not installed"}}
    text = write_report(tmp_path, {"peers": found}, "liveweight bench all").read_text()
    assert "| one | it | 500 | 750 | 2.00 | yes |" in text
    assert "Absent: ray, not installed." in text
    assert "`liveweight bench all`" in text
    assert "## Growth" not in text
    assert (tmp_path / "peers.png").exists() == (find_spec("matplotlib") is not None)


def test_a_report_that_is_drawn_again_tells_where_its_figures_were_measured(tmp_path: Path) -> None:
    times = {"best": 0.2, "median": 0.5}
    rates = {"rates_gb_s": {"bare": 2.0}, "plain_ratio": 0.95, "verified_ratio": 0.9, "two_rank_ratio": 0.8}
    measured: dict[str, dict[str, Any]] = {
        "run": {"command": "liveweight bench all --scale 0.5", "machine": "Another machine, 64 cores."},
        "nixl": {**rates, "bare_s": times},
        "ipc": {
            "bytes": 10**9,
            "ranks": 2,
            "limit_s": 0.1,
            "limit_median_s": 0.2,
            "ring_bytes": 100,
            "ring_peak_extra_bytes": 105,
            "rounds": {"live": {"plain_s": times}},
        },
        "snapshot": {
            "sizes": [
                dict.fromkeys(("save_s", "save_file_s", "restore_s", "load_s"), times)
                | {"bytes": 10**9, "save_ratio": 1.0, "restore_ratio": 1.1, "peak_extra_bytes": 5_000_000}
            ]
        },
    }
    for name, found in measured.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    result = CliRunner().invoke(app, ["bench", "all", "--render", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "REPORT.md").read_text()
    assert "`liveweight bench all --scale 0.5`\n\nAnother machine, 64 cores." in text
    assert "| live plain | 200 | 500 | 2.00 | 2.50 |" in text
    assert "| bare | 2.00 | 200 |" in text
    assert "| 1.00 | 200 | 200 | 200 | 200 | 1.00 | 1.10 | 5.0 |" in text


def test_a_contender_that_leaves_a_tensor_out_is_noticed() -> None:
    specs = small_tensors(2_000_000, 12)
    with share_module(module_of(specs), SharedArena) as shared:
        check = _Check(SimpleNamespace(shared=shared), specs, RANKS)  # type: ignore[arg-type]
        shares = [PeerShare(specs, rank, RANKS) for rank in range(RANKS)]
        weights = dict(shared.module.named_parameters())
        for share in shares:
            share.clear()
            for spec in specs[:-1]:
                share.take(spec.name, weights[spec.name])
        with pytest.raises(DigestMismatch, match=specs[-1].name):
            check.same([lanes_of(share) for share in shares], "the lazy one")
        for share in shares:
            share.take(specs[-1].name, weights[specs[-1].name])
        check.same([lanes_of(share) for share in shares], "the diligent one")
        check.change()
        with pytest.raises(DigestMismatch):
            check.same([lanes_of(share) for share in shares], "one who missed the last step")


def test_buckets_hold_every_tensor_once_and_one_that_is_too_large_alone() -> None:
    specs = small_tensors(100_000, 9)
    for limit in (1, specs[0].size_bytes * 2, 1 << 30):
        found = buckets(specs, limit)
        assert [spec for bucket in found for spec, _ in bucket] == specs
        for bucket in found:
            assert len(bucket) == 1 or bucket[-1][1] + bucket[-1][0].size_bytes <= limit
            assert [at for _, at in bucket] == [n * specs[0].size_bytes for n in range(len(bucket))]


def test_only_those_that_stand_apart_enter_the_speedups() -> None:
    groups = {"ipc_live_plain": "ours", "ipc_live_verified": "ours", "q": "in place", "z": "copies twice"}
    rows = {name: {"group": group, "best_s": 1.0} for name, group in groups.items()}
    rows |= {f"a{n}": {"group": "apart", "best_s": float(n)} for n in (3, 5, 10)}
    found = compared(rows)
    assert (found["speedup_best"], found["speedup_median"]) == (3.0, 5.0)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_python")
def test_growth_has_every_axis_and_an_exponent() -> None:
    report = bench_growth(
        GrowthSettings(
            sizes_gb=(0.24,),
            tensors=(20, 200),
            ranks=(1,),
            replicas=(2,),
            base_gb=0.01,
            tensors_gb=0.01,
            rounds=1,
        )
    )
    assert [point["at"] for point in report["axes"]["replicas"]] == [2]
    assert [point["tensors"] for point in report["axes"]["tensors"]] == [20, 200]
    assert set(report["exponents"]) == set(report["axes"])


def test_an_exponent_is_that_of_the_power_law() -> None:
    places = [1.0, 2.0, 4.0, 8.0]
    assert exponent(places, [3 * place**1.5 for place in places]) == pytest.approx(1.5)
    assert exponent(places, [7.0] * 4) == pytest.approx(0.0)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_python")
def test_live_updates_add_no_collective_and_meeting_in_every_step_does() -> None:
    report = bench_idle(IdleSettings(size="tiny", turns=3, steps=4))
    assert report["extra_collectives"] == 0
    counts = report["collectives_per_step"]
    assert counts["broadcast"] == pytest.approx(counts["off"] + 1)
    assert counts["barrier"] == pytest.approx(counts["off"] + 2)
    assert all(report["step_s"][name] > 0 for name in ENGINES)


def test_an_interval_of_paired_differences_encloses_their_median() -> None:
    found = paired([0.01, 0.02, 0.03, 0.02, 5.0], 1.0)
    assert found["low"] <= found["difference"] == 0.02 <= found["high"]
    assert paired([0.5] * 9, 1.0) == {"difference": 0.5, "low": 0.5, "high": 0.5}
