"""Stores: what exists, what is pruned and what is not, saving that is cancelled or finds its weights changed, export."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from liveweight.devices.kernels import choose
from liveweight.devices.memory import Memory
from liveweight.errors import (
    DeadlineExceeded,
    DigestMismatch,
    OfferChanged,
    OutOfSpace,
    Refused,
    SnapshotNotFound,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.transports.snapshot.disk.names import COMMIT, WRITING
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, Progress, RankWriter, Stop, WritingCancelled
from liveweight.transports.snapshot.export import export
from liveweight.transports.snapshot.offer_record import offer_of
from liveweight.transports.snapshot.reader import SnapshotReader
from liveweight.transports.snapshot.save import Background, SavedSnapshot, save
from tests.support.snapshots import FULL, SETTINGS, SPECS, restored, same, save_label, sharded, weights
from tests.support.wire import SECRET, leaving_nothing, soon


def image(label: int) -> Image:
    return Image(layout=FULL, memories=[Memory.from_array(weights(label))])


def version(label: int) -> Version:
    return Version(run="test", label=label)


def test_snapshots_come_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "store")
    assert store.listed() == []
    with pytest.raises(SnapshotNotFound, match="new/store"):
        store.newest()
    paths = [save_label(store, label) for label in (5, 3, 4)]
    assert [path.name for path in paths] == ["000001-5", "000002-3", "000003-4"]
    assert [entry.path for entry in store.listed()] == paths
    assert store.newest() == paths[-1]


def test_the_last_k_stay_and_the_order_goes_on_after_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [save_label(store, label) for label in range(4)]
    pruned = store.prune(2)
    assert (pruned.removed, pruned.in_use) == (tuple(paths[:2]), ())
    assert [entry.path for entry in store.listed()] == paths[2:]
    assert save_label(store, 9).name == "000005-9"


def test_a_snapshot_that_is_read_is_not_pruned_and_is_as_soon_as_it_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = save_label(store, 1), save_label(store, 2)
    with leaving_nothing():
        with OpenSnapshot(old) as snapshot:
            assert store.prune(1).in_use == (old,)
            snapshot.check()
            assert same(restored(old)[0], weights(1))
        assert store.prune(1).removed == (old,)
    assert [entry.path for entry in store.listed()] == [new]
    with pytest.raises(SnapshotNotFound):
        OpenSnapshot(old)


def test_a_reading_holds_its_snapshot_until_it_is_let_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, _ = save_label(store, 1), save_label(store, 2)
    with OpenSnapshot(old) as snapshot:
        offer = offer_of(snapshot)
    memory = np.zeros(FULL.memories_bytes[0], dtype=np.uint8)
    with SnapshotReader(SECRET, choose().kernels) as reader:
        reading = reader.bind(offer, FULL, [Memory.from_array(memory)], soon())
        assert store.prune(1).in_use == (old,)
        reading.check()
        reading.read(0, len(reading.rows))
        reading.check()
        assert same(memory, weights(1))
        del reading
        assert store.prune(1).removed == (old,)


def test_a_snapshot_that_was_replaced_by_force_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = save_label(store, 1), save_label(store, 2)
    with OpenSnapshot(old) as snapshot:
        offer = offer_of(snapshot)
    shutil.rmtree(old)
    new.rename(old)
    with SnapshotReader(SECRET, choose().kernels) as reader:
        reading = reader.bind(offer, FULL, [Memory.from_array(weights(0))], soon())
        with pytest.raises(OfferChanged, match="generation"):
            reading.check()


def test_a_snapshot_that_is_being_written_is_listed_as_such_and_never_pruned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_label(store, 1)
    with store.begin("2") as draft:
        (listed,) = [entry for entry in store.listed() if entry.commit is None]
        assert (listed.path, listed.writing) == (draft.path, True)
        assert store.prune(1).removed == ()
        RankWriter(draft.path, image(2), snapshot=draft.snapshot, rank=0, settings=SETTINGS).write()
        draft.commit(version(2), ranks=1)
    assert store.newest() == draft.path
    assert same(restored(draft.path)[0], weights(2))


def test_what_a_writer_that_died_left_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = save_label(store, 1)
    dead, half = tmp_path / "000002-2", tmp_path / ".tmp-0123"
    for path in (dead, half):
        path.mkdir()
        (path / WRITING).touch()
        (path / "model_state.tp0.0.part0.pdparams").write_bytes(b"half")
    assert not store.listed()[1].writing
    assert set(store.prune(3).removed) == {dead, half}
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_what_a_pruner_that_died_left_is_removed_but_not_what_was_made_just_now(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_label(store, 1)
    old, fresh = tmp_path / "000002-2", tmp_path / "000003-3"
    for path in (old, fresh):
        path.mkdir()
    os.utime(old, (1, 1))
    assert store.prune(1).removed == (old,)
    assert fresh.exists()


def test_a_store_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    for place in ("file/store", "file", "dangling"):
        with pytest.raises(OutOfSpace, match=place):
            Store(tmp_path / place).begin("1")


def test_ranks_that_are_not_all_there_are_never_committed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    layout = Image(layout=sharded(1, 2), memories=[Memory.from_array(weights(1))])
    with pytest.raises(Exception, match=r"manifests of ranks \[1\], wanted 2"), store.begin("1") as draft:
        RankWriter(draft.path, layout, snapshot=draft.snapshot, rank=1, settings=SETTINGS).write()
        draft.commit(version(1), ranks=2)
    assert list(tmp_path.iterdir()) == []


def test_copies_that_disagree_between_ranks_are_never_committed(tmp_path: Path) -> None:
    store, other = Store(tmp_path), weights(1)
    norm = FULL.placements[3]
    other[norm.offset_bytes] ^= 1
    images = [
        Image(layout=sharded(rank, 2), memories=[Memory.from_array(memory)])
        for rank, memory in enumerate((weights(1), other))
    ]
    with pytest.raises(DigestMismatch, match="norm"):
        save(store, version(1), images, settings=SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_what_differs_from_the_expected_digests_is_never_committed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with OpenSnapshot(save_label(store, 1)) as snapshot:
        expected: Manifest = snapshot.commit.manifest
    with pytest.raises(DigestMismatch, match="embed"):
        save(store, version(2), [image(2)], settings=SETTINGS, expected=expected)
    assert isinstance(
        save(store, version(1), [image(1)], settings=SETTINGS, expected=expected), SavedSnapshot
    )
    assert len(store.listed()) == 2


def test_weights_that_changed_while_they_were_read_are_never_committed(tmp_path: Path) -> None:
    store, calls = Store(tmp_path), []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OfferChanged("exchanged")

    changing = Image(layout=FULL, memories=[Memory.from_array(weights(1))], check=check)
    with pytest.raises(OfferChanged):
        save(store, version(1), [changing], settings=SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_saving_in_the_background_is_cancelled_between_windows_and_leaves_nothing(tmp_path: Path) -> None:
    store, reached, go = Store(tmp_path), threading.Event(), threading.Event()

    def hold(_: int) -> None:
        reached.set()
        assert go.wait(20)

    def work(stop: Stop, _: Progress) -> SavedSnapshot | WritingCancelled:
        return save(store, version(1), [image(1)], settings=SETTINGS, stop=stop, progress=hold)

    with leaving_nothing(), Background(work, what="a snapshot", total_bytes=5) as background:
        assert reached.wait(20)
        with pytest.raises(DeadlineExceeded, match="a snapshot, 0 of 5 bytes done"):
            background.wait(Deadline.after(0.0))
        assert not background.done
        background.cancel()
        go.set()
        assert isinstance(background.wait(soon()), WritingCancelled)
    assert list(tmp_path.iterdir()) == []


def test_saving_in_the_background_says_what_came_of_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    total = FULL.placed_bytes
    with Background(
        lambda stop, progress: save(
            store, version(1), [image(1)], settings=SETTINGS, stop=stop, progress=progress
        ),
        what="a snapshot",
        total_bytes=total,
    ) as background:
        saved = background.wait(soon())
        assert isinstance(saved, SavedSnapshot)
        assert background.done_bytes == total
    with (
        Background(lambda *_: 1 // 0, what="nothing", total_bytes=0) as failing,
        pytest.raises(ZeroDivisionError),
    ):
        failing.wait(soon())


@pytest.mark.parametrize("shard_bytes", [1 << 20, 9_000])
def test_an_export_is_a_checkpoint_that_loads_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    path = save_label(Store(tmp_path / "store"), 7, world=4)
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    (like / "model.safetensors").write_text("old weights")
    with OpenSnapshot(path) as snapshot:
        written = export(snapshot, tmp_path / "out", shard_bytes=shard_bytes, like=like)
    assert written.verified
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "config.json" in names
    assert ("model.safetensors.index.json" in names) == (shard_bytes == 9_000)
    found: dict[str, torch.Tensor] = {}
    for file in written.files:
        found |= load_file(tmp_path / "out" / file)
    memory = weights(7)
    for placement, spec in zip(FULL.placements, SPECS, strict=True):
        raw = found[spec.name].reshape(-1).view(torch.uint8).numpy()
        wanted = memory[placement.offset_bytes : placement.offset_bytes + spec.size_bytes]
        assert np.array_equal(raw, wanted)
    if shard_bytes == 9_000:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {spec.name for spec in SPECS}
    with OpenSnapshot(path) as snapshot, pytest.raises(Refused, match="there already"):
        export(snapshot, tmp_path / "out")


def test_an_export_of_damaged_parts_leaves_no_directory(tmp_path: Path) -> None:
    path = save_label(Store(tmp_path / "store"), 7)
    part = path / "model_state.tp0.0.part0.pdparams"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with OpenSnapshot(path) as snapshot, pytest.raises(Exception, match="corrupted"):
        export(snapshot, tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"store"}
    assert (path / COMMIT).exists()
