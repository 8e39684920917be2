"""The kernels in torch: tables that no plan makes give the C kernels' bits too, and memory of a wrong device is refused.

That plans give the right bits is for the suites of all kernels, which run these as well.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices import torch_kernels
from liveweight.devices.kernels import Table
from liveweight.devices.memory import Memory
from liveweight.devices.native_kernels import NativeKernels
from liveweight.devices.torch_kernels import TorchKernels, device_memory
from liveweight.errors import LayoutInvalid
from tests.support.layouts import Bytes

SIZE = 1 << 14
SLOTS = 3
CPU, NATIVE = TorchKernels("cpu"), NativeKernels()
DIGEST = [0, 0, 0, 1, 10, 10, 0, 1, 5, 2, 2, 0]


def content(seed: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def tensor_of(array: Bytes) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def strides(
    data: st.DataObject, outer: int, inner: int, item: int, *, may_repeat: bool = False
) -> tuple[int, int]:
    """Strides of two loops over items that do not overlap; where they are only read, they may."""
    if may_repeat and data.draw(st.booleans()):
        return data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    gaps = st.sampled_from([0, 0, 1, item, 8])
    short = item + data.draw(gaps)
    if data.draw(st.booleans()):
        return inner * short + data.draw(gaps), short
    return short, outer * short + data.draw(gaps)


def copies(data: st.DataObject) -> Table:
    outer, inner, chunk = (data.draw(st.integers(0, most)) for most in (6, 9, 40))
    source, target = (
        strides(data, outer, inner, chunk, may_repeat=True),
        strides(data, outer, inner, chunk),
    )
    offsets = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    pairs = (outer, source[0], target[0], inner, source[1], target[1])
    return np.array([[0, offsets[0], 0, offsets[1], *pairs, chunk]], dtype=np.int64)


def rectangle(data: st.DataObject, item: int, source_item: int) -> list[int]:
    rows, columns = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 70))
    row_stride, stride = strides(data, rows, columns, source_item, may_repeat=True)
    near, far = st.integers(0, 50), st.sampled_from([0, 1 << 20, 1 << 50])
    lines = [data.draw(near) + data.draw(far), data.draw(st.integers(0, 3)), rows, row_stride]
    across = [data.draw(near) + data.draw(far), data.draw(st.integers(0, 3)), columns, stride]
    return [0, data.draw(st.integers(0, 40)), *lines, *across, item, data.draw(st.integers(0, SLOTS - 1))]


def freezes(data: st.DataObject) -> Table:
    cast = data.draw(st.integers(0, 2))
    item = 2 if cast else data.draw(st.sampled_from([1, 2, 4, 8]))
    row = rectangle(data, item, 4 if cast else item)
    to_stride = row[8] * item + data.draw(st.sampled_from([0, 1, 2, 7]))
    return np.array([[*row, 0, data.draw(st.integers(0, 40)), to_stride, cast]], dtype=np.int64)


@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_any_copy_leaves_what_the_native_one_leaves(data: st.DataObject, seed: int) -> None:
    rows, source, expected = copies(data), content(seed), content(seed + 1)
    target = tensor_of(expected)
    NATIVE.bind_copy(rows, [Memory.from_array(source)], [Memory.from_array(expected)]).run(0, 1)
    CPU.bind_copy(rows, [device_memory(tensor_of(source))], [device_memory(target)]).run(0, 1)
    np.testing.assert_array_equal(target.numpy(), expected)


@given(data=st.data(), seed=st.integers(0, 1000), block=st.sampled_from([1, 7, 64, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_any_rectangle_has_the_native_digest_in_blocks_of_any_size(
    data: st.DataObject, seed: int, block: int
) -> None:
    item = data.draw(st.sampled_from([1, 2, 4, 8]))
    rows, memory = np.array([rectangle(data, item, item)], dtype=np.int64), content(seed)
    expected = NATIVE.bind_digest(rows, [Memory.from_array(memory)], SLOTS).run(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernels, "_BLOCK_ITEMS", block)
        got = CPU.bind_digest(rows, [device_memory(tensor_of(memory))], SLOTS).run(0, 1)
    np.testing.assert_array_equal(got, expected)


@given(data=st.data(), seed=st.integers(0, 1000), block=st.sampled_from([1, 7, 64, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_any_freeze_casts_and_digests_as_the_native_one_does(
    data: st.DataObject, seed: int, block: int
) -> None:
    rows, source, expected = freezes(data), content(seed), content(seed + 1)
    target, moved = tensor_of(expected), tensor_of(expected)
    native = NATIVE.bind_freeze(rows, [Memory.from_array(source)], [Memory.from_array(expected)], SLOTS)
    lanes = native.run(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernels, "_BLOCK_ITEMS", block)
        lent = [device_memory(tensor_of(source), writable=False)]
        got = CPU.bind_freeze(rows, lent, [device_memory(target)], SLOTS).run(0, 1)
        CPU.bind_freeze(rows, lent, [device_memory(moved)], SLOTS).move(0, 1)
    np.testing.assert_array_equal(got, lanes)
    np.testing.assert_array_equal(target.numpy(), expected)
    np.testing.assert_array_equal(moved.numpy(), expected)


@pytest.mark.parametrize("shift", range(9))
def test_memory_may_begin_at_any_address(shift: int) -> None:
    source, into = content(shift), np.zeros(SIZE, np.uint8)
    rows = np.array([[0, 8, 0, 16, 1, 0, 0, 1, 0, 0, 4000]])
    memories = Memory.from_array(source[shift:]), Memory.from_array(into[8 - shift :])
    CPU.bind_copy(rows, memories[:1], memories[1:]).run(0, 1)
    np.testing.assert_array_equal(into[24 - shift :][:4000], source[shift + 8 :][:4000])
    digest = np.array([[0, 8, 0, 1, 10, 160, 0, 1, 20, 8, 8, 0]])
    np.testing.assert_array_equal(
        CPU.bind_digest(digest, memories[:1], 1).run(0, 1),
        NATIVE.bind_digest(digest, memories[:1], 1).run(0, 1),
    )


def test_the_memory_of_a_tensor_is_its_whole_storage() -> None:
    tensor = torch.arange(6, dtype=torch.int16)[2:]
    memory = device_memory(tensor)
    assert (memory.address, memory.size_bytes) == (tensor.data_ptr() - 4, 12)
    assert memory.address == Memory.from_tensor(tensor).address
    assert device_memory(torch.empty(0)).size_bytes == 0


def test_memory_that_is_lent_is_not_written() -> None:
    lent = device_memory(torch.zeros(100, dtype=torch.uint8), writable=False)
    source = device_memory(torch.zeros(100, dtype=torch.uint8))
    rows = np.array([[0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 100]])
    with pytest.raises(LayoutInvalid, match="read-only"):
        CPU.bind_copy(rows, [source], [lent])


def test_what_is_bound_keeps_the_storage_alive() -> None:
    tensor = torch.ones(100, dtype=torch.uint8)
    memory = device_memory(tensor)
    gone = weakref.ref(memory.owner)
    bound = CPU.bind_digest(np.array([DIGEST]), [memory], 1)
    del tensor, memory
    gc.collect()
    assert gone() is not None
    assert bound.run(0, 1).any()
    del bound
    gc.collect()
    assert gone() is None


def test_memory_had_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(100, dtype=torch.uint8)
        target = device_memory(tensor)
    rows = np.array([[0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 100]])
    CPU.bind_copy(rows, [device_memory(torch.ones(100, dtype=torch.uint8))], [target]).run(0, 1)
    assert tensor.tolist() == [1] * 100


def test_memory_of_another_device_is_neither_written_nor_digested() -> None:
    elsewhere = TorchKernels("meta:0")
    memory = device_memory(torch.zeros(100, dtype=torch.uint8))
    copy = np.array([[0, 0, 0, 50, 1, 0, 0, 1, 0, 0, 50]])
    with pytest.raises(LayoutInvalid, match="memory 0 lies on cpu, these kernels work on meta:0"):
        elsewhere.bind_digest(np.array([DIGEST]), [memory], 1)
    with pytest.raises(LayoutInvalid, match="lies on cpu"):
        elsewhere.bind_copy(copy, [memory], [memory])
    with pytest.raises(LayoutInvalid, match="lies on cpu"):
        elsewhere.bind_freeze(
            np.array([[*DIGEST, 0, 0, 10, 0]]), [memory], [device_memory(torch.zeros(99))], 1
        )


def test_a_devices_memory_lies_in_its_owners_storage() -> None:
    beyond = Memory(address=301, size_bytes=100, writable=True, owner=torch.empty(100, device="meta"))
    with pytest.raises(LayoutInvalid, match="memory on meta that does not lie in its owner's storage"):
        CPU.bind_digest(np.array([DIGEST]), [beyond], 1)


def test_a_view_inside_a_storage_is_memory_at_its_own_address() -> None:
    storage = torch.arange(100, dtype=torch.int16)
    source, target = Memory.of_view(storage[10:60]), torch.zeros(100, dtype=torch.uint8)
    rows = np.array([[0, 4, 0, 1, 1, 0, 0, 1, 0, 0, 90]])
    CPU.bind_copy(rows, [source], [Memory.of_view(target[3:])]).run(0, 1)
    assert target[4:94].numpy().tobytes() == storage[12:57].numpy().tobytes()
    assert not target[:4].any() and not target[94:].any()


def test_a_run_is_queued_on_a_side_stream_and_done_at_its_end() -> None:
    done: list[str] = []

    @contextmanager
    def side_stream() -> Iterator[None]:
        done.append("begun")
        yield
        done.append("ended")

    kernels, memory = TorchKernels("cpu", side_stream), device_memory(torch.zeros(100, dtype=torch.uint8))
    copy = np.array([[0, 0, 0, 50, 1, 0, 0, 1, 0, 0, 50]])
    freeze = kernels.bind_freeze(
        np.array([[*DIGEST, 0, 0, 10, 0]]), [memory], [device_memory(torch.zeros(99))], 1
    )
    runs: list[Callable[[int, int], object]] = [
        kernels.bind_copy(copy, [memory], [device_memory(torch.zeros(99))]).run,
        kernels.bind_digest(np.array([DIGEST]), [memory], 1).run,
        freeze.run,
        freeze.move,
    ]
    for run in runs:
        run(0, 1)
    assert done == ["begun", "ended"] * len(runs)


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "meta"])
def test_a_device_without_an_index_is_refused(device: str | torch.device) -> None:
    with pytest.raises(ValueError, match="has no index"):
        TorchKernels(device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_there_is_one_host(device: str | torch.device) -> None:
    TorchKernels(device).bind_digest(np.array([DIGEST]), [device_memory(torch.zeros(25))], 1).run(0, 1)
