"""docs/python.md lists what `lw` offers: every name, argument, method, field and metric."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import liveweight as lw
from liveweight.rounds.fleet import Fleet, ReplicaStatus
from liveweight.rounds.report import FailedMode, ReplicaReport
from tests.arch.source_tree import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def code(text: str) -> str:
    """What stands between backticks."""
    return "\n".join(re.findall(r"`([^`\n]+)`", text))


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def says(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w/.]){re.escape(name)}(?![\w/])", code(text)) is not None


def absent(text: str, names: list[str]) -> list[str]:
    return [name for name in names if not says(text, name)]


def public(kind: type) -> list[str]:
    return [name for name, member in inspect.getmembers(kind) if callable(member) and name[0] != "_"]


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_the_page_has_every_name_of_the_package_and_no_other() -> None:
    assert absent(section("Names"), [f"lw.{name}" for name in lw.__all__]) == []
    named = set(re.findall(r"\blw\.(\w+)", PAGE))
    assert named <= set(lw.__all__)


def test_every_exported_name_can_be_had() -> None:
    for name in lw.__all__:
        assert getattr(lw, name) is not None
    assert lw.Secret.generate() != lw.Secret.generate()


@pytest.mark.parametrize("kind", [lw.Publisher, lw.Receiver], ids=lambda kind: kind.__name__)
def test_the_page_has_every_method_and_argument(kind: type) -> None:
    text = section(kind.__name__)
    assert absent(text, [*public(kind), *list(inspect.signature(kind).parameters)]) == []


def test_the_page_has_every_field_and_metric_of_a_report_and_of_a_fleet() -> None:
    text = section("Report")
    assert absent(text, [*fields(lw.Report), *fields(ReplicaReport), *fields(FailedMode), "behind"]) == []
    version = lw.Version(run="r", label=1)
    report = lw.Report(
        version=version,
        mode="ipc",
        offer="frozen",
        verified=True,
        unchanged=False,
        replicas=(),
        staleness=0,
        size_bytes=0,
        total_s=0.0,
        freeze_s=0.0,
        digest_s=0.0,
        vote_s=0.0,
        commit_s=0.0,
    )
    assert absent(text, list(report.metrics())) == []
    assert set(re.findall(r"weight_sync/\w+", PAGE)) == set(report.metrics())
    assert absent(section("Publisher"), [*fields(Fleet), *fields(ReplicaStatus)]) == []


def test_a_name_that_is_not_there_is_found_out() -> None:
    assert absent(section("Publisher"), ["publish", "publishes", "lish"]) == ["publishes", "lish"]
