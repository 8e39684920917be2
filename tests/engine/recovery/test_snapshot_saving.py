"""Snapshots of a running engine: of every version that is committed, of one version each, and harmless whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liveweight.engine.recovery.restarting_engine import RestartingEngine
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import SnapshotAbandoned, SnapshotFailed, SnapshotSaved
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.verify import verify
from tests.support.engine.elastic import Gate, saved
from tests.support.engine.engines import Models, ask, greedy
from tests.support.engine.flipping_hook import FLIPPED, NAME
from tests.support.processes.real_servers import until
from tests.support.small_disk import small_disk

Elastic = Callable[..., RestartingEngine]


def labels(store: Store) -> list[str | int]:
    """The versions of the complete snapshots, each of them whole."""
    found = []
    for path in store.complete():
        with OpenSnapshot(path) as snapshot:
            verify(snapshot)
            found.append(snapshot.commit.version.label)
    return found


def recorded_bus() -> tuple[Bus, Recorder]:
    bus, recorder = Bus(), Recorder()
    bus.subscribe(recorder)
    return bus, recorder


def test_every_commit_is_saved_as_it_is_installed_and_the_last_ones_are_kept(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    bus, recorder = recorded_bus()
    engine, store = elastic(models.directory(mtp=True), bus=bus), Store(short_path / "snapshots")
    for label in (1, 2, 3):
        with_it = publisher(engine, models.directory(mtp=True, seed=label))
        version = with_it.publish(label).version
        saved(engine, version)
    assert labels(store) == [2, 3]
    with OpenSnapshot(store.newest()) as snapshot:
        commit = snapshot.commit
        assert commit.version == version == engine.update_status().serving
        assert engine.verify(VerificationRequest(against="manifest", manifest=commit.manifest)).verdict.match
    with_it.undo()
    undone = engine.update_status().serving
    assert undone is not None
    assert undone.label == 2
    saved(engine, undone)
    assert labels(store) == [3, 2]
    assert [event.version for event in recorder.of(SnapshotSaved)] == ["1", "2", "3", "2"]
    assert recorder.of(SnapshotFailed) == ()


def test_a_snapshot_that_a_commit_overtakes_leaves_nothing_and_the_newer_version_is_saved(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path, gate: Gate
) -> None:
    bus, recorder = recorded_bus()
    engine, store = elastic(models.directory(), gate=gate, bus=bus), Store(short_path / "snapshots")
    gate.shut()
    publisher(engine, models.directory(seed=1)).publish(1)
    gate.reached()
    version = publisher(engine, models.directory(seed=2)).publish(2).version  # no commit waits for a writer
    gate.open()
    saved(engine, version)
    assert labels(store) == [2]
    assert list(store.root.iterdir()) == [store.newest()]
    assert [event.version for event in recorder.of(SnapshotAbandoned)] == ["1"]


def test_only_every_nth_commit_is_saved(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    engine = elastic(models.directory(), snapshots={"every": 2, "keep": 5})
    for label in (1, 2, 3, 4):
        version = publisher(engine, models.directory(seed=label)).publish(label).version
        if label % 2 == 0:
            saved(engine, version)
    assert labels(Store(short_path / "snapshots")) == [2, 4]


def test_a_full_disk_is_said_and_the_engine_serves_on(
    elastic: Elastic, publisher: Any, models: Models, tmp_path: Path
) -> None:
    bus, recorder = recorded_bus()
    with small_disk(tmp_path) as disk:
        engine = elastic(models.directory(), snapshots={"directory": str(disk / "store")}, bus=bus)
        version = publisher(engine, models.directory(seed=1)).publish(1).version
        until(
            lambda: (said := engine.update_status().snapshots) is not None and said.failed is not None,
            "a failure",
        )
        snapshots = engine.update_status().snapshots
        assert snapshots is not None
        assert snapshots.newest is None
        assert str(snapshots.failed).startswith("LW-503 1: ")
        assert recorder.of(SnapshotFailed)[0].code == "LW-503"
        assert ask(engine, [5, 6, 7], greedy(4)).wait().finish == "length"
        assert engine.update_status().serving == version
        assert Store(disk / "store").complete() == []
        engine.stop()


def test_a_store_that_is_gone_harms_nobody_and_is_made_again(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    engine = elastic(models.directory())
    saved(engine, publisher(engine, models.directory(seed=1)).publish(1).version)
    shutil.rmtree(short_path / "snapshots")
    saved(engine, publisher(engine, models.directory(seed=2)).publish(2).version)
    assert labels(Store(short_path / "snapshots")) == [2]


def test_weights_that_were_damaged_in_memory_are_not_saved_as_the_version_that_they_are_not(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path, gate: Gate
) -> None:
    engine = elastic(models.directory(), gate=gate, hooks=(NAME,))
    gate.shut()
    publisher(engine, models.directory(seed=1)).publish(1)
    gate.reached()
    for pid in engine.pids:
        os.kill(pid, signal.SIGUSR1)

    def differs_everywhere() -> bool:
        found = engine.verify(VerificationRequest()).verdict.mismatches
        return [one.ranks for one in found if one.name == FLIPPED] == [(0, 1)]

    until(differs_everywhere, "ranks whose final norm was damaged")
    gate.open()
    until(
        lambda: (said := engine.update_status().snapshots) is not None and said.failed is not None,
        "a failure",
    )
    said = engine.update_status().snapshots
    assert said is not None
    assert str(said.failed).startswith("LW-401 1: ")
    assert FLIPPED in str(said.failed)
    assert labels(Store(short_path / "snapshots")) == []
