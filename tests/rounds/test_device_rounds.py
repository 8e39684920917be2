"""Whole rounds on a device, through the public interface, over a double of the CUDA driver; and none of CUDA where it is the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import liveweight as lw
from liveweight.devices.device import CPU
from liveweight.errors import LayoutInvalid, Refused, RoundFailed
from liveweight.observe.events import OfferKind
from liveweight.rounds.report import Report
from liveweight.worker.targets.torch_target import ExchangeMode, TensorTarget
from tests.support.fake_cuda import GPUS, fake_cuda
from tests.support.wire import SECRET


class Net(torch.nn.Module):
    """A fused weight's parts, a tied one, and a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.q = torch.nn.Parameter(torch.full((6, 8), value))
        self.k = torch.nn.Parameter(torch.full((2, 8), value + 1))
        self.tied = self.q
        self.register_buffer("scale", torch.full((3,), value + 2))


def answered(receiver: lw.Receiver, publish: Callable[[], Report]) -> Report:
    """What a publisher does in its thread, while this one serves."""
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish)
        while not published.done():
            receiver.at_boundary(0.01)
        receiver.at_boundary()
        return published.result()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("exchange", ["swap", "copy"])
@pytest.mark.parametrize("offer", ["live", "frozen"])
def test_rounds_on_a_device_install_what_the_trainer_holds(
    offer: OfferKind, exchange: ExchangeMode, verify: bool, short_path: Path
) -> None:
    trained, serving = Net(1.0), Net(0.0)
    here, there = fake_cuda(short_path), fake_cuda(short_path)
    with (
        lw.share_module(trained, device=here) as shared,
        lw.Receiver(serving, device=there, secret=SECRET, exchange=exchange) as receiver,
        lw.Publisher(
            shared if offer == "live" else trained,
            device=here,
            engines=[receiver.address],
            secret=SECRET,
            directory=short_path,
            offer=offer,
            verify=verify,
        ) as publisher,
    ):
        for step in range(4):
            with torch.no_grad():
                trained.q.fill_(step)
            report = answered(receiver, lambda step=step: publisher.publish(step))  # type: ignore[misc]
            assert report.verified is verify
            assert torch.equal(serving.q, trained.q) and torch.equal(serving.k, trained.k)
            assert serving.tied.data_ptr() == serving.q.data_ptr()
        assert not list(short_path.glob("torch_*"))
    assert trained.q.eq(3).all()


def test_a_rank_on_another_device_ends_the_round_with_both_names(short_path: Path) -> None:
    serving = Net(0.0)
    with (
        lw.share_module(Net(1.0), device=fake_cuda(short_path)) as shared,
        lw.Receiver(serving, secret=SECRET) as receiver,
        lw.Publisher(
            shared, engines=[receiver.address], secret=SECRET, directory=short_path, offer="live"
        ) as publisher,
    ):
        with pytest.raises(RoundFailed, match=f"on GPU {GPUS[0]}, and this rank reads on cpu") as caught:
            answered(receiver, lambda: publisher.publish(1))
        assert caught.value.code == LayoutInvalid.code
        assert receiver.version is None
    assert serving.q.eq(0).all()


def test_a_device_that_disagrees_is_refused(short_path: Path) -> None:
    with pytest.raises(LayoutInvalid, match=r"q: on cpu, but the target's device is cuda:0"):
        meta = fake_cuda(short_path)
        meta.torch_device = torch.device("meta")
        meta.name = "cuda:0"
        lw.Receiver(Net(0.0), device=meta, secret=SECRET)
    with pytest.raises(LayoutInvalid, match="several devices: q on cpu, k on meta"):
        split = Net(0.0)
        split.k = torch.nn.Parameter(torch.zeros(2, 8, device="meta"))
        lw.share_module(split)
    with (
        lw.share_module(Net(1.0)) as shared,
        pytest.raises(Refused, match="shared on cpu, and the publisher's device is cuda:0"),
    ):
        lw.Publisher(shared, device=fake_cuda(short_path), engines=[], secret=SECRET, directory=short_path)
    with pytest.raises(ValueError, match="device cuda has no index"):
        lw.Receiver(Net(0.0), device="cuda", secret=SECRET)
    with lw.Receiver(Net(0.0), device=torch.device("cpu"), secret=SECRET) as receiver:
        assert receiver.version is None
    with lw.share_module(Net(1.0), device="cpu") as shared:
        assert shared.arena.device is CPU


HOST_ONLY = """
import sys, tempfile, threading
from pathlib import Path
import torch
def refuse(*_, **__):
    raise AssertionError("CUDA was touched")
for name in ("is_available", "device_count", "init", "_lazy_init", "synchronize", "current_stream"):
    setattr(torch.cuda, name, refuse)
import liveweight as lw
model, serving = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
with tempfile.TemporaryDirectory(prefix="lw-") as place, lw.share_module(model) as shared:
    secret = Path(place) / "secret"
    with lw.Receiver(serving, secret=secret, address=f"ipc://{place}/rank") as receiver:
        with lw.Publisher(shared, engines=[receiver.address], secret=secret, directory=Path(place)) as publisher:
            thread = threading.Thread(target=publisher.publish, args=(1,))
            thread.start()
            while thread.is_alive():
                receiver.at_boundary(0.01)
            receiver.at_boundary()
            assert torch.equal(serving.weight, model.weight)
loaded = [name for name in ("liveweight.devices.torch_kernels",) if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else 0)
"""


def test_a_round_in_host_memory_touches_nothing_of_cuda() -> None:
    run = subprocess.run([sys.executable, "-c", HOST_ONLY], capture_output=True, timeout=100, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("offer", ["live", "frozen"])
def test_a_rank_whose_shadow_is_on_the_host_reads_sources_there(offer: OfferKind, short_path: Path) -> None:
    trained, there = Net(1.0), fake_cuda(short_path)
    held = {
        name: part.view(torch.float32).view(like.shape)
        for (name, like), part in zip(
            Net(0.0).state_dict().items(), there.allocate([192, 64, 192, 12], "weights"), strict=True
        )
        if name != "tied"
    }
    addresses = [tensor.data_ptr() for tensor in held.values()]
    with (
        lw.share_module(trained) as shared,
        lw.Receiver(held, device=there, secret=SECRET, shadow="host") as receiver,
        lw.Publisher(
            shared if offer == "live" else trained,
            engines=[receiver.address],
            secret=SECRET,
            directory=short_path,
            offer=offer,
        ) as publisher,
    ):
        report = answered(receiver, lambda: publisher.publish(1))
        assert (report.offer, report.verified) == (offer, True)
        assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in held.items())
        with torch.no_grad():
            trained.q.fill_(7.0)
        answered(receiver, lambda: publisher.publish(2))
        assert held["q"].eq(7.0).all()
        with ThreadPoolExecutor(1) as pool:
            undone = pool.submit(publisher.undo)
            while not undone.done():
                receiver.at_boundary(0.01)
            undone.result()
        assert held["q"].eq(1.0).all()
    assert [tensor.data_ptr() for tensor in held.values()] == addresses


def test_a_rank_whose_shadow_is_on_the_host_refuses_a_source_on_a_device(short_path: Path) -> None:
    here = fake_cuda(short_path)
    with (
        lw.Receiver({"w": torch.zeros(4)}, device=here, secret=SECRET, shadow="host") as receiver,
        lw.Publisher(
            {"w": torch.ones(4)},
            device=here,
            engines=[receiver.address],
            secret=SECRET,
            directory=short_path,
        ) as publisher,
        pytest.raises(RoundFailed, match="cpu"),
    ):
        answered(receiver, lambda: publisher.publish(1))


def test_a_target_of_ones_own_says_itself_where_its_shadow_is() -> None:
    own = TensorTarget({"w": torch.zeros(4)})
    with pytest.raises(ValueError, match="decides itself"):
        lw.Receiver(own, secret=SECRET, shadow="host")
