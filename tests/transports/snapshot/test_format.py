"""What a snapshot looks like on disk: names, blocks, headers that safetensors reads, and files that say of themselves what they are."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from liveweight.errors import LayoutInvalid, SnapshotDamaged
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, contiguous_strides, packed
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.spec.region import Region, box, count, counts, whole
from liveweight.transports.snapshot.disk import names
from liveweight.transports.snapshot.disk.format import (
    CommitFile,
    blocks,
    decode_commit,
    decode_manifest,
    encode_commit,
)
from liveweight.transports.snapshot.disk.parts import plan_parts, plan_windows
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import WriteSettings
from tests.support.layouts import regions
from tests.support.snapshots import FULL, SPECS, save_label, weights


def test_names_are_those_of_fastdeploy() -> None:
    assert names.part_name(1, 234, 0) == "model_state.tp1.234.part0.pdparams"
    assert names.single_name(12, 34) == "model_state.tp12.34.pdparams"
    assert names.legacy_name(3) == "model_state.tp03.pdparams"
    assert names.part_of("model_state.tp1.234.part10.pdparams") == ((1, 234), "10")
    assert names.part_of("model_state.tp1.234.pdparams") is None
    assert names.single_of("model_state.tp12.34.pdparams") == (12, 34)
    assert names.single_of("model_state.tp1234.pdparams") is None


@pytest.mark.parametrize("written", ["", "01", "-1", "x", "1.5", "²"])
def test_what_no_writer_of_parts_writes_is_no_number(written: str) -> None:
    assert names.part_number(written) is None


@given(st.integers(0, 10**7), st.text(max_size=200))
def test_a_directorys_name_is_a_file_name_that_gives_its_number_back(sequence: int, label: str) -> None:
    name = names.directory_name(sequence, label)
    assert "/" not in name and len(name) < 128 and name.isascii()
    assert names.sequence_of(name) == sequence


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(regions(shape)), draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 64))


@given(cuts())
@settings(max_examples=300)
def test_blocks_tile_a_region_in_the_order_of_its_storage(
    cut: tuple[tuple[int, ...], Region, int, int],
) -> None:
    shape, region, item, limit = cut
    found = blocks(region, item, limit)
    flat = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)

    def elements(part: Region) -> list[int]:
        return (
            flat[tuple(slice(s.start, s.start + s.count * s.step, s.step) for s in part)].reshape(-1).tolist()
        )

    assert list(itertools.chain(*map(elements, found))) == (elements(region) if count(region) else [])
    assert all(count(part) * item <= max(limit, item) for part in found)


def test_a_tensor_is_never_cut_over_parts_and_windows_are_never_larger_than_a_block() -> None:
    parts = plan_parts(FULL, 9_000)
    assert [piece.key for part in parts for piece in part if piece.key == "embed"] == ["embed"]
    assert all(len(part) == 1 or sum(piece.size_bytes for piece in part) <= 9_000 for part in parts)
    for part in parts:
        for block in plan_windows(part, 1000):
            assert block.offset_bytes + block.size_bytes <= 1000


def test_several_regions_of_a_tensor_have_keys_of_their_own_and_equal_ones_are_written_once() -> None:
    spec = TensorSpec(name="w", dtype=DType.UINT8, shape=(4, 4))
    other = TensorSpec(name="w#1", dtype=DType.UINT8, shape=(2,))
    top, bottom = box((0, 2), (0, 4)), box((2, 4), (0, 4))

    def placement(tensor: TensorSpec, region: Region) -> Placement:
        return Placement(
            name=tensor.name,
            region=region,
            memory=0,
            offset_bytes=0,
            strides_bytes=contiguous_strides(counts(region), tensor.dtype),
        )

    placements = (
        placement(spec, top),
        placement(spec, bottom),
        placement(spec, top),
        placement(other, whole((2,))),
    )
    layout = Layout(tensors=(spec, other), memories_bytes=(16,), placements=placements)
    (part,) = plan_parts(layout, 1 << 20)
    assert [(piece.key, piece.region) for piece in part] == [
        ("w", top),
        ("w#2", bottom),
        ("w#1", whole((2,))),
    ]


def test_parts_are_files_that_safetensors_reads(tmp_path: Path) -> None:
    path, memory = save_label(Store(tmp_path), 3), weights(3)
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.pdparams"):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
    assert set(found) == {spec.name for spec in SPECS}
    for placement, spec in zip(FULL.placements, SPECS, strict=True):
        tensor = found[spec.name]
        assert tuple(tensor.shape) == spec.shape
        wanted = memory[placement.offset_bytes : placement.offset_bytes + spec.size_bytes].tobytes()
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == wanted


def test_a_commit_file_is_read_back_and_any_changed_byte_of_it_is_refused() -> None:
    commit = CommitFile(
        snapshot="a" * 32,
        version=Version(run="r", label="step_1", digest="0" * 32),
        created_s=12.0,
        manifest=Manifest(tensors=SPECS),
        ranks=(),
        weights_bytes=5,
    )
    data = encode_commit(commit)
    assert decode_commit(data, "here") == commit
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(SnapshotDamaged, match="here"):
            decode_commit(bytes(damaged), "here")


BEFORE_NUMBERS = (
    b'{"xxh3":"f74b856773c5b7bb","commit":{"snapshot":"aa","version":{"run":"r","label":"step_1","digest":'
    b'"00000000000000000000000000000000"},"created_s":12.0,"manifest":{"tensors":[{"name":"w","dtype":"float32",'
    b'"shape":[1],"aliases":[],"digest":null}],"format":1},"ranks":[],"weights_bytes":4,"format":1}}'
)
"""A commit file as it was written when versions had no numbers."""


def test_a_commit_file_has_the_versions_number_and_one_from_before_is_still_read() -> None:
    old = decode_commit(BEFORE_NUMBERS, "here")
    assert (old.version, old.version.number) == (Version(run="r", label="step_1", digest="0" * 32), None)
    numbered = msgspec.structs.replace(old, version=msgspec.structs.replace(old.version, number=7))
    assert decode_commit(encode_commit(numbered), "here").version.number == 7


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    for decode in (decode_commit, decode_manifest):
        with pytest.raises(SnapshotDamaged, match="here"):
            decode(data, "here")


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    path = save_label(Store(tmp_path), 1)
    data = msgspec.json.decode((path / names.manifest_name(0, 0)).read_bytes())
    data["format"] = 2
    with pytest.raises(SnapshotDamaged, match="format 2"):
        decode_manifest(msgspec.json.encode(data), "here")


def test_parts_of_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="parts of 0"):
        WriteSettings(part_bytes=0)
    with pytest.raises(LayoutInvalid, match="would leave none"):
        Store(Path("nowhere")).prune(0)


def test_a_tensor_called_as_the_format_calls_its_metadata_has_another_key() -> None:
    layout = packed([TensorSpec(name="__metadata__", dtype=DType.UINT8, shape=(2,))])
    assert [piece.key for part in plan_parts(layout, 10) for piece in part] == ["__metadata__#1"]
