"""Saved in any layout, restored in any other, bit for bit: regions decide, not ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.spec.digest import digest_array
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import TensorSpec, Version
from liveweight.spec.region import Region
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, WriteSettings
from liveweight.transports.snapshot.restore import RestoreResult, restore
from liveweight.transports.snapshot.save import SavedSnapshot, save
from liveweight.transports.snapshot.verify import verify
from tests.support.layouts import Full, filled, fulls, placed, regions, tilings, view
from tests.support.snapshots import FULL, SETTINGS, restored, same, save_label, sharded, weights


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Full], list[Layout], Layout, WriteSettings]:
    """Tensors, ranks that tile them between them (some regions on several ranks), a target with boxes of its own, sizes of parts."""
    tensors = {name: draw(fulls(name=name, max_side=6)) for name in "abc"[: draw(st.integers(1, 3))]}
    world = draw(st.integers(1, 3))
    shares: list[list[tuple[TensorSpec, Region]]] = [[] for _ in range(world)]
    for full in tensors.values():
        for tile in draw(tilings(full.spec.shape)):
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                shares[rank].append((full.spec, tile))
    sources = [draw(placed(share)) for share in shares if share]
    owned = [
        (full.spec, draw(regions(full.spec.shape)))
        for full in tensors.values()
        for _ in range(draw(st.integers(0, 2)))
    ]
    sizes = WriteSettings(
        part_bytes=draw(st.integers(1, 4000)), block_bytes=draw(st.integers(8, 500)), durable=False
    )
    return tensors, sources, draw(placed(owned)), sizes


@given(scene=scenes())
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_any_layout_comes_back_in_any_other_and_nothing_around_it_changes(
    scene: tuple[dict[str, Full], list[Layout], Layout, WriteSettings],
) -> None:
    tensors, sources, target, sizes = scene
    images = [
        Image(layout=source, memories=[Memory.from_array(m) for m in filled(source, tensors)])
        for source in sources
    ]
    shadow = [np.full(size, 7, dtype=np.uint8) for size in target.memories_bytes]
    wanted = [array.copy() for array in shadow]
    for placement in target.placements:
        full = tensors[placement.name]
        part = full.part(placement.region)
        if part.size:
            view(wanted[placement.memory], placement, full.spec.dtype.size_bytes)[...] = part
    with tempfile.TemporaryDirectory(prefix="lw-") as place:
        saved = save(Store(Path(place)), Version(run="r", label="x"), images, settings=sizes)
        assert isinstance(saved, SavedSnapshot)
        report = restore(saved.path, target, [Memory.from_array(array) for array in shadow], shared=None)
        assert isinstance(report, RestoreResult) and report.verified
        assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))
        for spec in saved.commit.manifest:
            full = tensors[spec.name]
            assert spec.digest == digest_array(full.raw, spec.dtype, spec.shape)
        with OpenSnapshot(saved.path) as snapshot:
            verify(snapshot)


@pytest.mark.parametrize("into", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_tensor_parallel_ranks_come_back_as_any_other_number(tmp_path: Path, world: int, into: int) -> None:
    path = save_label(Store(tmp_path), 5, world=world)
    found, reports = restored(path, world=into)
    assert same(found, weights(5))
    assert all(report.level == "parts" and report.verified for report in reports)
    assert all(report.version is not None and report.version.label == 5 for report in reports)


def test_versions_of_one_content_have_one_digest_whatever_their_layout(tmp_path: Path) -> None:
    digests = set()
    for world in (1, 2, 4):
        with OpenSnapshot(save_label(Store(tmp_path), 9, world=world)) as snapshot:
            digests.add(snapshot.commit.version.digest)
    assert len(digests) == 1 and None not in digests


def test_a_target_that_wants_more_than_was_saved_is_refused_by_name(tmp_path: Path) -> None:
    path = save_label(Store(tmp_path), 1)
    other = tuple(
        msgspec.structs.replace(spec, name="absent") if spec.name == "norm" else spec for spec in FULL.tensors
    )
    placements = tuple(
        msgspec.structs.replace(p, name="absent") if p.name == "norm" else p for p in FULL.placements
    )
    layout = Layout(tensors=other, memories_bytes=FULL.memories_bytes, placements=placements)
    with pytest.raises(ManifestMismatch, match="absent missing"):
        restore(path, layout, [Memory.from_array(weights(0))])


def test_regions_that_do_not_cover_their_tensor_are_never_committed(tmp_path: Path) -> None:
    image = Image(layout=sharded(0, 2), memories=[Memory.from_array(weights(1))])
    store = Store(tmp_path)
    with pytest.raises(LayoutInvalid, match="embed"):
        save(store, Version(run="r", label=1), [image], settings=SETTINGS)
    assert store.listed() == []
