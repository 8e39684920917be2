"""CUDA: handles and device names anywhere; without CUDA, every function says why; memory and IPC only where a GPU is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices import cuda
from liveweight.devices.cuda import HANDLE_BYTES, Handle, decode_handle, device_index, encode_handle
from liveweight.devices.memory import Memory
from liveweight.devices.native import NativeKernels
from liveweight.devices.torch_kernels import TorchKernels, device_memory
from liveweight.errors import LayoutInvalid, MessageInvalid, MessageTooLarge, OutOfMemory, Unavailable
from liveweight.plan.freezes import plan_freeze
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec

REASON = cuda.available()
needs_gpu = pytest.mark.skipif(REASON is not None, reason=f"needs a CUDA device: {REASON}")
needs_none = pytest.mark.skipif(REASON is None, reason="needs a machine without CUDA")

HANDLE = Handle(
    gpu="GPU-8f2a2c0e-1b7a-4c5e-9a3e-0d5f4f6f7a10",
    size_bytes=1 << 30,
    offset_bytes=512,
    memory=b"\x03c" + bytes(64),
    counter="/torch_4711_123456789_0",
    counter_offset=17,
    event=bytes(64),
    waits=True,
)
FUNCTIONS: dict[str, Callable[[], object]] = {
    "allocate": lambda: cuda.allocate(16, "cuda:0"),
    "allocate, no index": lambda: cuda.allocate(16, "cuda"),
    "share": lambda: cuda.share(torch.zeros(4)),
    "open_handle": lambda: cuda.open_handle(encode_handle(HANDLE), "cuda:0"),
    "open_handle, garbage": lambda: cuda.open_handle(b"garbage", "cuda:0"),
    "synchronise": lambda: cuda.synchronise("cuda:0"),
}


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
            assert isinstance(decode_handle(some), Handle)
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
    with pytest.raises(Unavailable, match="torch is not installed"):
        cuda.synchronise("cuda:0")


@needs_none
@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_cuda_every_function_says_why(function: str) -> None:
    with pytest.raises(Unavailable, match=f"CUDA cannot be used here: {REASON}"):
        FUNCTIONS[function]()


@needs_gpu
def test_memory_is_had_on_every_device_that_is_named() -> None:
    for index in range(torch.cuda.device_count()):
        memory = cuda.allocate(1000, f"cuda:{index}")
        assert isinstance(memory.owner, torch.Tensor)
        assert memory.owner.device == torch.device("cuda", index)
        assert (memory.size_bytes, memory.writable) == (1000, True)
        assert not memory.owner.any()
    with pytest.raises(Unavailable, match="there is no cuda:999"):
        cuda.allocate(1, "cuda:999")
    with pytest.raises(OutOfMemory, match="cuda:0"):
        cuda.allocate(1 << 50, "cuda:0")


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
    there = cuda.allocate(len(expected), "cuda:0")
    for read in (Memory.from_array(bits), device_memory(torch.from_numpy(bits).to("cuda:0"))):
        bound = TorchKernels("cuda:0").bind_freeze(plan.rows, [read], [there], plan.slots)
        np.testing.assert_array_equal(bound.run(0, len(plan.rows)), native.run(0, len(plan.rows)))
        assert isinstance(there.owner, torch.Tensor)
        np.testing.assert_array_equal(there.owner.cpu().numpy(), expected)


READER = """
import sys
from liveweight.devices import cuda
tensor = cuda.open_handle(sys.stdin.buffer.read(), "cuda:0")
sys.stdout.buffer.write(bytes(tensor.cpu().numpy()))
"""


@needs_gpu
def test_another_process_reads_what_is_shared() -> None:
    tensor = torch.arange(100_000, dtype=torch.int32, device="cuda:0")
    run = subprocess.run(
        [sys.executable, "-c", READER],
        input=cuda.share(tensor[7:]),
        check=True,
        capture_output=True,
        timeout=100,
    )
    assert run.stdout == tensor.cpu().numpy().tobytes()


@needs_gpu
def test_a_handle_of_another_gpu_or_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match=f"the memory is on GPU {HANDLE.gpu}, but cuda:0 is GPU"):
        cuda.open_handle(encode_handle(HANDLE), "cuda:0")
    own = str(torch.cuda.get_device_properties(0).uuid)
    with pytest.raises(Unavailable, match="cuda:0 cannot open the handle"):
        cuda.open_handle(
            encode_handle(msgspec.structs.replace(HANDLE, gpu=own, size_bytes=1, waits=False)), "cuda:0"
        )
    with pytest.raises(LayoutInvalid, match="on cpu has no CUDA memory to share"):
        cuda.share(torch.zeros(4))
