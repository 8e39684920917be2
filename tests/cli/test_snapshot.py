"""`liveweight snapshot` as a user runs it: on a model directory, at several layouts, and on directories that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from liveweight.cli import main
from liveweight.engine.models.forward import Solo
from liveweight.engine.models.model import build
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.rank.checkpoint_loading import load
from liveweight.errors import LiveWeightError
from liveweight.lab.bench.snapshot import SnapshotSettings, bench_snapshot
from liveweight.transports.snapshot.restore import RestoreResult, restore
from liveweight.worker.targets.torch_target import module_target


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main.app, ["snapshot", *map(str, arguments)])
    if isinstance(result.exception, LiveWeightError):
        assert code == 1
        return f"{result.exception.code} {result.exception}"
    assert result.exit_code == code, result.output
    return result.output


def told(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    mtp = ["--mtp"] if request.param == "qwen3" else []
    made = CliRunner().invoke(main.app, ["init-model", str(directory), "--arch", request.param, *mtp])
    assert made.exit_code == 0
    return directory


def test_any_number_of_ranks_exports_to_the_checkpoint_it_was_saved_from(model: Path, tmp_path: Path) -> None:
    original, digests = load_file(model / "model.safetensors"), set()
    for tp in (1, 2):
        saved = told("save", model, tmp_path / "store", "--version", f"tp_{tp}", "--tp", tp)
        assert (saved["ranks"], saved["version"]["label"]) == (tp, f"tp_{tp}")
        digests.add(saved["version"]["digest"])
        out = tmp_path / f"out_{tp}"
        run("export", saved["path"], out, "--like", model, "--shard-mb", 1)
        found: dict[str, torch.Tensor] = {}
        for file in out.glob("*.safetensors"):
            found |= load_file(file)
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
        assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert len(digests) == 1


@pytest.mark.parametrize(("tp", "into"), [(1, 2), (2, 1), (2, 2)])
def test_an_engines_ranks_restore_what_other_ranks_hold(
    model: Path, tmp_path: Path, tp: int, into: int
) -> None:
    class Seat(Solo):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, into

    saved = told("save", model, tmp_path / "store", "--version", "x", "--tp", tp)
    spec = ModelSpec.read(model)
    for rank in range(into):
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "draft": True}
        wanted, found = (build(spec, Seat(rank), **options) for _ in range(2))
        load(wanted, model)
        target = module_target(found, found.pieces())
        report = restore(Path(saved["path"]), target.layout, target.live(), rank=rank)
        assert isinstance(report, RestoreResult) and report.verified
        for name, parameter in wanted.named_parameters():
            assert torch.equal(parameter, found.get_parameter(name))


def test_list_inspect_verify_and_prune_say_what_there_is(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for label in ("a", "b", "c/d"):
        run("save", model, store, "--version", label, "--part-mb", 1)
    (store / "000004-dead").mkdir()
    (store / "000004-dead" / ".writing").touch()
    assert [entry["path"].rpartition("/")[2] for entry in told("list", store)] == [
        *("000001-a", "000002-b", "000003-c_d", "000004-dead"),
    ]
    assert "000004-dead: not complete: its writer is gone" in run("list", store)
    facts = told("inspect", store)
    assert facts["version"]["label"] == "c/d"
    assert facts["ranks"][0]["parts"][0]["file"] == "model_state.tp0.0.part0.pdparams"
    assert "model.embed_tokens.weight" in run("inspect", store)
    assert told("verify", store / "000001-a")["verified"] is True
    assert "are as they were written" in run("verify", store)
    pruned = told("prune", store, "--keep", 1)
    assert (len(pruned["removed"]), pruned["in_use"]) == (3, [])
    assert len(told("list", store)) == 1


def test_what_is_wrong_is_one_line_and_exit_code_1(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert "LW-110 no complete snapshot" in run("verify", store, code=1)
    saved = Path(told("save", model, store, "--version", "a")["path"])
    part = saved / "model_state.tp0.0.part0.pdparams"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    for command in (("verify", store), ("export", store, tmp_path / "out")):
        assert "LW-404" in run(*command, code=1)
    assert not (tmp_path / "out").exists()
    assert "LW-102" in run("save", tmp_path, store, "--version", "b", code=1)
    assert "LW-702" in run("save", model, store, "--version", "b", "--tp", 7, code=1)
    run("prune", store, "--keep", 0, code=2)


def test_help_has_an_example_for_every_command() -> None:
    for command in ("save", "list", "inspect", "verify", "export", "prune"):
        assert "liveweight snapshot" in " ".join(run(command, "--help").split())


def test_the_benchmark_has_every_figure(tmp_path: Path) -> None:
    report = bench_snapshot(
        SnapshotSettings(size_gb=0.001, rounds=1, part_bytes=64 << 20, directory=tmp_path)
    )
    for name in ("save_ratio", "restore_ratio", "save_s", "save_file_s", "restore_s", "load_s"):
        assert name in report
    assert report["parts"] == len(range(0, report["bytes"], 64 << 20)) or report["parts"] > 1
    assert report["peak_extra_bytes"] < report["part_bytes"] * 1.1
    assert list(tmp_path.iterdir()) == []
