"""`ipc` between devices, over a double of the CUDA driver: who may read what, and how many handles that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from liveweight.devices.cuda import CudaDevice
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, MessageInvalid, OfferChanged, Unavailable, WrongState
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.ipc.device_arena import BorrowedArena, DeviceArena
from liveweight.transports.ipc.reader import IpcReader
from liveweight.transports.ipc.source import IpcSource
from tests.support.fake_cuda import GPUS, FakeDriver, fake_cuda
from tests.support.wire import SECRET, soon

LAYOUT = packed([TensorSpec(name="w", dtype=DType.FLOAT32, shape=(40, 10))])
SIZE = LAYOUT.memories_bytes[0]


class Source:
    """A transport source on a device, with one arena that is offered."""

    def __init__(self, directory: Path, device: Device, layout: Layout = LAYOUT) -> None:
        self.layout = layout
        self.transport_source = IpcSource(directory, SECRET, device=device)
        self.arena = self.transport_source.allocate(layout.memories_bytes[0])
        self.offer = self.transport_source.offer(layout, [self.arena], "frozen")

    def close(self) -> None:
        self.transport_source.close()
        self.arena.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def source_on(device: Device, directory: Path, stack: ExitStack) -> Source:
    source = Source(directory, device)
    stack.callback(source.close)
    return source


def reader_on(device: Device, stack: ExitStack) -> IpcReader:
    return stack.enter_context(IpcReader(SECRET, device.choose().kernels, device=device))


def read(reader: IpcReader, source: Source, device: Device) -> torch.Tensor:
    (shadow,) = device.allocate([SIZE], "a shadow")
    reading = reader.bind(source.offer, source.layout, [Memory.of_view(shadow)], soon())
    reading.check()
    reading.read(0, len(reading.rows))
    reading.check()
    return shadow


def driver(device: CudaDevice) -> FakeDriver:
    assert isinstance(device._driver, FakeDriver)
    return device._driver


def test_a_reader_takes_one_handle_however_many_rounds_it_reads(short_path: Path, stack: ExitStack) -> None:
    here, there = fake_cuda(short_path), fake_cuda(short_path)
    source, reader = source_on(here, short_path, stack), reader_on(there, stack)
    for number in range(4):
        source.arena.raise_generation()
        source.arena.memory.tensor().fill_(number)
        source.offer = source.transport_source.offer(LAYOUT, [source.arena], "frozen")
        assert read(reader, source, there).eq(number).all()
        assert (reader.requests, driver(there).unopened()) == (1, 0)
    second = reader_on(fake_cuda(short_path), stack)
    assert read(second, source, there).eq(3).all()
    assert driver(there).unopened() == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ("cpu", "cuda:0", f"source's memory is on cpu, and this rank reads on GPU {GPUS[0]}"),
        ("cuda:0", "cpu", f"source's memory is on GPU {GPUS[0]}, and this rank reads on cpu"),
        ("cuda:0", "cuda:1", f"source's memory is on GPU {GPUS[0]}, and this rank reads on GPU {GPUS[1]}"),
    ],
)
def test_a_reader_on_another_device_is_refused_before_a_handle_is_made(
    ours: str, theirs: str, names: str, short_path: Path, stack: ExitStack
) -> None:
    here, there = (CPU if n == "cpu" else fake_cuda(short_path, n) for n in (ours, theirs))
    source, reader = source_on(here, short_path, stack), reader_on(there, stack)
    with pytest.raises(LayoutInvalid, match=names):
        read(reader, source, there)
    assert not list(short_path.glob("torch_*"))
    assert read(reader_on(here, stack), source, here).numel() == SIZE  # and nobody else is harmed


def test_the_same_gpu_under_another_index_is_read(short_path: Path, stack: ExitStack) -> None:
    there = CudaDevice("cuda:0", FakeDriver(short_path, GPUS[1:]))
    source = source_on(fake_cuda(short_path, "cuda:1"), short_path, stack)
    source.arena.memory.tensor().fill_(9)
    assert read(reader_on(there, stack), source, there).eq(9).all()


def test_an_offer_waits_for_what_is_queued_and_a_read_is_queued_on_a_side_stream(
    short_path: Path, stack: ExitStack
) -> None:
    here, there = fake_cuda(short_path, "cuda:1"), fake_cuda(short_path, "cuda:1")
    source = source_on(here, short_path, stack)
    before = len(driver(here).synchronised)
    source.transport_source.offer(LAYOUT, [source.arena], "frozen")
    assert driver(here).synchronised[before:] == [1]
    read(reader_on(there, stack), source, there)
    assert set(driver(there).runs) == {1}


def test_a_device_that_does_not_lend_ends_no_thread_of_the_source(
    short_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fake_cuda(short_path)
    source, reader = source_on(here, short_path, stack), reader_on(here, stack)

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(FakeDriver, "share", refuse)
        with pytest.raises(Exception, match="cannot be lent: operation not supported"):
            read(reader, source, here)
    assert read(reader, source, here).numel() == SIZE


def test_an_arena_that_was_closed_lends_nothing_and_revokes_its_readers(
    short_path: Path, stack: ExitStack
) -> None:
    here = fake_cuda(short_path)
    source, reader = source_on(here, short_path, stack), reader_on(here, stack)
    (shadow,) = here.allocate([SIZE], "a shadow")
    reading = reader.bind(source.offer, LAYOUT, [Memory.of_view(shadow)], soon())
    source.arena.close()
    with pytest.raises(OfferChanged):
        reading.check()
    reader.forget(source.offer.source)
    with pytest.raises(WrongState, match="closed"):
        reader.bind(source.offer, LAYOUT, [Memory.of_view(shadow)], soon())


def test_arenas_of_two_devices_are_not_one_layout(short_path: Path, stack: ExitStack) -> None:
    one, other = SharedArena(SIZE), DeviceArena(SIZE, fake_cuda(short_path))
    stack.callback(one.close)
    stack.callback(other.close)
    transport_source = stack.enter_context(IpcSource(short_path, SECRET))
    twice = Layout(tensors=LAYOUT.tensors, memories_bytes=(SIZE, SIZE), placements=LAYOUT.placements)
    with pytest.raises(LayoutInvalid, match=f"several devices: cpu, GPU {GPUS[0]}"):
        transport_source.offer(twice, [one, other], "frozen")


def test_a_source_that_sends_no_handle_is_refused(short_path: Path) -> None:
    with SharedArena(0) as page, pytest.raises(MessageInvalid, match="no memory that cuda:0 can open"):
        BorrowedArena(page.descriptor, b"", SIZE, fake_cuda(short_path))


def test_the_host_has_no_arena_by_handle() -> None:
    with DeviceArena(10, CPU) as arena, pytest.raises(LayoutInvalid, match="not lent by handle"):
        arena.handle()


def test_a_handle_that_does_not_open_fails_the_round_and_not_the_reader(
    short_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fake_cuda(short_path)
    source, reader = source_on(here, short_path, stack), reader_on(here, stack)

    def refuse(*_: object) -> None:
        raise RuntimeError("invalid resource handle")

    with monkeypatch.context() as patch:
        patch.setattr(FakeDriver, "open", refuse)
        with pytest.raises(Unavailable, match="cannot open the handle"):
            read(reader, source, here)
    assert read(reader, source, here).numel() == SIZE
