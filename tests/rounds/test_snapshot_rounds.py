"""Rounds over files: transfer mode `ipc_snapshot`, from a publisher to a rank that serves, and from a store without any trainer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from liveweight.devices.kernels import choose
from liveweight.devices.memory import Memory
from liveweight.errors import (
    OutOfSpace,
    Refused,
    RoundFailed,
    SnapshotDamaged,
    SnapshotNotFound,
    VersionNotOffered,
)
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.rounds.replica import WireReplica
from liveweight.spec.digest import from_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec, Version
from liveweight.trainer.sources.tensors import spec_of
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image
from liveweight.transports.snapshot.offer_record import offer_of
from liveweight.transports.snapshot.reader import SnapshotReader
from liveweight.transports.snapshot.save import SavedSnapshot, save
from liveweight.transports.snapshot.source import SnapshotSource
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages import Describe, Open
from tests.support.stepping import engine, publisher, serving
from tests.support.wire import SECRET, leaving_nothing, soon

BYTES = TensorSpec(name="w", dtype=DType.UINT8, shape=(100,))


class Net(nn.Module):
    """What the engine holds, as a trainer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        self.b = nn.Parameter(torch.ones(3), requires_grad=False)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.pdparams"))


def test_rounds_go_over_files_verified_and_leave_none(short_path: Path) -> None:
    live, net = engine(), Net()
    with leaving_nothing(), serving(live, short_path) as address:
        with publisher(net, address, short_path, transfer_mode="ipc_snapshot") as sender:
            for step in range(1, 4):
                net.w.fill_(step)
                report = sender.publish(step)
                assert (report.offer, report.verified) == ("frozen", True)
                assert torch.equal(live["w"], net.w) and torch.equal(live["b"], net.b)
                assert files(short_path) == ["model_state.tp0.0.part0.pdparams"]  # of this version alone
            sender.undo()
            assert torch.equal(live["w"], torch.full((4, 3), 2.0))
        assert files(short_path) == []


def test_a_part_that_is_damaged_on_disk_fails_the_round_by_name_and_the_next_one_is_whole(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, net = engine(), Net()
    offer = SnapshotSource.offer

    def damaging(transport_source: SnapshotSource, *arguments: object) -> object:
        made = offer(transport_source, *arguments)  # type: ignore[arg-type]
        (part,) = short_path.rglob("*.pdparams")
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        return made

    with (
        serving(live, short_path) as address,
        publisher(net, address, short_path, transfer_mode="ipc_snapshot") as sender,
    ):
        sender.publish(1)
        monkeypatch.setattr(SnapshotSource, "offer", damaging)
        net.w.fill_(2)
        with pytest.raises(RoundFailed, match=r"part0.pdparams corrupted") as failed:
            sender.publish(2)
        assert (failed.value.code, failed.value.step, failed.value.serving) == ("LW-404", "stage", "1")
        assert torch.equal(live["w"], torch.ones(4, 3))
        monkeypatch.undo()
        sender.publish(2)
        assert torch.equal(live["w"], net.w)


def test_a_disk_without_room_fails_the_offer_and_the_engine_serves_on(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, net = engine(), Net()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        serving(live, short_path) as address,
        publisher(net, address, short_path, transfer_mode="ipc_snapshot") as sender,
    ):
        sender.publish(1)
        net.w.fill_(2)
        monkeypatch.setattr("liveweight.transports.snapshot.disk.writer.write_all", full)
        with pytest.raises(OutOfSpace, match="No space left"):
            sender.publish(2)
        assert torch.equal(live["w"], torch.ones(4, 3))
        monkeypatch.undo()
        sender.publish(3)
        assert torch.equal(live["w"], net.w)


def test_live_offers_are_refused_before_anything_is_started(short_path: Path) -> None:
    with pytest.raises(Refused, match="has no live offers"):
        publisher(Net(), "ipc:///nowhere", short_path, transfer_mode="ipc_snapshot", offer="live")


def saved(place: Path, net: Net) -> OpenSnapshot:
    """A trainer's weights in a store, as its last snapshot."""
    tensors = {"w": net.w, "b": net.b}
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    layout = packed(specs)
    memory = np.zeros(layout.memories_bytes[0], dtype=np.uint8)
    for placement, tensor in zip(layout.placements, tensors.values(), strict=True):
        raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        memory[placement.offset_bytes : placement.offset_bytes + len(raw)] = raw
    image = Image(layout=layout, memories=[Memory.from_array(memory)])
    done = save(Store(place), Version(run="before", label="step_7"), [image])
    assert isinstance(done, SavedSnapshot)
    return OpenSnapshot(done.path)


def test_a_snapshot_of_a_store_is_an_offer_that_a_round_reads_without_a_trainer(short_path: Path) -> None:
    live, net = engine(), Net()
    net.w.fill_(7)
    with saved(short_path / "store", net) as snapshot, serving(live, short_path) as address:
        commit = snapshot.commit
        replica = WireReplica(address, load_or_create_secret(short_path / "secret"))
        try:
            manifest = commit.manifest.without_digests()
            replica.describe(Describe(structure="snapshot", manifest=manifest), soon())
            opened = replica.open(
                Open(
                    publisher="recovery",
                    version=commit.version,
                    structure="snapshot",
                    digests=lanes_to_bytes(
                        np.stack([from_hex(spec.digest or "") for spec in commit.manifest])
                    ),
                    offer=offer_of(snapshot),
                    verify=True,
                    timeout_s=20.0,
                ),
                soon(),
            )
            assert opened.round is not None
            assert replica.status(opened.round, "verified", soon()).fault is None
            replica.vote(opened.round, 10.0, soon())
            replica.commit(opened.round, soon())
        finally:
            replica.close()
        assert torch.equal(live["w"], net.w) and torch.equal(live["b"], net.b)


def test_files_are_readable_after_their_source_was_killed_and_the_next_transport_source_removes_them(
    tmp_path: Path,
) -> None:
    spec = packed([BYTES])
    transport_source = SnapshotSource(tmp_path, SECRET)
    arena = transport_source.allocate(spec.memories_bytes[0])
    arena.memory.bytes()[:] = 5
    offer = transport_source.offer(spec, [arena], "frozen")
    # As a kill would leave it: the lock is gone, the files are not.
    assert transport_source._lock is not None
    os.close(transport_source._lock)
    transport_source._lock = None
    shadow = np.zeros(spec.memories_bytes[0], dtype=np.uint8)
    with SnapshotReader(SECRET, choose().kernels) as reader:
        reading = reader.bind(offer, spec, [Memory.from_array(shadow)], soon())
        reading.check()
        other = SnapshotSource(tmp_path, SECRET)
        assert not Path(offer.source.removeprefix("file://")).exists()
        reading.read(0, len(reading.rows))  # what was open stays readable
        assert (shadow[:100] == 5).all()
        other.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_offers_are_replaced_while_a_rank_binds_and_it_reads_one_of_them_whole(tmp_path: Path) -> None:
    layout = packed([BYTES])
    stop = threading.Event()
    with (
        SnapshotSource(tmp_path, SECRET) as transport_source,
        SnapshotReader(SECRET, choose().kernels) as reader,
    ):
        arena = transport_source.allocate(layout.memories_bytes[0])
        current = [transport_source.offer(layout, [arena], "frozen")]

        def change() -> None:
            value = 0
            while not stop.is_set():
                value = value % 250 + 1
                arena.raise_generation()
                arena.memory.bytes()[:] = value
                current[0] = transport_source.offer(layout, [arena], "frozen")

        changing = threading.Thread(target=change)
        changing.start()
        whole = 0
        try:
            while whole < 20:
                shadow = np.zeros(layout.memories_bytes[0], dtype=np.uint8)
                try:
                    reading = reader.bind(current[0], layout, [Memory.from_array(shadow)], soon())
                    reading.read(0, len(reading.rows))
                except (SnapshotDamaged, SnapshotNotFound, VersionNotOffered):
                    continue
                assert len(set(shadow[:100].tolist())) == 1
                whole += 1
        finally:
            stop.set()
            changing.join()
        arena.close()
