"""What every device keeps to: the host, CUDA over a double of its driver, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from liveweight.devices import cuda
from liveweight.devices.device import Device, open_device
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, OutOfMemory, WireError
from liveweight.plan.digests import plan_digests
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec
from tests.support.fake_cuda import fake_cuda

Opening = Callable[[Path], Device]
DEVICES: dict[str, Opening] = {
    "cpu": lambda _: open_device("cpu"),
    "double": fake_cuda,
    "gpu": lambda _: open_device("cuda:0"),
}
no_gpu = pytest.mark.skipif(cuda.available() is not None, reason="no GPU")


@pytest.fixture(params=[pytest.param(name, marks=no_gpu if name == "gpu" else ()) for name in DEVICES])
def device(request: pytest.FixtureRequest, short_path: Path) -> Device:
    return DEVICES[request.param](short_path)


@pytest.mark.parametrize("which", [pytest.param(n, marks=no_gpu if n == "gpu" else ()) for n in DEVICES])
def test_every_opening_of_a_device_gives_it_the_same_identity(which: str, short_path: Path) -> None:
    one, other = (DEVICES[which](short_path) for _ in range(2))
    assert (one.name, one.identity) == (other.name, other.identity)
    assert (one.identity == "cpu") is (one.handles is None)


def test_memory_is_zero_aligned_and_where_it_was_asked_for(device: Device) -> None:
    sizes = [5, 0, 4096, 1]
    parts = device.allocate(sizes, "a test")
    assert [part.numel() for part in parts] == sizes
    for part in parts:
        assert part.device == device.torch_device
        assert part.dtype is torch.uint8
        assert part.data_ptr() % 64 == 0
        assert part.untyped_storage().nbytes() == part.numel()  # saving one does not save all
        assert not part.any()
    device.synchronise()


def test_host_memory_beside_it_is_the_hosts_and_takes_what_lies_on_it(device: Device) -> None:
    sizes = [5, 0, 4096]
    parts = device.allocate_host(sizes, "a test")
    assert [part.numel() for part in parts] == sizes
    for part in parts:
        assert part.device == torch.device("cpu")
        assert part.untyped_storage().nbytes() == part.numel()
        assert not part.any()
    (there,) = device.allocate([4096], "a test")
    there.fill_(7)
    rows = np.array([[0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 4096]])
    to_host = device.to_host().bind_copy(rows, [Memory.of_view(there)], [Memory.of_view(parts[2])])
    to_host.run(0, 1)
    assert parts[2].eq(7).all()
    parts[2].fill_(8)
    device.choose().kernels.bind_copy(rows, [Memory.of_view(parts[2])], [Memory.of_view(there)]).run(0, 1)
    assert there.cpu().eq(8).all()


def test_memory_had_in_inference_mode_is_ordinary_memory(device: Device) -> None:
    with torch.inference_mode():
        (part,) = device.allocate([8], "a test")
    assert not part.is_inference()


def test_memory_that_cannot_be_had_is_named_with_its_size(device: Device) -> None:
    with pytest.raises(OutOfMemory, match=f"a test.* of {1 << 50} bytes"):
        device.allocate([1 << 50], "a test")


def test_its_kernels_copy_and_digest_its_memory(device: Device) -> None:
    content = np.random.default_rng(1).integers(0, 256, 3000, dtype=np.uint8)
    there, copied = map(Memory.of_view, device.allocate([3000, 3000], "a test"))
    there.tensor().copy_(torch.from_numpy(content))
    kernels = device.choose().kernels
    rows = np.array([[0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 3000]])
    kernels.bind_copy(rows, [there], [copied]).run(0, 1)
    assert copied.tensor().cpu().numpy().tobytes() == content.tobytes()
    plan = plan_digests(packed([TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(30, 50))]))
    expected = choose_kernels().bind_digest(plan.rows, [Memory.from_array(content)], plan.slots)
    found = kernels.bind_digest(plan.rows, [copied], plan.slots)
    np.testing.assert_array_equal(found.run(0, len(plan.rows)), expected.run(0, len(plan.rows)))


def test_only_memory_of_its_own_that_is_a_whole_storage_is_lent(device: Device) -> None:
    if device.handles is None:
        pytest.skip("the host lends no handles")
    (part,) = device.allocate([100], "a test")
    others = (
        Memory.of_view(part[:50]),
        Memory.from_array(np.zeros(10, np.uint8)),
        Memory.of_view(torch.zeros(4, device="meta")),
        Memory.of_view(torch.zeros(0, device=device.torch_device)),
    )
    for other in others:
        with pytest.raises(LayoutInvalid):
            device.handles.lend(other)


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(300)])
def test_garbage_is_not_opened(device: Device, garbage: bytes) -> None:
    if device.handles is None:
        pytest.skip("the host lends no handles")
    with pytest.raises(WireError):
        device.handles.borrow(garbage, 10)


@pytest.mark.parametrize("name", ["meta", "gpu", "", "mps:0", "cudax", "cuda", "cuda:-1"])
def test_a_name_that_means_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device {name} "):
        open_device(name)
