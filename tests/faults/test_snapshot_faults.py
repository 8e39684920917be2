"""Snapshots under faults: writers killed at any moment, full disks, readers beside pruners. Whole, or an error; never a mixture."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from liveweight.errors import LiveWeightError, OutOfSpace, SnapshotDamaged, SnapshotNotFound
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.verify import verify
from tests.support.processes.cluster import Cluster
from tests.support.small_disk import small_disk
from tests.support.snapshots import FULL, restored, same, save_label, weights
from tests.support.wire import descriptors

MOMENTS = 20
WINDOWS = 90
"""What a few snapshots have: a kill after so many falls into a part, a manifest, a commit, or between two of them."""


def assert_newest_is_whole(store: Store, at_least: int) -> int:
    """The newest complete snapshot is bit for bit what its label stands for; its label."""
    path = store.newest()
    with OpenSnapshot(path) as snapshot:
        label = int(snapshot.commit.version.label)
        verify(snapshot)
    assert same(restored(path, world=4)[0], weights(label))
    assert label >= at_least
    return label


@pytest.mark.timeout(300)
def test_a_writer_killed_at_twenty_random_moments_leaves_only_complete_snapshots(
    cluster: Cluster, tmp_path: Path
) -> None:
    store, moments = Store(tmp_path / "store"), random.Random(9)
    save_label(store, 0)
    first = saved = 1
    for _ in range(MOMENTS):
        writer = cluster.snapshots("both" if moments.random() < 0.3 else "write", store.root, first)
        for _ in range(moments.randrange(1, WINDOWS)):
            writer.expect("wrote")
        writer.kill()
        label = assert_newest_is_whole(store, saved - 1)
        assert all(entry.commit is not None or not entry.writing for entry in store.listed())
        saved, first = label + 1, label + 2
        if moments.random() < 0.3:
            store.prune(1)
            assert [entry.path for entry in store.listed()] == [store.newest()]
    assert saved > 1  # some were completed: the moments were not all at the beginning
    store.prune(1)
    assert [path.name for path in store.root.iterdir()] == [store.newest().name]


@pytest.mark.timeout(300)
def test_readers_beside_writers_and_pruners_get_whole_versions_or_a_clear_error(
    cluster: Cluster, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    save_label(store, 0)
    writer = cluster.snapshots("write", store.root, 1)
    pruners = [cluster.snapshots("prune", store.root) for _ in range(2)]
    got: list[int] = []
    before = descriptors()
    while len(set(got)) < 12:
        try:
            path = store.newest()
            found, reports = restored(path, world=2)
        except (SnapshotNotFound, SnapshotDamaged):
            continue  # it was pruned between being found and being opened
        labels = {report.version.label for report in reports if report.version is not None}
        if len(labels) == 1:  # each rank opens it for itself here
            (label,) = labels
            assert same(found, weights(int(label)))
            got.append(int(label))
    assert got == sorted(got)
    assert descriptors() <= before
    writer.kill()
    assert [pruner.finish() for pruner in pruners] == [0, 0]
    store.prune(1)
    assert len(store.listed()) == 1
    assert_newest_is_whole(store, max(got))


def test_a_stopped_writer_keeps_its_snapshot_and_a_killed_one_does_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    save_label(store, 0)
    writer = cluster.snapshots("write", store.root, 1)
    while all(entry.commit is not None for entry in store.listed()):
        writer.expect("wrote")
        writer.stop()
        if all(entry.commit is not None for entry in store.listed()):
            writer.signal(signal.SIGCONT)
    (unfinished,) = [entry.path for entry in store.listed() if entry.commit is None]
    assert unfinished not in store.prune(1).removed
    writer.kill()
    assert unfinished in store.prune(1).removed


def test_a_full_disk_is_an_error_and_the_last_complete_snapshot_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        store, label = Store(disk / "store"), 0
        before = descriptors()
        with pytest.raises(OutOfSpace, match="No space left on device"):
            for label in range(1, 1000):
                save_label(store, label)
        assert 1 < label < (1 << 20) // FULL.memories_bytes[0]
        assert assert_newest_is_whole(store, label - 1) == label - 1
        assert all(entry.commit is not None for entry in store.listed())
        assert descriptors() == before
        store.prune(1)
        save_label(store, label)
        assert_newest_is_whole(store, label)


def _limited(limit_bytes: int, work: Callable[[], object]) -> None:
    """Files may have no more than so many bytes: a disk that is full at exactly that point."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("limit", [0, 1, 100, 700, 3000, 9000, 12_400])
def test_a_disk_that_is_full_at_any_byte_leaves_nothing_of_the_new_snapshot(
    tmp_path: Path, limit: int
) -> None:
    store = Store(tmp_path)
    save_label(store, 1)
    files = {path.name for path in tmp_path.rglob("*")}
    with pytest.raises(LiveWeightError) as caught:
        _limited(limit, lambda: save_label(store, 2, world=2))
    assert isinstance(caught.value, OutOfSpace) and caught.value.retryable
    assert {path.name for path in tmp_path.rglob("*")} == files
    assert_newest_is_whole(store, 1)
