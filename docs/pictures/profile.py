"""Draws docs/pictures/profile.png: where a verified round's processor time goes, by process. `make profile`; py-spy looks.

Live offers of 1.4 GB over shared memory to two ranks, again and again, for some seconds. Prints the same figures as a table.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure

from liveweight.lab.bench.model_shapes import decoder
from liveweight.lab.bench.report import table
from liveweight.lab.bench.rounds.ipc import IpcSettings, Scene

SIZE_GB, SECONDS, RATE = 1.4, 20, 100
KINDS = {
    "digest of the source": ("trainer/offers/live.py", "devices/copy_ranges.py"),
    "copy into the shadow": ("transports/ipc/reader.py", "worker/staging.py"),
    "digest of the shadow": ("worker/shadow_digest.py", "worker/verifying.py"),
    "exchange": ("worker/targets/swap.py", "worker/commit.py"),
    "messages": ("liveweight/wire/", "rounds/boundary.py", "zmq/"),
}
"""What a sample counts as: the first kind that a frame of its stack belongs to, from the innermost on."""
REST = "the rest"


def main() -> None:
    """Run rounds under py-spy, draw, and print."""
    spy = shutil.which("py-spy") or sys.exit("py-spy is not installed: pip install py-spy")
    with Scene(decoder(int(SIZE_GB * 1e9)), IpcSettings(size_gb=SIZE_GB)) as scene, _directory() as place:
        for _ in range(3):  # to either shadow of the ranks, and once warm
            scene.publish("live", verify=True)
        limit_s = min(scene.limit() for _ in range(5))
        files = {name: Path(place) / name for name in scene.processes}
        look = [spy, "record", "--nonblocking", f"--duration={SECONDS}", f"--rate={RATE}", "--format=raw"]
        looking = [
            subprocess.Popen(
                [*look, f"--pid={process}", f"--output={files[name]}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name, process in scene.processes.items()
        ]
        began_s, taken = time.monotonic(), []
        while any(one.poll() is None for one in looking):
            taken.append(scene.publish("live", verify=True))
        rounds = len(taken) * SECONDS / (time.monotonic() - began_s)
        found = {name: _sorted(file.read_text(), rounds) for name, file in files.items()}
    _draw(found, statistics.median(taken), limit_s)
    names = list(found)
    rows = [(kind, *(f"{found[name][kind]:.0f}" for name in names)) for kind in (*KINDS, REST)]
    times = f"median {statistics.median(taken) * 1e3:.0f} ms; limit {limit_s * 1e3:.0f} ms"
    sys.stdout.write(f"{len(taken)} rounds, {times}\n{table(('ms of a round', *names), rows)}\n")


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lw-profile-")


def _sorted(raw: str, rounds: float) -> Counter[str]:
    """Milliseconds of a round, by kind, from lines of `frame;frame;... count`."""
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if "change (" in stack:  # the benchmark's own: new content for the next round
            continue
        found[_kind(stack.split(";")[::-1])] += int(count) / RATE * 1e3 / rounds
    return found


def _kind(frames: list[str]) -> str:
    for frame in frames:
        for kind, files in KINDS.items():
            if any(file in frame for file in files):
                return kind
    return REST


def _draw(found: dict[str, Counter[str]], median_s: float, limit_s: float) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    for name, kinds in reversed(found.items()):
        left = 0.0
        for number, kind in enumerate((*KINDS, REST)):
            label = kind if name == next(iter(found)) else None
            axes.barh(name, kinds[kind], left=left, color=f"C{number}", label=label)
            left += kinds[kind]
    axes.axvline(limit_s * 1e3, color="black", linestyle=":", label="one plain copy by the ranks")
    axes.axvline(median_s * 1e3, color="black", label="the round, median")
    axes.set_xlabel("ms of processor time in a verified round of 1.4 GB")
    figure.legend(loc="outside upper center", fontsize=8, ncols=4)
    figure.savefig(Path(__file__).with_name("profile.png"), dpi=120)


if __name__ == "__main__":
    main()
