"""Targets on a device that is named, or that their tensors name; on CUDA over a double of its driver."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from liveweight.devices.cuda import CudaDevice
from liveweight.devices.device import CPU, Device
from liveweight.devices.torch_kernels import TorchKernels
from liveweight.errors import LayoutInvalid, OutOfMemory
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import whole
from liveweight.worker.targets.swap import LINK_CHUNK_BYTES
from liveweight.worker.targets.torch_layout import device_of
from liveweight.worker.targets.torch_target import ExchangeMode, TensorTarget, module_target
from tests.support.fake_cuda import FakeDriver, fake_cuda

How = dict[str, Any]
HOWS: dict[str, How] = {
    **{mode: {"exchange": mode} for mode in get_args(ExchangeMode)},
    "host": {"shadow": "host"},
}
every_way = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


def driver(device: Device) -> FakeDriver:
    assert isinstance(device, CudaDevice) and isinstance(device._driver, FakeDriver)
    return device._driver


def only(tensor: torch.Tensor) -> int:
    """The one value that all its bytes have."""
    (value,) = set(tensor.tolist())
    return int(value)


def tensors() -> dict[str, torch.Tensor]:
    storage = torch.arange(1000, dtype=torch.float32)
    return {
        "first": storage[:300],
        "inside": storage[300:900].view(30, 20),
        "turned": torch.arange(70_000, dtype=torch.bfloat16).view(700, 100).t(),
        "empty": torch.zeros(0, 4),
    }


@every_way
def test_weights_are_swapped_and_back_on_the_device(how: How, short_path: Path) -> None:
    held = tensors()
    before = {name: tensor.clone() for name, tensor in held.items()}
    device = fake_cuda(short_path, "cuda:1")
    target = TensorTarget(held, **how, device=device)
    for memory in target.shadow():
        memory.tensor().fill_(1) if memory.size_bytes else None
    target.swap()
    assert all(tensor.view(torch.uint8).eq(1).all() for name, tensor in held.items() if name != "turned")
    assert held["turned"].t().view(torch.uint8).eq(1).all()
    target.swap()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    assert target.device is device
    assert set(driver(device).synchronised) == {1}


@every_way
def test_the_device_is_waited_for_before_a_swap(how: How, short_path: Path) -> None:
    held, device = {"w": torch.zeros(100)}, fake_cuda(short_path)
    target = TensorTarget(held, **how, device=device)
    target.shadow()
    address, seen = held["w"].data_ptr(), []

    def look(index: int) -> None:
        seen.append((index, held["w"].data_ptr() == address))

    driver(device).synchronise = look  # type: ignore[method-assign]
    target.swap()
    assert seen == [(0, True)]


def test_the_shadow_is_the_devices_memory(short_path: Path) -> None:
    device = fake_cuda(short_path)
    target = TensorTarget({"w": torch.zeros(100), "v": torch.zeros(3)}, device=device)
    shadow = target.shadow()
    assert [memory.address in driver(device).files for memory in shadow] == [True, True]
    assert isinstance(target._kernels, TorchKernels)


def test_a_shadow_on_the_host_is_pinned_as_long_as_it_is_held(short_path: Path) -> None:
    device = fake_cuda(short_path)
    (weights,) = device.allocate([1 << 20], "weights")
    target = TensorTarget(
        {"w": weights.view(torch.float32), "v": torch.zeros(3)}, device=device, shadow="host"
    )
    shadow = target.shadow()
    assert (target.device, target.home) == (device, CPU)
    (pinned,) = driver(device).pinned.items()
    for memory in shadow:
        assert memory.address not in driver(device).files  # no memory of the device
        assert pinned[0] <= memory.address < pinned[0] + pinned[1]
    assert pinned[1] < (1 << 20) + 4096  # one copy of the weights, and no more
    target.swap()
    assert list(driver(device).pinned) == [pinned[0]]
    target.release_shadow()
    assert len(driver(device).pinned) == 1  # somebody holds it still
    del shadow, memory
    gc.collect()
    assert driver(device).pinned == {}


def test_a_shadow_on_the_host_costs_the_device_two_chunks_whatever_the_weights_are(short_path: Path) -> None:
    device = fake_cuda(short_path)
    sizes = [5 * LINK_CHUNK_BYTES + 3, 100, LINK_CHUNK_BYTES]
    held = dict(enumerate(device.allocate(sizes, "weights")))
    named = {f"w{number}": tensor for number, tensor in held.items()}
    for number, tensor in held.items():
        tensor.fill_(number + 1)
    used_bytes, addresses = driver(device).used_bytes, [tensor.data_ptr() for tensor in held.values()]
    target = TensorTarget(named, device=device, shadow="host")
    for memory in target.shadow():
        memory.tensor().fill_(9)
    for expected in ([9, 9, 9], [1, 2, 3], [9, 9, 9]):
        target.swap()
        assert [only(tensor) for tensor in held.values()] == expected
        assert [tensor.data_ptr() for tensor in held.values()] == addresses
    assert driver(device).used_bytes - used_bytes <= 2 * LINK_CHUNK_BYTES


@pytest.mark.parametrize("failing", range(1, 10))
def test_a_swap_with_the_host_that_fails_at_any_copy_gives_every_byte_back(
    failing: int, short_path: Path
) -> None:
    device = fake_cuda(short_path)
    held = device.allocate([2 * LINK_CHUNK_BYTES + 7, LINK_CHUNK_BYTES], "weights")
    held[0].fill_(1)
    target = TensorTarget({"a": held[0], "b": held[1]}, device=device, shadow="host")
    for memory in target.shadow():
        memory.tensor().fill_(9)
    calls, side_stream = itertools.count(1), driver(device).side_stream

    @contextmanager
    def breaking(index: int) -> Iterator[None]:
        with side_stream(index):
            yield
        if next(calls) == failing:
            raise RuntimeError("the link is down")

    driver(device).side_stream = breaking  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the link is down"):
        target.swap()
    assert [only(tensor) for tensor in held] == [1, 0]
    assert {only(memory.tensor()) for memory in target.shadow()} == {9}
    target.swap()
    assert {only(tensor) for tensor in held} == {9}


def test_a_shadow_on_the_host_that_cannot_be_pinned_changes_nothing(short_path: Path) -> None:
    held, device = {"w": torch.zeros(100)}, fake_cuda(short_path)
    driver(device).may_pin = False
    target = TensorTarget(held, device=device, shadow="host")
    with pytest.raises(OutOfMemory, match="a shadow, pinned for cuda:0"):
        target.shadow()
    assert driver(device).pinned == {}


def test_what_is_kept_crosses_to_a_shadow_on_the_host(short_path: Path) -> None:
    device = fake_cuda(short_path)
    kept, other = device.allocate([1000, 1000], "weights")
    kept.fill_(3)
    target = TensorTarget({"kept": kept, "other": other}, device=device, shadow="host")
    target.shadow()
    target.keep(["kept"])
    assert [only(memory.tensor()) for memory in target.shadow()] == [3, 0]
    target.swap()
    assert only(kept) == 3


def test_padding_is_kept_on_a_device(short_path: Path) -> None:
    parameter = torch.arange(12.0).view(3, 4)
    piece = Piece(tensor=TensorSpec(name="w", dtype=DType.FLOAT32, shape=(2, 4)), region=whole((2, 4)))
    target = TensorTarget({"w": (parameter, [piece])}, device=fake_cuda(short_path))
    target.shadow()
    target.swap()
    assert parameter[2].tolist() == [8.0, 9.0, 10.0, 11.0]


def test_a_device_without_room_for_a_shadow_changes_nothing(short_path: Path) -> None:
    held, device = {"w": torch.zeros(100)}, fake_cuda(short_path)
    driver(device).totals_bytes = [10, 10]
    target, address = TensorTarget(held, device=device), held["w"].data_ptr()
    with pytest.raises(OutOfMemory, match="a shadow on cuda:0 of 400 bytes"):
        target.shadow()
    assert held["w"].data_ptr() == address


def test_tensors_name_their_device() -> None:
    assert device_of({"w": torch.zeros(2)}) == "cpu"
    assert device_of({}) == "cpu"
    assert TensorTarget({"w": torch.zeros(2)}).device is CPU
    assert module_target(torch.nn.Linear(2, 2)).device is CPU


def test_tensors_on_several_devices_are_refused_by_name() -> None:
    mixed = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta"), "c": torch.zeros(2)}
    with pytest.raises(LayoutInvalid, match="several devices: a on cpu, b on meta"):
        TensorTarget(mixed)
    left_out = mixed | {"b": (mixed["b"], ())}
    assert TensorTarget(left_out).device is CPU


def test_tensors_that_are_not_on_the_device_given_are_refused_by_name(short_path: Path) -> None:
    elsewhere = {"a": torch.zeros(2), "w": torch.zeros(2, device="meta")}
    with pytest.raises(LayoutInvalid, match="w: on meta, but the target's device is cpu"):
        TensorTarget(elsewhere, device=CPU)
    with pytest.raises(LayoutInvalid, match="w: on meta, but the target's device is cuda:0"):
        TensorTarget(elsewhere, device=fake_cuda(short_path))
