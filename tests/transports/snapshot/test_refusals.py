"""Files that are not what was written: each kind of damage, in each file, is refused and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from liveweight.errors import LiveWeightError, SnapshotDamaged, SnapshotNotFound
from liveweight.transports.snapshot.disk.names import COMMIT
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import WriteSettings
from liveweight.transports.snapshot.verify import verify
from tests.support.snapshots import restored, same, save_label, weights

PARTS = [f"model_state.tp{rank}.{rank}.part{number}.pdparams" for rank in range(2) for number in range(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = save_label(Store(tmp_path / "store"), 1, world=2)
    assert sorted(file.name for file in found.glob("*.pdparams")) == PARTS
    return found


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << (position % 8)
    file.write_bytes(data)


def refused(path: Path, match: str) -> None:
    """Refused when it is restored, and when it is verified."""
    with pytest.raises(SnapshotDamaged, match=match):
        restored(path, world=2)
    with pytest.raises(SnapshotDamaged, match=match), OpenSnapshot(path) as snapshot:
        verify(snapshot)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("where", [0.0, 0.01, 0.03, 0.5, 0.999999])
def test_a_flipped_bit_anywhere_in_a_part_is_refused(path: Path, name: str, where: float) -> None:
    size = (path / name).stat().st_size
    flip(path / name, int(where * size))
    # A bit of the id that a header carries makes it another snapshot's.
    with pytest.raises(SnapshotDamaged, match=f"{name} (corrupted|stale)"), OpenSnapshot(path) as snapshot:
        verify(snapshot)
    try:
        assert same(restored(path, world=2)[0], weights(1))  # a copy that is on both ranks is read from one
        assert (name, where) == (PARTS[3], 0.999999)
    except SnapshotDamaged as error:
        assert name in str(error)


def test_every_single_byte_of_a_part_is_guarded(tmp_path: Path) -> None:
    whole = save_label(Store(tmp_path), 1, settings=WriteSettings(durable=False))
    (file,) = whole.glob("*.pdparams")
    data = file.read_bytes()
    for position in range(0, len(data), 61):
        flip(file, position)
        with pytest.raises(SnapshotDamaged, match="corrupted"):
            restored(whole)
        file.write_bytes(data)
    assert same(restored(whole)[0], weights(1))


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_version_is_called_stale(tmp_path: Path, path: Path, name: str) -> None:
    other = save_label(Store(tmp_path / "store"), 2, world=2)
    shutil.copy(other / name, path / name)
    refused(path, f"{name} stale: of snapshot [0-9a-f]+")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("left", [0, 1, 0.5, -1])
def test_a_part_that_lost_its_end_is_called_truncated(path: Path, name: str, left: float) -> None:
    size = (path / name).stat().st_size
    with (path / name).open("r+b") as file:
        file.truncate(int(left * size) if left == 0.5 else int(left) if left >= 0 else size - 1)
    refused(path, f"{name} truncated")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_not_there_is_called_missing(path: Path, name: str) -> None:
    (path / name).unlink()
    refused(path, f"{name} missing")


@pytest.mark.parametrize(
    "name",
    ["model_state.tp0.0.part2.pdparams", "model_state.tp2.2.part0.pdparams", "model_state.tp0.0.pdparams"],
)
def test_a_file_that_nobody_wrote_is_called_extra(path: Path, name: str) -> None:
    shutil.copy(path / PARTS[0], path / name)
    refused(path, f"{name} extra")


def test_files_of_other_kinds_beside_it_do_not_matter(path: Path) -> None:
    (path / "README.txt").write_text("step 1")
    assert same(restored(path, world=2)[0], weights(1))


def _swap_manifest(path: Path, store: Path) -> str:
    other = save_label(Store(store), 2, world=2)
    shutil.copy(other / "manifest.tp1.1.json", path / "manifest.tp1.1.json")
    return r"manifest.tp1.1.json stale"


def _flip_manifest(path: Path, _: Path) -> str:
    flip(path / "manifest.tp0.0.json", 300)
    return r"manifest.tp0.0.json corrupted"


def _lose_manifest(path: Path, _: Path) -> str:
    (path / "manifest.tp0.0.json").unlink()
    return r"manifest.tp0.0.json missing"


def _flip_commit(path: Path, _: Path) -> str:
    flip(path / COMMIT, 200)
    return f"{COMMIT}: corrupted"


def _swap_commit(path: Path, store: Path) -> str:
    other = save_label(Store(store), 2, world=2)
    shutil.copy(other / COMMIT, path / COMMIT)
    return "manifest.tp0.0.json stale.* manifest.tp1.1.json stale"


@pytest.mark.parametrize(
    "damage", [_swap_manifest, _flip_manifest, _lose_manifest, _flip_commit, _swap_commit]
)
def test_what_is_said_about_the_parts_is_guarded_too(
    tmp_path: Path, path: Path, damage: Callable[[Path, Path], str]
) -> None:
    refused(path, damage(path, tmp_path / "store"))


def test_without_its_commit_file_a_snapshot_does_not_exist(path: Path) -> None:
    (path / COMMIT).unlink()
    with pytest.raises(SnapshotNotFound, match="not complete"):
        restored(path, world=2)
    with pytest.raises(SnapshotNotFound, match=COMMIT):
        OpenSnapshot(path)
    with pytest.raises(SnapshotNotFound, match="not complete"):
        Store(path.parent).newest()


def test_damage_to_a_rank_that_is_not_read_is_still_told(path: Path) -> None:
    """Restoring rank 0 needs no byte of rank 1's blocks, but a file of the wrong size belongs to no snapshot of ours."""
    with (path / PARTS[3]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(LiveWeightError, match=f"{PARTS[3]} corrupted"):
        restored(path, world=2)


def test_all_problems_are_named_at_once(path: Path) -> None:
    (path / PARTS[0]).unlink()
    shutil.copy(path / PARTS[1], path / "model_state.tp7.7.part0.pdparams")
    with pytest.raises(SnapshotDamaged) as caught:
        OpenSnapshot(path)
    assert caught.value.problems == (f"{PARTS[0]} missing", "model_state.tp7.7.part0.pdparams extra")
