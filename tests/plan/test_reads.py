"""Read plans: what they fetch makes exactly the copies that were planned, in pieces that fit, however the memories lie."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pytest

from liveweight.errors import MessageInvalid, MissingExtra
from liveweight.plan.copies import plan_copies
from liveweight.plan.reads import LANDING, PIECE_BYTES, PIECE_READS, ReadPlan, plan_reads
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, packed, place
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, box, whole
from liveweight.transports.nixl.arena_location import ArenaLocation, location_from
from liveweight.transports.registry import mode
from liveweight.wire.credentials import Secret

Bytes = npt.NDArray[np.uint8]


def target_of(spec: TensorSpec, region: Region, shape: tuple[int, ...], axes: tuple[int, ...] = ()) -> Layout:
    piece = Piece(tensor=spec, region=region, axes=axes)
    size = int(np.prod(shape)) * spec.dtype.size_bytes
    placements = tuple(place([piece], memory=0, shape=shape))
    return Layout(tensors=(spec,), memories_bytes=(size,), placements=placements)


def weight(rows: int, columns: int) -> TensorSpec:
    return TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(rows, columns))


SPEC = weight(3000, 1024)
SCENES = {
    "whole": target_of(SPEC, whole(SPEC.shape), SPEC.shape),
    "rows": target_of(SPEC, box((500, 2500), (0, 1024)), (2000, 1024)),
    "columns": target_of(SPEC, box((0, 3000), (512, 1024)), (3000, 512)),
    "few columns": target_of(SPEC, box((0, 3000), (0, 3)), (3000, 3)),
    "transposed": target_of(SPEC, whole(SPEC.shape), (1024, 3000), axes=(1, 0)),
    "every third row": target_of(SPEC, box(slice(0, 3000, 3), (0, 1024)), (1000, 1024)),
}


def copied(rows: npt.NDArray[np.int64], source: Bytes, target: Bytes) -> None:
    for _, at, _, to, outer, oa, ob, inner, ia, ib, chunk in rows.tolist():
        shape = (outer, inner, chunk)
        taken = np.ndarray(shape, np.uint8, source.data, at, (oa, ia, 1))
        np.ndarray(shape, np.uint8, target.data, to, (ob, ib, 1))[...] = taken


def carried_out(plan: ReadPlan, source: Bytes, target: Bytes) -> None:
    """As a rank does it: piece by piece, each with a landing that holds rubbish before."""
    read = landed = 0
    for reads_end, landed_end in zip(plan.piece_reads.tolist(), plan.piece_landed.tolist(), strict=True):
        landing = np.full(PIECE_BYTES, 0xEE, dtype=np.uint8)
        for _, at, memory, to, size in plan.reads[read:reads_end].tolist():
            (landing if memory == LANDING else target)[to : to + size] = source[at : at + size]
        copied(plan.landed[landed:landed_end], landing, target)
        read, landed = reads_end, landed_end


@pytest.mark.parametrize("direct", [True, False], ids=["gdr", "rdma"])
@pytest.mark.parametrize("name", SCENES)
def test_reads_make_the_copies_that_were_planned(name: str, direct: bool) -> None:
    source_layout, target_layout = packed([SPEC]), SCENES[name]
    rows = plan_copies(source_layout, target_layout).rows
    source = np.random.default_rng(1).integers(0, 256, source_layout.memories_bytes[0], dtype=np.uint8)
    wanted, got = (np.zeros(target_layout.memories_bytes[0], dtype=np.uint8) for _ in range(2))
    copied(rows, source, wanted)
    plan = plan_reads(rows, direct=direct)
    carried_out(plan, source, got)
    assert np.array_equal(got, wanted)
    counts = np.diff(plan.piece_reads, prepend=0)
    assert counts.max() <= PIECE_READS
    ends = np.cumsum(plan.reads[:, 4])[plan.piece_reads - 1]
    assert np.diff(ends, prepend=0).max() <= PIECE_BYTES
    assert direct or (plan.reads[:, 2] == LANDING).all()


@pytest.mark.parametrize(
    ("name", "lands"),
    [("whole", False), ("rows", False), ("few columns", True), ("transposed", True)],
)
def test_long_runs_go_straight_to_the_shadow_and_many_short_ones_by_a_landing(name: str, lands: bool) -> None:
    assert plan_reads(plan_copies(packed([SPEC]), SCENES[name]).rows, direct=True).lands == lands


def test_what_a_source_says_of_its_memory_is_checked_before_anything_is_read() -> None:
    good = ArenaLocation(address=1 << 20, size_bytes=64, description=b"nixl")
    assert location_from(good.encode(), 64) == good
    bad = [
        ArenaLocation(address=1 << 20, size_bytes=65, description=b"nixl"),
        ArenaLocation(address=0, size_bytes=64, description=b"nixl"),
        ArenaLocation(address=(1 << 63) - 64, size_bytes=64, description=b"nixl"),
        ArenaLocation(address=1 << 20, size_bytes=64, description=b""),
        ArenaLocation(address=1 << 20, size_bytes=64, description=bytes((1 << 20) + 1)),
    ]
    for entry in [wrong.encode() for wrong in bad] + [b"", b"rubbish", good.encode() + b"x"]:
        with pytest.raises(MessageInvalid):
            location_from(entry, 64)


@pytest.mark.parametrize("name", ["gdr", "rdma"])
def test_without_the_extra_a_mode_is_refused_with_the_pip_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingExtra, match=r"pip install 'liveweight\[nixl\]'"):
        mode(name).transport_source(tmp_path_factory.mktemp("s"), Secret.generate())
