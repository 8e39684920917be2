"""FastDeploy's own files: its four places in their order, and what is refused because nobody says what the files are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from liveweight.devices.memory import Memory
from liveweight.errors import LiveWeightError, ManifestMismatch, SnapshotNotFound, SnapshotRefused
from liveweight.spec.region import counts
from liveweight.trainer.sources.tensors import torch_dtypes
from liveweight.transports.snapshot.disk.fastdeploy_files import find
from liveweight.transports.snapshot.restore import RestoreResult, restore
from tests.support.layouts import Bytes, view
from tests.support.snapshots import FULL, SPECS, region, same, sharded, weights


def tensors(label: int, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    """A rank's shards as FastDeploy would save them: under their names, contiguous."""
    memory, found = weights(label), {}
    for placement, spec in zip(sharded(rank, world).placements, SPECS, strict=True):
        raw = np.ascontiguousarray(view(memory, placement, spec.dtype.size_bytes)).reshape(-1)
        shape = counts(region(spec, rank, world))
        found[spec.name] = torch.from_numpy(raw).view(torch_dtypes()[spec.dtype]).reshape(shape)
    return found


def write(path: Path, part: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone() for name, tensor in part.items()}, path)


def in_parts(directory: Path, label: int, *, rank: int = 0, world: int = 1, first: int = 0) -> None:
    """One tensor per part, so that there are more than nine of them only with many tensors; numbers from `first` on."""
    for number, (name, tensor) in enumerate(tensors(label, rank, world).items()):
        write(directory / f"model_state.tp{rank}.{rank}.part{first + number}.pdparams", {name: tensor})


def taken(
    directory: Path, *, rank: int = 0, world: int = 1, shared: Path | None = None
) -> tuple[Bytes, RestoreResult]:
    memory = np.zeros(FULL.memories_bytes[0], dtype=np.uint8)
    report = restore(directory, sharded(rank, world), [Memory.from_array(memory)], rank=rank, shared=shared)
    assert isinstance(report, RestoreResult)
    return memory, report


def test_each_place_is_taken_when_those_before_it_have_nothing(tmp_path: Path) -> None:
    here, shared = tmp_path / "model", tmp_path / "shared"
    here.mkdir()
    shared.mkdir()
    write(shared / "model_state.tp0.0.pdparams", tensors(4))
    write(here / "model_state.tp00.pdparams", tensors(3))
    write(here / "model_state.tp0.0.pdparams", tensors(2))
    in_parts(here, 1)
    for label, level in ((1, "parts"), (2, "single"), (3, "legacy"), (4, "shared")):
        memory, report = taken(here, shared=shared)
        assert same(memory, weights(label))
        assert (report.level, report.verified, report.version) == (level, False, None)
        assert len(report.passed_over) == 4 - label
        for file in report.files:
            file.unlink()
    with pytest.raises(SnapshotNotFound) as caught:
        taken(here, shared=shared)
    assert caught.value.places == (
        str(here / "model_state.tp0.0.part*.pdparams"),
        str(here / "model_state.tp0.0.pdparams"),
        str(here / "model_state.tp00.pdparams"),
        str(shared / "model_state.tp0.0.pdparams"),
    )


@pytest.mark.parametrize("first", [0, 1])
def test_parts_may_begin_with_0_or_1_and_come_in_numeric_order(tmp_path: Path, first: int) -> None:
    in_parts(tmp_path, 1, first=first)
    found = find(tmp_path, rank=0, device_id=0, shared=None)
    assert [file.name for file in found.files] == [
        f"model_state.tp0.0.part{first + number}.pdparams" for number in range(len(SPECS))
    ]
    for number in range(8, 13):
        write(tmp_path / f"model_state.tp3.3.part{number}.pdparams", {"x": torch.zeros(1)})
    for number in range(8):
        write(tmp_path / f"model_state.tp3.3.part{number}.pdparams", {"x": torch.zeros(1)})
    numbers = [int(f.name.split("part")[1].split(".")[0]) for f in find(tmp_path, rank=3, device_id=3).files]
    assert numbers == list(range(13))


def test_every_rank_reads_its_own_files(tmp_path: Path) -> None:
    for rank in range(2):
        in_parts(tmp_path, 1, rank=rank, world=2)
    memory = np.zeros(FULL.memories_bytes[0], dtype=np.uint8)
    for rank in range(2):
        restore(tmp_path, sharded(rank, 2), [Memory.from_array(memory)], rank=rank, shared=None)
    assert same(memory, weights(1))


def test_a_gap_in_the_numbers_is_refused(tmp_path: Path) -> None:
    in_parts(tmp_path, 1)
    (tmp_path / "model_state.tp0.0.part2.pdparams").unlink()
    with pytest.raises(SnapshotRefused, match="parts 2 of rank 0 are missing"):
        taken(tmp_path)


def test_parts_that_begin_with_2_are_refused(tmp_path: Path) -> None:
    in_parts(tmp_path, 1, first=2)
    with pytest.raises(SnapshotRefused, match="parts 0, 1"):
        taken(tmp_path)


def test_a_last_part_that_is_missing_shows_by_the_tensors_that_it_had(tmp_path: Path) -> None:
    in_parts(tmp_path, 1)
    (tmp_path / f"model_state.tp0.0.part{len(SPECS) - 1}.pdparams").unlink()
    with pytest.raises(ManifestMismatch, match="scale missing"):
        taken(tmp_path)


@pytest.mark.parametrize("written", ["01", "x", "1 ", ""])
def test_a_part_whose_number_is_ambiguous_is_refused(tmp_path: Path, written: str) -> None:
    in_parts(tmp_path, 1)
    write(tmp_path / f"model_state.tp0.0.part{written}.pdparams", tensors(2))
    with pytest.raises(SnapshotRefused, match="no part's number"):
        taken(tmp_path)


def test_the_old_name_is_rank_0s_alone(tmp_path: Path) -> None:
    write(tmp_path / "model_state.tp01.pdparams", tensors(1, 0, 2))
    with pytest.raises(SnapshotRefused, match="rank 0's by its name, and this is rank 1"):
        taken(tmp_path, rank=1, world=2)


def test_another_layouts_shard_is_refused_by_its_shape(tmp_path: Path) -> None:
    write(tmp_path / "model_state.tp0.0.pdparams", tensors(1, 0, 2))
    with pytest.raises(SnapshotRefused, match=r"is bfloat16\[\d+, \d+\].*another rank's"):
        taken(tmp_path)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    in_parts(tmp_path, 1)
    write(tmp_path / f"model_state.tp0.0.part{len(SPECS)}.pdparams", {"norm": tensors(2)["norm"]})
    with pytest.raises(SnapshotRefused, match=r"norm is in .*part3.* and in .*part6"):
        taken(tmp_path)


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model_state.tp0.0.pdparams", tensors(1) | {"stray": torch.zeros(2)})
    with pytest.raises(ManifestMismatch, match="stray unexpected"):
        taken(tmp_path)


def test_a_pickled_or_half_written_file_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "model_state.tp0.0.pdparams"
    file.write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(SnapshotRefused, match="pickled files are not read"):
        taken(tmp_path)
    write(file, tensors(1))
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(LiveWeightError, match=file.name):
        taken(tmp_path)


def test_ids_of_other_ranks_are_named_when_none_fits(tmp_path: Path) -> None:
    write(tmp_path / "model_state.tp1.234.pdparams", tensors(1))
    write(tmp_path / "model_state.tp12.34.pdparams", tensors(1))
    with pytest.raises(SnapshotNotFound, match="rank 1 with id 234, rank 12 with id 34"):
        taken(tmp_path)
