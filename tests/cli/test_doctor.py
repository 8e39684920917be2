"""`liveweight doctor`: it finds what is there, names what is not with the line that fixes it, and never fails for what it finds."""

from __future__ import annotations

import json
import resource
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from liveweight.cli.commands import doctor
from liveweight.cli.main import app
from liveweight.errors import MissingExtra


def told(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *options])
    return result.exit_code, result.stdout


def test_every_question_is_answered_and_what_is_not_ok_has_its_fix() -> None:
    code, text = told("--json")
    findings = json.loads(text)["findings"]
    assert code == 0
    assert [f["name"] for f in findings] == [
        *("shared memory", "kernels", "descriptors", "gloo", "GPUs", "CUDA IPC"),
        *("NIXL", "NIXL backends", "RDMA devices", "locked memory", "process reads"),
    ]
    for finding in findings:
        assert finding["found"]
        assert (finding["state"] == "ok") == (finding["fix"] is None)


def test_the_lines_say_the_same_as_the_json() -> None:
    _, text = told()
    for finding in doctor.examine():
        assert any(line.startswith(finding.state) and finding.name in line for line in text.splitlines())


def test_without_nixl_the_pip_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError("nixl")

    def not_there() -> None:
        raise MissingExtra("transfer over NIXL (gdr, rdma)", "nixl")

    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr("liveweight.transports.nixl.library.load", not_there)
    for finding in (doctor.nixl(), doctor.nixl_backend()):
        assert (finding.state, finding.fix) == ("limited", "pip install 'liveweight[nixl]'")


def test_few_descriptors_are_told_with_the_line_that_gives_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    assert doctor.descriptors().fix == "ulimit -n 65536"


def test_rdma_devices_are_listed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path / "none")
    assert doctor.rdma_devices().state == "limited"
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path)
    assert doctor.rdma_devices().found == "mlx5_0, mlx5_1"


@pytest.mark.parametrize(("scope", "state"), [("0", "ok"), ("3", "limited")])
def test_restricted_reads_between_processes_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, state: str
) -> None:
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(doctor, "PTRACE", tmp_path / "scope")
    assert doctor.reads_between_processes().state == state


def test_memory_that_cannot_be_sealed_breaks_everything_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = doctor.Finding(name="shared memory", state="broken", found="no", fix="yes")
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    assert told()[0] == 1
