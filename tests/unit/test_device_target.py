"""Targets on a device that is named, or that their tensors name; on CUDA over a double of its driver."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

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
from liveweight.worker.torch_layout import device_of
from liveweight.worker.torch_target import ExchangeMode, TensorTarget, module_target
from tests.support.fake_cuda import FakeDriver, fake_cuda

both_modes = pytest.mark.parametrize("exchange", get_args(ExchangeMode))


def driver(device: Device) -> FakeDriver:
    assert isinstance(device, CudaDevice) and isinstance(device._driver, FakeDriver)
    return device._driver


def tensors() -> dict[str, torch.Tensor]:
    storage = torch.arange(1000, dtype=torch.float32)
    return {
        "first": storage[:300],
        "inside": storage[300:900].view(30, 20),
        "turned": torch.arange(70_000, dtype=torch.bfloat16).view(700, 100).t(),
        "empty": torch.zeros(0, 4),
    }


@both_modes
def test_weights_are_exchanged_and_back_on_the_device(exchange: ExchangeMode, short_path: Path) -> None:
    held = tensors()
    before = {name: tensor.clone() for name, tensor in held.items()}
    device = fake_cuda(short_path, "cuda:1")
    target = TensorTarget(held, exchange=exchange, device=device)
    for memory in target.shadow():
        memory.tensor().fill_(1) if memory.size_bytes else None
    target.swap()
    assert all(tensor.view(torch.uint8).eq(1).all() for name, tensor in held.items() if name != "turned")
    assert held["turned"].t().view(torch.uint8).eq(1).all()
    target.swap()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    assert target.device is device
    assert set(driver(device).synchronised) == {1}


@both_modes
def test_the_device_is_waited_for_before_an_exchange(exchange: ExchangeMode, short_path: Path) -> None:
    held, device = {"w": torch.zeros(100)}, fake_cuda(short_path)
    target = TensorTarget(held, exchange=exchange, device=device)
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
