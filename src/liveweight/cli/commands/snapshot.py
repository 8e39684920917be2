"""`liveweight snapshot`: saves, lists, inspects, verifies, exports and prunes weights in files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from liveweight.cli.failures import reporting_errors
from liveweight.cli.progress import SEPARATOR
from liveweight.errors import SnapshotNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from liveweight.transports.snapshot.disk.format import CommitFile
    from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
    from liveweight.transports.snapshot.disk.store import Store, StoredSnapshot
    from liveweight.transports.snapshot.save import SavedSnapshot

app = typer.Typer(no_args_is_help=True)

StoreDir: TypeAlias = Annotated[Path, typer.Argument(metavar="STORE", help="The directory of snapshots.")]
Place: TypeAlias = Annotated[
    Path, typer.Argument(metavar="SNAPSHOT", help="One snapshot's directory; or a store, for its newest one.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
_SHOWN_EVERY_S = 0.5


@app.callback()
def options() -> None:
    """Weights in files: saved, listed, verified, exported to an HF checkpoint, pruned.

    For example: liveweight snapshot list ./snapshots
    """


@app.command()
@reporting_errors
def save(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An HF checkpoint directory.")],
    store: StoreDir,
    version: Annotated[str, typer.Option("--version", help="What it is called, such as step_100.")],
    run: Annotated[str, typer.Option(help="The run that the version belongs to.")] = "files",
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="Share it out as an engine of so many ranks; any other can still restore it."
        ),
    ] = 1,
    part_mb: Annotated[
        int, typer.Option(min=1, help="How large parts become, in MB; a larger tensor has its own.")
    ] = 256,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as a snapshot, complete or not at all.

    For example: liveweight snapshot save ./model ./snapshots --version step_100 --tp 2
    """
    from liveweight.engine.recovery.checkpoint_images import checkpoint_images
    from liveweight.spec.label import checked_label
    from liveweight.spec.manifest import Version
    from liveweight.transports.snapshot.disk.store import Store
    from liveweight.transports.snapshot.disk.writer import WriteSettings
    from liveweight.transports.snapshot.save import SavedSnapshot
    from liveweight.transports.snapshot.save import save as write

    label = checked_label(version)
    images, began_s = checkpoint_images(directory, tp), time.monotonic()
    settings = WriteSettings(part_bytes=part_mb << 20)
    with _progress_line(
        "saved", sum(image.layout.placed_bytes for image in images), quiet=as_json
    ) as progress:
        saved = write(
            Store(store), Version(run=run, label=label), images, settings=settings, progress=progress
        )
    if isinstance(saved, SavedSnapshot):  # nobody cancels it here
        _print_saved(saved, time.monotonic() - began_s, as_json)


def _print_saved(saved: SavedSnapshot, took_s: float, as_json: bool) -> None:
    if as_json:
        _print_json({**_facts(saved.path, saved.commit), "took_s": took_s})
    else:
        print(f"{saved.path}: {_summary(saved.commit)}, {took_s:.1f} s")


@app.command("list")
@reporting_errors
def list_(store: StoreDir, as_json: AsJson = False) -> None:
    """List the snapshots of a store, the oldest first, also those that are not complete.

    For example: liveweight snapshot list ./snapshots --json
    """
    found = _store(store).listed()
    if as_json:
        _print_json([_listed(entry) for entry in found])
        return
    for entry in found:
        print(f"{entry.path.name}: {_state(entry) if entry.commit is None else _summary(entry.commit)}")


@app.command()
@reporting_errors
def inspect(place: Place, as_json: AsJson = False) -> None:
    """Tell what a snapshot holds: its ranks, parts and tensors. All files must be there, in their sizes; weights are not read.

    For example: liveweight snapshot inspect ./snapshots/000001-step_100
    """
    with _opened(place) as snapshot:
        ranks = [
            {
                "rank": manifest.rank,
                "device_id": manifest.device_id,
                "size_bytes": manifest.size_bytes,
                "parts": [{"file": part.file, "size_bytes": part.size_bytes} for part in manifest.parts],
            }
            for manifest in snapshot.manifests
        ]
        facts = _facts(snapshot.path, snapshot.commit) | {"ranks": ranks}
        facts["tensors"] = [
            {"name": spec.name, "dtype": spec.dtype.value, "shape": spec.shape, "digest": spec.digest}
            for spec in snapshot.commit.manifest
        ]
        if as_json:
            _print_json(facts)
            return
        print(f"{snapshot.path}: {_summary(snapshot.commit)}")
        for rank in ranks:
            print(f"rank {rank['rank']}{SEPARATOR}device id {rank['device_id']}{SEPARATOR}{_mb(rank)}")
            for part in rank["parts"]:  # type: ignore[attr-defined]
                print(f"  {part['file']}{SEPARATOR}{_mb(part)}")
        for spec in snapshot.commit.manifest:
            print(f"{spec.name}{SEPARATOR}{spec.describe()}{SEPARATOR}{spec.digest or 'no digest'}")


@app.command("verify")
@reporting_errors
def verify_(place: Place, as_json: AsJson = False) -> None:
    """Read all of a snapshot, and compare every block and digest with what was written. The exit code is 1 if one differs.

    For example: liveweight snapshot verify ./snapshots
    """
    from liveweight.transports.snapshot.verify import verify

    began_s = time.monotonic()
    with _opened(place) as snapshot:
        total = sum(manifest.size_bytes for manifest in snapshot.manifests)
        with _progress_line("verified", total, quiet=as_json) as progress:
            checked = verify(snapshot, progress)
        took_s = time.monotonic() - began_s
        facts = _facts(snapshot.path, snapshot.commit)
    if as_json:
        _print_json(
            {**facts, "files": checked.files, "blocks": checked.blocks, "regions": checked.regions}
            | {"verified": True, "took_s": took_s}
        )
        return
    counted = f"{checked.files} files, {checked.blocks} blocks, {checked.regions} digests"
    print(f"{facts['path']}: {counted} are as they were written, {took_s:.1f} s")


@app.command("export")
@reporting_errors
def export_(
    place: Place,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must not be there.")],
    like: Annotated[
        Path | None,
        typer.Option(help="A model directory whose other files (config, tokenizer) are copied."),
    ] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="How large files become, in MB.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Write a snapshot as an ordinary HF checkpoint directory, compared with its digests.

    For example: liveweight snapshot export ./snapshots ./step_100 --like ./model
    """
    from liveweight.transports.snapshot.export import export

    with _opened(place) as snapshot:
        with _progress_line("exported", snapshot.commit.weights_bytes, quiet=as_json) as progress:
            written = export(snapshot, directory, shard_bytes=shard_mb << 20, like=like, progress=progress)
        facts = _facts(snapshot.path, snapshot.commit)
    if as_json:
        facts_of_export = {"directory": str(directory), "files": written.files, "verified": written.verified}
        _print_json({**facts, **facts_of_export})
        return
    checked = "" if written.verified else ", without digests to compare"
    print(f"{directory}: {written.tensors} tensors in {len(written.files)} files{checked}")


@app.command()
@reporting_errors
def prune(
    store: StoreDir,
    keep: Annotated[int, typer.Option(min=1, help="So many of the newest complete ones stay.")],
    as_json: AsJson = False,
) -> None:
    """Remove old snapshots, and what writers that died left behind. One that is being written or read stays.

    For example: liveweight snapshot prune ./snapshots --keep 3
    """
    pruned = _store(store).prune(keep)
    if as_json:
        paths_by_outcome = {"removed": pruned.removed, "in_use": pruned.in_use}
        _print_json({name: [str(path) for path in paths] for name, paths in paths_by_outcome.items()})
        return
    for path in pruned.removed:
        print(f"removed {path.name}")
    for path in pruned.in_use:
        print(f"{path.name} is in use and stays")


def _store(directory: Path) -> Store:
    """Open an existing store; only saving creates one."""
    from liveweight.transports.snapshot.disk.store import Store

    if not directory.is_dir():
        raise SnapshotNotFound("no store of snapshots", [str(directory)])
    return Store(directory)


def _opened(place: Path) -> OpenSnapshot:
    """The snapshot of a directory, or the newest of a store."""
    from liveweight.transports.snapshot.disk.names import COMMIT, sequence_of
    from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
    from liveweight.transports.snapshot.disk.store import Store

    if (place / COMMIT).exists() or sequence_of(place.name) is not None:
        return OpenSnapshot(place)
    return OpenSnapshot(Store(place).newest())


@contextmanager
def _progress_line(step: str, total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a step's progress on one line of the terminal; nothing if stderr is no terminal."""
    live = sys.stderr.isatty() and not quiet
    done_bytes, shown_s = 0, 0.0

    def count(size_bytes: int) -> None:
        nonlocal done_bytes, shown_s
        done_bytes += size_bytes
        if live and time.monotonic() - shown_s > _SHOWN_EVERY_S:
            shown_s = time.monotonic()
            text = f"\r{step} {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
            print(text, end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _facts(path: Path, commit: CommitFile) -> dict[str, Any]:
    return {
        "path": str(path),
        "complete": True,
        "version": {
            "run": commit.version.run,
            "label": commit.version.label,
            "digest": commit.version.digest,
            "number": commit.version.number,
        },
        "created_s": commit.created_s,
        "ranks": len(commit.ranks),
        "tensors": len(commit.manifest.tensors),
        "weights_bytes": commit.weights_bytes,
    }


def _listed(entry: StoredSnapshot) -> dict[str, Any]:
    if entry.commit is None:
        return {"path": str(entry.path), "complete": False, "writing": entry.writing}
    return _facts(entry.path, entry.commit)


def _state(entry: StoredSnapshot) -> str:
    return "being written" if entry.writing else "not complete: its writer is gone"


def _summary(commit: CommitFile) -> str:
    tensors = f"{len(commit.manifest.tensors)} tensors"
    ranks = f"{len(commit.ranks)} rank{'s' if len(commit.ranks) > 1 else ''}"
    parts = (str(commit.version), tensors, ranks, f"{commit.weights_bytes / 1e6:.1f} MB")
    return SEPARATOR.join((*parts, f"digest {commit.version.digest or 'unknown'}"))


def _mb(entry: dict[str, Any]) -> str:
    return f"{entry['size_bytes'] / 1e6:.1f} MB"


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
