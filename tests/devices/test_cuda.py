"""CUDA: handles and names anywhere, lending over a double of the driver, and over the driver itself only where a GPU is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices import cuda
from liveweight.devices.cuda import CudaDevice, device_index
from liveweight.devices.cuda_handle import HANDLE_BYTES, CudaHandle, decode_handle, encode_handle
from liveweight.devices.device import open_device
from liveweight.devices.memory import Memory
from liveweight.devices.native_kernels import NativeKernels
from liveweight.devices.torch_kernels import TorchKernels, device_memory
from liveweight.errors import LayoutInvalid, MessageInvalid, MessageTooLarge, Unavailable
from liveweight.plan.freezes import plan_freeze
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec
from tests.support.fake_cuda import GPUS, FakeDriver, fake_cuda

REASON = cuda.available()
needs_gpu = pytest.mark.skipif(REASON is not None, reason="no GPU")
needs_none = pytest.mark.skipif(REASON is None, reason="needs a machine without CUDA")

HANDLE = CudaHandle(
    gpu="GPU-8f2a2c0e-1b7a-4c5e-9a3e-0d5f4f6f7a10",
    size_bytes=1 << 30,
    offset_bytes=512,
    memory=b"\x03c" + bytes(64),
    counter="/torch_4711_123456789_0",
    counter_offset=17,
    event=bytes(64),
    waits=True,
)


def raw(**fields: object) -> bytes:
    """A handle's bytes with other fields, whatever they are."""
    values = {name: getattr(HANDLE, name) for name in HANDLE.__struct_fields__} | fields
    return msgspec.msgpack.encode(["cuda_ipc", *values.values()])


def test_a_handle_comes_back_as_it_was_sent() -> None:
    assert decode_handle(encode_handle(HANDLE)) == HANDLE
    assert decode_handle(raw()) == HANDLE
    assert len(encode_handle(HANDLE)) < 300


WRONG: dict[str, dict[str, object]] = {
    "no gpu": {"gpu": ""},
    "no bytes": {"size_bytes": 0},
    "a negative size": {"size_bytes": -1},
    "a size beyond any memory": {"size_bytes": 1 << 60},
    "a negative offset": {"offset_bytes": -1},
    "an offset beyond any memory": {"offset_bytes": (1 << 64) - 1},
    "a short memory handle": {"memory": bytes(63)},
    "a text as memory handle": {"memory": "c" * 66},
    "a file of counters elsewhere": {"counter": "/other"},
    "a path of counters": {"counter": "/torch_1/../x"},
    "counters with an end inside": {"counter": "/torch_1\0x"},
    "counters with a line's end": {"counter": "/torch_1\n"},
    "a counter beyond its file": {"counter_offset": 10_000},
    "a counter before its file": {"counter_offset": -1},
    "a short event": {"event": bytes(63)},
    "a long event": {"event": bytes(65)},
    "a number as flag": {"waits": 1},
    "one field more": {"more": 1},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_handle_that_torch_would_not_check_is_refused(case: str) -> None:
    with pytest.raises(MessageInvalid):
        decode_handle(raw(**WRONG[case]))


@pytest.mark.parametrize(
    "garbage", [b"", b"\x00", b"garbage", bytes(100), b"\x91" * 100_000, msgspec.msgpack.encode(["other"])]
)
def test_garbage_is_no_handle(garbage: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_handle(garbage)


def test_a_handle_that_is_cut_or_continued_is_refused() -> None:
    encoded = encode_handle(HANDLE)
    for end in range(len(encoded)):
        with pytest.raises(MessageInvalid):
            decode_handle(encoded[:end])
    with pytest.raises(MessageInvalid):
        decode_handle(encoded + b"\x00")


def test_a_handle_that_is_too_large_is_neither_made_nor_read() -> None:
    large = msgspec.structs.replace(HANDLE, memory=bytes(HANDLE_BYTES))
    with pytest.raises(MessageTooLarge):
        encode_handle(large)
    with pytest.raises(MessageTooLarge):
        decode_handle(bytes(HANDLE_BYTES + 1))


@given(garbage=st.binary(max_size=400), cut=st.integers(0, 250))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_handle_or_refused_as_a_message(garbage: bytes, cut: int) -> None:
    for some in (garbage, encode_handle(HANDLE)[:cut] + garbage):
        try:
            assert isinstance(decode_handle(some), CudaHandle)
        except MessageInvalid as error:
            assert "no CUDA handle" in str(error)


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:11", 11), (torch.device("cuda", 1), 1)])
def test_a_device_is_named_with_its_index(device: str | torch.device, index: int) -> None:
    assert device_index(device) == index


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
def test_a_missing_index_is_refused_and_not_guessed(device: str | torch.device) -> None:
    with pytest.raises(ValueError, match="device cuda has no index: name one, as in cuda:0"):
        device_index(device)


@pytest.mark.parametrize(
    "device", ["cpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "1", "", torch.device("cpu")]
)
def test_what_is_no_cuda_device_is_refused_by_name(device: str | torch.device) -> None:
    with pytest.raises(ValueError, match=f"device {device} is no CUDA device"):
        device_index(device)


@needs_none
def test_the_reason_is_said_in_words() -> None:
    built = torch.version.cuda is not None or torch.version.hip is not None
    assert cuda.available() == (
        "torch finds no CUDA driver or no CUDA device" if built else "torch was built without CUDA"
    )


def test_without_torch_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cuda.available() == "torch is not installed"
    with pytest.raises(Unavailable, match="cuda:0 cannot be used here: torch is not installed"):
        open_device("cuda:0")


@needs_none
def test_without_cuda_a_device_says_why() -> None:
    with pytest.raises(Unavailable, match=f"cuda:0 cannot be used here: {REASON}"):
        open_device("cuda:0")


def test_a_device_that_is_not_there_is_refused(short_path: Path) -> None:
    with pytest.raises(Unavailable, match="there is no cuda:2: torch finds 2 CUDA devices"):
        fake_cuda(short_path, "cuda:2")


# Lending, over a double of the driver.


def lent(directory: Path, name: str = "cuda:0") -> tuple[torch.Tensor, bytes]:
    device = fake_cuda(directory, name)
    (part,) = device.allocate([100], "a test")
    return part, device.lend(Memory.of_view(part))


def test_what_is_lent_is_read_and_not_written_by_the_one_who_borrows(short_path: Path) -> None:
    part, handle = lent(short_path)
    borrowed = fake_cuda(short_path).borrow(handle, 100)
    part[:] = torch.arange(100)
    assert borrowed.bytes().tolist() == list(range(100))
    assert not borrowed.writable


def test_a_handle_opens_once_and_the_next_reader_needs_another(short_path: Path) -> None:
    device = fake_cuda(short_path)
    (part,) = device.allocate([100], "a test")
    memory, reader = Memory.of_view(part), fake_cuda(short_path)
    first, second = device.lend(memory), device.lend(memory)
    reader.borrow(first, 100)
    with pytest.raises(Unavailable, match="cannot open the handle"):
        reader.borrow(first, 100)
    reader.borrow(second, 100)


def test_memory_of_another_gpu_is_refused_naming_both(short_path: Path) -> None:
    _, handle = lent(short_path, "cuda:1")
    with pytest.raises(LayoutInvalid, match=f"is on GPU {GPUS[1]}, but cuda:0 is GPU {GPUS[0]}"):
        fake_cuda(short_path, "cuda:0").borrow(handle, 100)


def test_a_gpu_is_known_by_its_uuid_and_not_by_its_index(short_path: Path) -> None:
    _, handle = lent(short_path, "cuda:1")
    masked = CudaDevice("cuda:0", FakeDriver(short_path, GPUS[1:]))  # as CUDA_VISIBLE_DEVICES=1 shows it
    assert masked.identity == fake_cuda(short_path, "cuda:1").identity
    assert masked.borrow(handle, 100).size_bytes == 100


@pytest.mark.parametrize("size", [99, 101])
def test_a_handle_of_another_size_is_refused_before_it_is_opened(short_path: Path, size: int) -> None:
    _, handle = lent(short_path)
    reader = fake_cuda(short_path)
    with pytest.raises(MessageInvalid, match=f"a handle of 100 bytes for {size}"):
        reader.borrow(handle, size)
    reader.borrow(handle, 100)


def test_what_torch_opens_is_looked_at(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, handle = lent(short_path)
    monkeypatch.setattr(FakeDriver, "open", lambda *_: torch.zeros(7, dtype=torch.uint8).untyped_storage())
    with pytest.raises(Unavailable, match="asked for 100 bytes on cuda:0, torch opened 7 on cpu"):
        fake_cuda(short_path).borrow(handle, 100)


def test_memory_that_the_driver_does_not_share_is_said_to_be_so(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(FakeDriver, "share", refuse)
    with pytest.raises(Unavailable, match="memory of cuda:0 cannot be lent: operation not supported"):
        lent(short_path)


# With a GPU.


@needs_gpu
def test_memory_is_had_on_every_device_that_is_named() -> None:
    for index in range(torch.cuda.device_count()):
        (part,) = open_device(f"cuda:{index}").allocate([1000], "a test")
        assert part.device == torch.device("cuda", index)
    with pytest.raises(Unavailable, match="there is no cuda:999"):
        open_device("cuda:999")


@needs_gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32])
def test_a_freeze_on_the_device_gives_the_hosts_bits(dtype: DType) -> None:
    source = packed([TensorSpec(name="w", dtype=DType.FLOAT32, shape=(300, 1025))])
    target = packed([TensorSpec(name="w", dtype=dtype, shape=(300, 1025))])
    plan = plan_freeze(source, target)
    bits = np.random.default_rng(3).integers(0, 256, source.memories_bytes[0], dtype=np.uint8)
    expected = np.zeros(target.memories_bytes[0], np.uint8)
    native = NativeKernels().bind_freeze(
        plan.rows, [Memory.from_array(bits)], [Memory.from_array(expected)], plan.slots
    )
    device = open_device("cuda:0")
    there = Memory.of_view(device.allocate([len(expected)], "a test")[0])
    for read in (Memory.from_array(bits), device_memory(torch.from_numpy(bits).to("cuda:0"))):
        for kernels in (TorchKernels("cuda:0"), device.choose().kernels):
            bound = kernels.bind_freeze(plan.rows, [read], [there], plan.slots)
            np.testing.assert_array_equal(bound.run(0, len(plan.rows)), native.run(0, len(plan.rows)))
            np.testing.assert_array_equal(there.tensor().cpu().numpy(), expected)


READER = """
import sys
from liveweight.devices.device import open_device
memory = open_device("cuda:0").handles.borrow(sys.stdin.buffer.read(), 400_000)
sys.stdout.buffer.write(bytes(memory.tensor().cpu().numpy()))
"""


@needs_gpu
def test_another_process_reads_what_is_shared() -> None:
    tensor = torch.arange(100_000, dtype=torch.int32, device="cuda:0")
    run = subprocess.run(
        [sys.executable, "-c", READER],
        input=CudaDevice("cuda:0").lend(Memory.of_view(tensor)),
        check=True,
        capture_output=True,
        timeout=100,
    )
    assert run.stdout == tensor.cpu().numpy().tobytes()


@needs_gpu
def test_a_handle_of_nothing_is_refused() -> None:
    own = msgspec.structs.replace(
        HANDLE, gpu=str(torch.cuda.get_device_properties(0).uuid), size_bytes=1, waits=False
    )
    with pytest.raises(Unavailable, match="cuda:0 cannot open the handle"):
        CudaDevice("cuda:0").borrow(encode_handle(own), 1)
