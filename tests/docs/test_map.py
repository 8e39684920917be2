"""The maps of the source, in CONTRIBUTING.md and docs/architecture.md: every file and folder that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.source_tree import PACKAGE, ROOT, SRC

PACKAGE_ROOT = SRC / PACKAGE


def table_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows below a heading."""
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading))
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def missing(paths: list[str], root: Path = PACKAGE_ROOT) -> list[str]:
    """Paths that name nothing. A bare file name belongs to the folder of the path before it."""
    absent, folder = [], root
    for path in paths:
        at = root / path
        if "/" in path:
            folder = (root / path).parent
        elif not at.exists():
            at = folder / path
        found = path.startswith("native/") and (ROOT / path).exists()
        if not found and not list(at.parent.glob(at.name)):
            absent.append(path)
    return absent


def test_the_table_of_contributing_names_what_exists() -> None:
    rows = table_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "To change X, open Y")
    assert len(rows) >= 20
    named = [re.findall(r"`([\w/*.]+(?:\.py|\.c|/))`", row[1]) for row in rows]
    assert [row for row, paths in zip(rows, named, strict=True) if not paths] == []
    assert [path for paths in named for path in missing(paths)] == []


def test_the_diagram_of_a_round_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (diagram,) = re.findall(r"^```mermaid\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    paths = re.findall(r"[\w/]+\.py", diagram)
    assert len(set(paths)) >= 15
    assert missing(paths) == []
    assert ";" not in diagram  # it ends a statement of Mermaid's


def test_every_folder_of_the_package_is_in_the_table() -> None:
    rows = table_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), "Folders")
    named = {row[0].strip("`").rstrip("/") for row in rows}
    there = {
        path.name
        for path in PACKAGE_ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == there - {"__init__.py"}


@pytest.mark.parametrize("path", ["rounds/coordinato.py", "lab/nothing/", "publisher.py"])
def test_a_path_that_names_nothing_is_found(path: str) -> None:
    assert missing([path]) == [path]
    assert missing(["trainer/publisher.py", "settings.py", "devices/*_kernels.py", "rounds/leader/"]) == []
