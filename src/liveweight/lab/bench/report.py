"""The report of all benchmarks: tables in Markdown and pictures, from figures that were written before."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from liveweight.lab.bench.plots import plot_growth, plot_peers

PACKAGES = ("liveweight", "torch", "pyzmq", "safetensors", "nixl", "ray")


def write_report(
    directory: Path, found: Mapping[str, dict[str, Any]], command: str, machine: str = ""
) -> Path:
    """Write REPORT.md from these figures, by the benchmark's name. Pictures need matplotlib; the report says if it is missing.

    `machine` describes the machine that measured them, as `this_machine` returned it then; by default this machine.
    """
    pictures = _pictures(directory, found)
    parts = ["# Benchmarks", f"`{command}`", machine or this_machine()]
    for name, table in _TABLES.items():
        if name in found:
            parts.append(table(found[name]))
            if name in pictures:
                parts.append(f"![{name}]({pictures[name]})")
    if not pictures:
        parts.append("No pictures: matplotlib is not installed (`pip install 'liveweight[bench]'`).")
    place = directory / "REPORT.md"
    place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return place


def _pictures(directory: Path, found: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    drawn = {}
    for name, plot in {"peers": plot_peers, "growth": plot_growth}.items():
        if name in found and plot(found[name], directory / f"{name}.png"):
            drawn[name] = f"{name}.png"
    return drawn


def this_machine() -> str:
    """Where it was measured, and with what."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}; {', '.join(versions)}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _peers(found: dict[str, Any]) -> str:
    rows = [
        (
            name,
            row["stands_for"],
            f"{row['best_s'] * 1e3:.0f}",
            f"{row['median_s'] * 1e3:.0f}",
            f"{row['best_s'] / found['limit_s']:.2f}",
            "yes" if row["verified"] else "no",
        )
        for name, row in sorted(found["contenders"].items(), key=lambda item: item[1]["best_s"])
    ]
    absent = "".join(f"\n\nAbsent: {name}, {why}." for name, why in found["absent"].items())
    ratios = [
        ("ipc live plain / shared memory in place", f"{found['of_in_place']:.2f}", "<= 1.1"),
        ("those that copy twice / ipc live plain", f"{found['over_copies_twice']:.2f}", ">= 1.5"),
        ("ipc live verified / those that copy twice", f"{found['verified_of_copies_twice']:.2f}", "<= 1.4"),
        ("the best of gloo, files, Ray / ipc live plain", f"{found['speedup_best']:.2f}", ">= 2"),
        ("the middle one of them / ipc live plain", f"{found['speedup_median']:.2f}", ">= 4"),
    ]
    size = f"{found['bytes'] / 1e9:.2f} GB, {found['tensors']} tensors, {found['ranks']} ranks"
    return "\n\n".join(
        (
            "## Peers",
            f"{size}, {found['rounds']} rounds of each in turn; one plain copy by the ranks: {found['limit_s'] * 1e3:.0f} ms.",
            table(("contender", "stands for", "best ms", "median ms", "x copy", "verified"), rows) + absent,
            table(("ratio", "found", "wanted"), ratios),
        )
    )


def _ipc(found: dict[str, Any]) -> str:
    rows = [
        (
            f"{kind} {name.removesuffix('_s')}",
            f"{times['best'] * 1e3:.0f}",
            f"{times['median'] * 1e3:.0f}",
            f"{times['best'] / found['limit_s']:.2f}",
            f"{times['median'] / found['limit_median_s']:.2f}",
        )
        for kind, figures in found["rounds"].items()
        for name, times in figures.items()
    ]
    copy = f"best {found['limit_s'] * 1e3:.0f} ms, median {found['limit_median_s'] * 1e3:.0f} ms"
    return "\n\n".join(
        (
            "## Rounds over shared memory",
            f"{found['bytes'] / 1e9:.2f} GB to {found['ranks']} ranks; one plain copy by the ranks: {copy}. "
            f"The ring takes {found['ring_peak_extra_bytes'] / found['ring_bytes']:.2f} of its size.",
            table(("round", "best ms", "median ms", "x copy", "x copy, medians"), rows),
        )
    )


def _nixl(found: dict[str, Any]) -> str:
    rows = [
        (name, f"{rate:.2f}", f"{found[f'{name}_s']['best'] * 1e3:.0f}")
        for name, rate in found["rates_gb_s"].items()
    ]
    ratios = (
        f"Plain {found['plain_ratio']:.2f} of a bare READ (wanted >= 0.9), verified {found['verified_ratio']:.2f} "
        f"(wanted >= 0.8); two ranks {found['two_rank_ratio']:.2f} of one's time (wanted <= 1.1)."
    )
    return "\n\n".join(("## NIXL", table(("reads", "GB/s", "best ms"), rows), ratios))


def _snapshot(found: dict[str, Any]) -> str:
    names = ("save_s", "save_file_s", "restore_s", "load_s")
    rows = [
        (
            f"{one['bytes'] / 1e9:.2f}",
            *(f"{one[name]['best'] * 1e3:.0f}" for name in names),
            f"{one['save_ratio']:.2f}",
            f"{one['restore_ratio']:.2f}",
            f"{one['peak_extra_bytes'] / 1e6:.1f}",
        )
        for one in found["sizes"]
    ]
    head = ("GB", "save ms", "save_file, fsync", "restore ms", "load_file", "save ratio", "restore ratio")
    return "\n\n".join(("## Snapshots", table((*head, "extra MB"), rows), "Wanted: <= 1.3, <= 1.2."))


def _growth(found: dict[str, Any]) -> str:
    rows = [
        (
            axis,
            f"{point['at']:g}",
            f"{point['plain_s'] * 1e3:.1f}",
            f"{point['verified_s'] * 1e3:.1f}",
            f"{point['limit_s'] * 1e3:.1f}",
            f"{point['peak_extra_bytes'] / 1e6:.0f}",
        )
        for axis, points in found["axes"].items()
        for point in points
    ]
    slopes = [
        (axis, *(f"{slope[key]:.2f}" for key in ("plain_s", "verified_s", "limit_s")))
        for axis, slope in found["exponents"].items()
    ]
    return "\n\n".join(
        (
            "## Growth",
            table(("axis", "at", "plain ms", "verified ms", "one copy ms", "most extra MB"), rows),
            table(("exponent of", "plain", "verified", "one copy"), slopes),
            f"Time per byte, largest size / 0.5 GB: {found['size_ratio']:.2f} (wanted <= 1.15). "
            f"Most tensors / fewest, {found['tensors_gb']:g} GB: {found['tensors_ratio']:.2f} plain, "
            f"{found['tensors_verified_ratio']:.2f} verified (wanted <= 2).",
        )
    )


def _idle(found: dict[str, Any]) -> str:
    rows = []
    for name, step_s in found["step_s"].items():
        cost = found.get(name)
        part = (
            ("", "")
            if cost is None
            else (f"{cost['difference']:+.2%}", f"{cost['low']:+.2%} to {cost['high']:+.2%}")
        )
        rows.append((name, f"{step_s * 1e3:.3f}", *part))
    return "\n\n".join(
        (
            "## Idle",
            f"{found['model']}, tp {found['tp']}; extra collectives of live updates: {found['extra_collectives']:g} a step.",
            table(("engine", "ms a step", "of a step", "95%"), rows),
        )
    )


def _torture(found: dict[str, Any]) -> str:
    keys = (
        "kills",
        "rounds",
        "committed",
        "restarts",
        "tokens",
        "torn_tokens",
        "late_waits",
        "leaks",
        "lost",
    )
    rows = [(name, *(str(one[key]) for key in keys)) for name, one in found.items()]
    return f"## Torture\n\n{table(('target', *keys), rows)}"


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "peers": _peers,
    "ipc": _ipc,
    "nixl": _nixl,
    "snapshot": _snapshot,
    "growth": _growth,
    "idle": _idle,
    "torture": _torture,
}
