"""The lineage page: every test that it names exists, and every finding has its row."""

from __future__ import annotations

import ast
import re

from tests.arch.source_tree import ROOT

PAGE = ROOT / "docs" / "lineage.md"
NAMED = re.compile(r"`(test_[a-z0-9_]+)`")
FINDINGS = 51


def known_tests() -> set[str]:
    """Every function of the suites that is a test."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


def rows() -> list[list[str]]:
    """The cells of every row but the headings."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("seed", "no.")]


def test_every_test_that_is_named_exists() -> None:
    named = set(NAMED.findall(PAGE.read_text(encoding="utf-8")))
    assert len(named) > FINDINGS
    assert sorted(named - known_tests()) == []


def test_every_finding_and_every_seed_has_its_row() -> None:
    firsts = [row[0] for row in rows()]
    assert [int(first) for first in firsts if first.isdigit()] == list(range(1, FINDINGS + 1))
    assert {first for first in firsts if not first.isdigit()} == {"#7472", "#7951", "#7833", "#7545", "#6852"}


def test_every_row_names_a_test() -> None:
    assert [row for row in rows() if len(row) != 4 or not NAMED.search(row[3])] == []
