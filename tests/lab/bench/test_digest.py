"""The digest's benchmark: its fields, and that its contenders do the work they are timed for. No times are judged here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from liveweight.cli import main
from liveweight.devices.kernels import choose_kernels
from liveweight.errors import DigestMismatch, MissingExtra
from liveweight.lab.bench.digest import bench_digest, contenders
from liveweight.lab.bench.digest_inputs import make_inputs

NAMES = [
    "memmove",
    "copy",
    "digest",
    "copy + digest",
    "torch cast",
    "cast",
    "cast + digest",
    "NumPy digest",
    "torch digest",
]


def test_every_contender_leaves_the_right_bytes_and_the_right_digest() -> None:
    inputs = make_inputs(1)
    named = contenders(inputs, choose_kernels())
    assert list(named) == NAMES
    for name, (run, size_bytes) in named.items():
        inputs.target[...] = 0
        inputs.check(name, run())
        assert size_bytes == (inputs.floats if "cast" in name else inputs.words).nbytes


@pytest.mark.parametrize("name", NAMES)
def test_a_contender_that_did_nothing_is_caught(name: str) -> None:
    inputs = make_inputs(1)
    with pytest.raises(DigestMismatch, match="benchmark"):
        inputs.check(name, np.zeros(4, dtype=np.uint32))


def test_ratios_are_of_best_times_of_one_run() -> None:
    cores = os.sched_getaffinity(0)
    report = bench_digest(size_mb=1, repeats=3)
    assert os.sched_getaffinity(0) == cores
    best = {name: timing.best_s for name, timing in report.timings.items()}
    assert report.c_ratio == best["memmove"] / best["digest"]
    assert report.fused_ratio == best["copy + digest"] / best["memmove"]
    assert report.own_c_ratio == best["copy"] / best["digest"]
    assert report.own_fused_ratio == best["copy + digest"] / best["copy"]
    assert report.cast_ratio == best["cast + digest"] / min(best["cast"], best["torch cast"])
    for timing in report.timings.values():
        assert timing.best_s <= timing.median_s
        assert timing.best_gb_s >= timing.median_gb_s > 0


@pytest.mark.parametrize("to_file", [False, True])
def test_the_command_writes_json(tmp_path: Path, to_file: bool) -> None:
    path = str(tmp_path / "report.json") if to_file else "-"
    result = CliRunner().invoke(
        main.app, ["bench", "digest", "--size-mb", "1", "--repeats", "2", "--json", path]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(Path(path).read_text(encoding="utf-8") if to_file else result.stdout)
    assert {"c_ratio", "fused_ratio", "cast_ratio", "kernels", "cores", "size_mb"} <= set(report)
    assert list(report["timings"]) == NAMES
    for timing in report["timings"].values():
        assert {"best_gb_s", "median_gb_s", "best_s", "median_s"} <= set(timing)
    if to_file:
        assert "c_ratio" in result.stdout


def test_without_torch_the_benchmark_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'liveweight\[torch\]'"):
        bench_digest(size_mb=1, repeats=1)


def test_the_program_prints_its_version_and_its_errors_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("liveweight ")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["liveweight", "bench", "digest", "--size-mb", "1"])
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("LW-501 ")
