"""Pictures of the benchmarks, drawn with matplotlib where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS, THEIRS = "#1f6f5c", "#b0b4b8"


def plot_peers(found: dict[str, Any], place: Path) -> bool:
    """Bars of every contender's best round. False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    rows = sorted(found["contenders"].items(), key=lambda item: -item[1]["best_s"])
    figure = Figure(figsize=(8, 0.36 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    colours = [OURS if row["group"] == "ours" else THEIRS for _, row in rows]
    axes.barh([name for name, _ in rows], [row["best_s"] * 1e3 for _, row in rows], color=colours)
    axes.axvline(found["limit_s"] * 1e3, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel(f"ms for {found['bytes'] / 1e9:.2f} GB to {found['ranks']} ranks; dotted: one plain copy")
    figure.savefig(place, dpi=120)
    return True


def plot_growth(found: dict[str, Any], place: Path) -> bool:
    """One field for each axis, both scales logarithmic. False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    for field, (axis, points) in zip(
        figure.subplots(1, len(found["axes"])), found["axes"].items(), strict=True
    ):
        places = [point["at"] for point in points]
        for key, style in (("plain_s", "o-"), ("verified_s", "s-"), ("limit_s", "k:")):
            field.loglog(places, [point[key] * 1e3 for point in points], style, label=key.removesuffix("_s"))
        field.set_xlabel(axis)
    field.legend()
    figure.axes[0].set_ylabel("ms")
    figure.savefig(place, dpi=120)
    return True
