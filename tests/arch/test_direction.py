"""Dependencies point one way: each part of the layout imports only what stands left of it."""

from __future__ import annotations

import pytest

from tests.arch.source_tree import PACKAGE, ROOT, Source, imports, part_of, source, sources

ORDER = (
    "errors < spec | observe < plan | wire | devices < transports | checkpoint < rounds | snapshots < worker | trainer "
    "< engine < server < integrations < api < integrations.trl | lab < cli"
)
PLACE = {part: i for i, group in enumerate(ORDER.split(" < ")) for part in group.split(" | ")}


def imported_part(name: str) -> str | None:
    """The part that an imported name belongs to; None for other packages."""
    if name.partition(".")[0] != PACKAGE:
        return None
    part = part_of(name)
    return part if part in PLACE else "api"  # `from liveweight import Publisher` asks the package itself


def violations(file: Source) -> list[str]:
    if file.part not in PLACE:
        return [f"{file.path}: {file.part} has no place in the layout's order"]
    found = []
    for node, name in imports(file):
        part = imported_part(name)
        if part is not None and part != file.part and PLACE[part] >= PLACE[file.part]:
            found.append(file.at(node, f"{file.part} imports {name} of {part}"))
    return found


def test_every_part_imports_only_what_stands_left_of_it() -> None:
    assert [violation for file in sources() for violation in violations(file)] == []


def test_the_rule_sees_the_imports_that_are_there() -> None:
    seen = {(file.part, imported_part(name)) for file in sources() for _, name in imports(file)}
    assert {("spec", "errors"), ("observe", "errors"), ("observe", "observe")} <= seen


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_pages_draw_the_same_order(page: str) -> None:
    assert ORDER in (ROOT / page).read_text(encoding="utf-8").replace("\n", " ")


WRONG = {
    "a part to the right": ("liveweight/spec/a.py", "import liveweight.wire.channel"),
    "a neighbour": ("liveweight/spec/a.py", "from liveweight.observe.bus import Bus"),
    "the other neighbour": ("liveweight/plan/a.py", "from liveweight.devices import cpu"),
    "a name of the package": ("liveweight/wire/a.py", "from liveweight import Publisher"),
    "the package": ("liveweight/wire/a.py", "import liveweight"),
    "a part as a name": ("liveweight/wire/a.py", "from liveweight import plan"),
    "relative": ("liveweight/plan/a.py", "from ..worker.round import Round"),
    "relative, from a folder": ("liveweight/plan/__init__.py", "from ..worker import round"),
    "relative, two up": ("liveweight/plan/deep/a.py", "from ...worker import round"),
    "for types only": (
        "liveweight/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import liveweight.spec.dtype",
    ),
    "inside a function": ("liveweight/api.py", "def f():\n    from liveweight.cli.main import run"),
    "by name": ("liveweight/spec/a.py", "import importlib\nimportlib.import_module('liveweight.wire')"),
    "by relative name": ("liveweight/spec/a.py", "import_module('..wire', __package__)"),
    "by dunder": ("liveweight/spec/a.py", "__import__('liveweight.wire')"),
    "the package's own file": ("liveweight/__init__.py", "import liveweight.cli"),
    "without a place": ("liveweight/tools/a.py", "import os"),
    "a module without a place": ("liveweight/stuff.py", "import os"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_import_is_found(case: str) -> None:
    path, text = WRONG[case]
    assert len(violations(source(path, text))) == 1


RIGHT = {
    "to the left": (
        "liveweight/worker/a.py",
        "from liveweight.transports import ipc\nimport liveweight.errors",
    ),
    "its own part": ("liveweight/spec/a.py", "from liveweight.spec.dtype import DType\nfrom . import region"),
    "relative, in a folder": (
        "liveweight/spec/__init__.py",
        "from .dtype import DType\nfrom ..errors import Torn",
    ),
    "others": ("liveweight/spec/a.py", "import os\nimport liveweighty.wire"),
    "the package asks api": ("liveweight/__init__.py", "from liveweight.api import Publisher"),
    "cli asks all": ("liveweight/cli/main.py", "import liveweight\nimport liveweight.lab.bench.digest"),
    "run as a program": ("liveweight/__main__.py", "from liveweight.cli.main import run"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_import_passes(case: str) -> None:
    path, text = RIGHT[case]
    assert violations(source(path, text)) == []
