"""`liveweight bench all`: every comparison in one run, and the report. Importing this module adds all commands to their group."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from liveweight.cli.bench import growth, idle, peers
from liveweight.cli.bench.group import app
from liveweight.cli.commands.torture import PROGRAM
from liveweight.cli.failures import reporting_errors
from liveweight.errors import MissingExtra

__all__ = ["app", "growth", "idle", "peers"]

Out = Annotated[
    Path, typer.Option(help="Where the report, its pictures and the figures go.", file_okay=False)
]
Scale = Annotated[float, typer.Option(min=0.001, max=1.0, help="A part of the full sizes, for a quick look.")]
Render = Annotated[
    bool, typer.Option("--render", help="Measure nothing: write the report from figures that are there.")
]


Only = Annotated[
    list[str] | None, typer.Option(help="Measure this one, and leave the figures of the others as they are.")
]


@app.command("all")
@reporting_errors
def everything(
    out: Out = Path("bench"), scale: Scale = 1.0, only: Only = None, render: Render = False
) -> None:
    """Peers, rounds, NIXL, snapshots, growth, idle and torture, one after the other; REPORT.md with tables, pictures, machine and command.

    For example: liveweight bench all --out bench --scale 0.1
    """
    from liveweight.lab.bench.report import this_machine, write_report

    out.mkdir(parents=True, exist_ok=True)
    unknown = sorted(set(only or ()) - set(_RUNS))
    if unknown:
        raise typer.BadParameter(f"no benchmark {unknown[0]}: there are {', '.join(_RUNS)}")
    if not render:
        _measure(out, scale, only or list(_RUNS))
        about = {"command": f"liveweight bench all --scale {scale:g}", "machine": this_machine()}
        _write(out / "run.json", about)
    found = {name: _read(out / f"{name}.json") for name in _RUNS if (out / f"{name}.json").exists()}
    print(write_report(out, found, **_read(out / "run.json")))


def _measure(out: Path, scale: float, names: Sequence[str]) -> None:
    """Write each benchmark's figures into its file. Skips a benchmark whose packages are missing here."""
    for name in names:
        print(f"{name} ...", flush=True)
        place = out / f"{name}.json"
        place.unlink(missing_ok=True)
        try:
            _write(place, _RUNS[name](scale))
        except MissingExtra as missing:
            print(missing)


def _write(place: Path, found: dict[str, Any]) -> None:
    place.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _read(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return found


def _peers(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.peers.peers import PeersSettings, bench_peers

    return bench_peers(PeersSettings(size_gb=1.4 * scale))


def _ipc(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.rounds.ipc import IpcSettings, bench_ipc

    return bench_ipc(IpcSettings(size_gb=1.4 * scale, rounds=8))


def _nixl(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.nixl import NixlSettings, bench_nixl

    return bench_nixl(NixlSettings(size_gb=0.5 * scale))


def _snapshot(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.snapshot import SnapshotSettings, bench_snapshot

    return {"sizes": [bench_snapshot(SnapshotSettings(size_gb=gb * scale)) for gb in (0.5, 4.0)]}


def _growth(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.rounds.growth import GrowthSettings, bench_growth

    full = GrowthSettings()
    sizes = tuple(size * scale for size in full.sizes_gb)
    tensors = tuple(max(10, int(count * scale)) for count in full.tensors)
    return bench_growth(
        GrowthSettings(
            sizes_gb=sizes, tensors=tensors, base_gb=full.base_gb * scale, tensors_gb=full.tensors_gb * scale
        )
    )


def _idle(scale: float) -> dict[str, Any]:
    from liveweight.lab.bench.engine.idle import IdleSettings, bench_idle

    full = IdleSettings()
    return bench_idle(
        IdleSettings(size="small" if scale == 1 else "tiny", turns=max(6, int(full.turns * scale)))
    )


def _torture(scale: float) -> dict[str, Any]:
    from liveweight.lab.torture.torture import TortureSettings, torture

    kills = {"embedded": max(5, int(100 * scale)), "in-place": max(5, int(30 * scale))}
    return {
        target: torture(
            TortureSettings(program=PROGRAM, target=target, kills=count),  # type: ignore[arg-type]
            lambda *_: None,
        ).to_dict()
        for target, count in kills.items()
    }


_RUNS: dict[str, Callable[[float], dict[str, Any]]] = {
    "peers": _peers,
    "ipc": _ipc,
    "nixl": _nixl,
    "snapshot": _snapshot,
    "growth": _growth,
    "idle": _idle,
    "torture": _torture,
}
