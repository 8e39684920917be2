"""A version whose content the engine serves already, under another label: nothing is read, nothing is swapped, and it can be undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import RoundOpened, RoundUndone, StagingBegan
from tests.support.stepping import engine, publisher, serving
from tests.support.wire import wait_until


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 3), value), "b": torch.full((3,), value)}


@pytest.mark.parametrize("shadow", ["device", "host", "none"])
def test_the_same_content_under_another_label_is_committed_without_staging(
    short_path: Path, shadow: str
) -> None:
    live, bus, seen, ran = engine(), Bus(), Recorder(), []
    with (
        bus.subscribe(seen),
        serving(live, short_path, bus, shadow=shadow, hooks=[lambda: ran.append(1)]) as address,
        publisher(tensors(1.0), address, short_path) as sender,
    ):
        first = sender.publish("step_1")
        assert first.replicas[0].staged_bytes > 0
        begun, hooks = len(seen.of(StagingBegan)), len(ran)
        second = sender.publish("step_2")
        assert (second.unchanged, second.replicas[0].staged_bytes) == (False, 0)
        assert second.version.digest == first.version.digest
        assert str(sender.fleet().replicas[0].serving) == "step_2"
        assert (len(seen.of(StagingBegan)), len(ran)) == (begun, hooks)
        assert sender.verify().match
    assert torch.equal(live["w"], torch.ones(4, 3))
    assert len(seen.of(RoundOpened)) == 2


def test_its_undo_goes_back_to_the_label_before_and_not_to_older_weights(short_path: Path) -> None:
    live, source, bus, seen = engine(), tensors(1.0), Bus(), Recorder()
    with (
        bus.subscribe(seen),
        serving(live, short_path, bus) as address,
        publisher(source, address, short_path) as sender,
    ):
        sender.publish("step_1")
        sender.publish("step_2")
        assert [str(version) for version in sender.undo()] == ["step_1"]
        assert torch.equal(live["w"], torch.ones(4, 3))
        wait_until("the event of the undo", lambda: len(seen.of(RoundUndone)) == 1)
        # Rounds that swap again swap back again.
        source["w"].fill_(2.0)
        sender.publish("step_3")
        assert torch.equal(live["w"], torch.full((4, 3), 2.0))
        assert [str(version) for version in sender.undo()] == ["step_1"]
        assert torch.equal(live["w"], torch.ones(4, 3))


def test_damaged_weights_are_installed_again_by_the_same_version_and_by_the_same_content(
    short_path: Path,
) -> None:
    live = engine()
    with serving(live, short_path) as address, publisher(tensors(1.0), address, short_path) as sender:
        sender.publish("step_1")
        live["w"][0, 0] = 7.0
        assert sender.publish("step_1").unchanged  # nobody knows of the damage yet
        assert not sender.verify().match
        assert not sender.publish("step_1").unchanged
        assert torch.equal(live["w"], torch.ones(4, 3))
        assert sender.verify().match
        live["w"][0, 0] = 7.0
        assert not sender.verify().match
        assert sender.publish("step_2").replicas[0].staged_bytes > 0
        assert torch.equal(live["w"], torch.ones(4, 3))


@pytest.mark.parametrize("held", [("embed", "head"), ("embed",), ("head",)])
def test_a_tied_tensor_has_one_digest_whichever_of_its_names_a_source_has(
    short_path: Path, held: tuple[str, ...]
) -> None:
    """Checkpoints leave the second name of a tied weight out, modules have both."""
    net = torch.nn.Module()
    net.embed = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    net.head = net.embed
    weight = torch.ones(4, 3)
    with serving(net, short_path) as address:  # type: ignore[arg-type]
        with publisher({"embed": weight}, address, short_path, run="r") as sender:
            first = sender.publish(1)
        with publisher(dict.fromkeys(held, weight), address, short_path, run="r") as sender:
            again = sender.publish(1)
            assert (again.unchanged, again.version) == (True, first.version)
            assert not sender.fleet().behind
            assert sender.verify().match
    assert torch.equal(net.embed, weight)
