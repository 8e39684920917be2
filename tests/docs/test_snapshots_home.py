"""`lw.snapshots` is the one place that docs/snapshots.md imports from."""

from __future__ import annotations

import re

import liveweight as lw
from tests.arch.source_tree import ROOT


def test_the_page_imports_snapshots_from_their_public_home_alone() -> None:
    page = (ROOT / "docs" / "snapshots.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"^(?:from|import) (liveweight[\w.]*)", page, flags=re.MULTILINE))
    assert modules == {"liveweight", "liveweight.snapshots"}
    imported = re.search(r"^from liveweight\.snapshots import (.+)$", page, flags=re.MULTILINE)
    assert imported is not None
    assert set(imported[1].split(", ")) <= set(lw.snapshots.__all__)
    assert set(re.findall(r"lw\.snapshots\.(\w+)", page)) <= set(lw.snapshots.__all__)
