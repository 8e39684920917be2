"""`import liveweight` is light: it loads nothing that a user of one part does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source_tree import PACKAGE, SRC

HEAVY = {"torch", "zmq", "nixl", "numpy", "prometheus_client", "vllm"}


def loaded_by(package: str, *search: Path) -> tuple[str | None, set[str]]:
    """Where a fresh interpreter found the package, and the top-level modules that importing it loaded."""
    code = f"import json, sys, {package} as p; sys.stdout.write(json.dumps([p.__file__, list(sys.modules)]))"
    path = ":".join(str(folder) for folder in search)
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True, capture_output=True, timeout=60
    )
    file, modules = json.loads(run.stdout)
    return file, {module.partition(".")[0] for module in modules}


def test_importing_the_package_loads_nothing_heavy() -> None:
    file, modules = loaded_by(PACKAGE, SRC)
    assert file == str(SRC / PACKAGE / "__init__.py")
    assert modules & HEAVY == set()


@pytest.mark.parametrize("heavy", sorted(HEAVY))
def test_a_package_that_loads_something_heavy_is_found(heavy: str, tmp_path: Path) -> None:
    (tmp_path / f"{heavy}.py").write_text("")
    (tmp_path / "eager.py").write_text(f"def f():\n    import {heavy}\nf()\n")
    assert heavy in loaded_by("eager", tmp_path)[1] & HEAVY
