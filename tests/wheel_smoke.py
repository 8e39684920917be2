"""Checks a wheel as a user without a compiler meets it: `python tests/wheel_smoke.py DIR`. Run by `make wheel`, outside pytest.

In a fresh environment with no compiler in reach, the wheel installs and its C kernels are the ones chosen. In a second one the
source tree is installed, equally without a compiler: NumPy's kernels are chosen, with a reason, and give the same digest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = "e5b452e3c2a109c1cc9da08d25cfa875"
"""The digest of 37 x 101 bfloat16 that tests/devices/test_digest_implementations.py commits."""

SMOKE = """
import sys
import numpy as np
import liveweight
from liveweight.devices.kernels import choose
from liveweight.devices.memory import Memory
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import to_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec

layout = packed([TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(37, 101))])
index = np.arange(37 * 101 * 2, dtype=np.int64)
memory = np.resize(((7 * index + index // 256) % 256).astype(np.uint8), layout.memories_bytes[0])
chosen = choose()
rows = plan_digests(layout).rows
lanes = chosen.kernels.bind_digest(rows, [Memory.from_array(memory)], 1).run(0, len(rows))
sys.stdout.write(f"{liveweight.__file__}\\n{chosen.name}\\n{chosen.reason or ''}\\n{to_hex(lanes[0])}\\n")
"""


def bare(folder: Path) -> dict[str, str]:
    """The environment of a machine without a compiler: a PATH of an empty folder, and a CC that fails."""
    (folder / "empty").mkdir(exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CFLAGS", "PYTHONPATH", "VIRTUAL_ENV")
    }
    return {
        **kept,
        "PATH": str(folder / "empty"),
        "CC": "/bin/false",
        "CXX": "/bin/false",
        "LDSHARED": "/bin/false",
    }


def install(folder: Path, what: str) -> list[str]:
    """Install into a fresh environment and run the smoke test there; the lines that it wrote."""
    environment = bare(folder)
    home = folder / "venv"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what]
    subprocess.run(command, env=environment, check=True, cwd=folder, timeout=600)
    run = [python, "-W", "error", "-c", SMOKE]
    done = subprocess.run(
        run, env=environment, check=True, cwd=folder, timeout=120, capture_output=True, text=True
    )
    subprocess.run(
        [str(home / "bin" / "liveweight"), "--version"], env=environment, check=True, cwd=folder, timeout=120
    )
    return done.stdout.splitlines()


def expect(what: str, holds: bool, found: object) -> None:
    """Say what holds, or end."""
    if not holds:
        sys.exit(f"wheel smoke: {what}: no, {found}")
    sys.stdout.write(f"wheel smoke: {what}\n")


def check_wheel(wheel: Path) -> None:
    """The wheel, where nothing could be compiled."""
    with tempfile.TemporaryDirectory() as name:
        file, kernels, reason, digest = install(Path(name), str(wheel))
        expect("it is the installed package that runs", file.startswith(name), file)
        expect(
            "the wheel's C kernels are chosen", kernels.startswith("native") and not reason, (kernels, reason)
        )
        expect("they give the golden digest", digest == GOLDEN, digest)


def check_source() -> None:
    """The source tree, where nothing could be compiled: a copy, so that nothing built lies in it."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        skip = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=skip)
        file, kernels, reason, digest = install(Path(name), str(tree))
        expect("the source installs without a compiler", file.startswith(name), file)
        expect(
            "NumPy's kernels are chosen, with a reason",
            kernels == "numpy" and bool(reason),
            (kernels, reason),
        )
        expect("they give the golden digest too", digest == GOLDEN, digest)


def main() -> None:
    """Check the one wheel in the folder that is given."""
    wheels = list(Path(sys.argv[1]).resolve().glob("liveweight-*.whl"))
    expect(
        "there is one wheel, for every Python from 3.11 on",
        len(wheels) == 1 and "-abi3-" in wheels[0].name,
        wheels,
    )
    check_wheel(wheels[0])
    check_source()


if __name__ == "__main__":
    main()
