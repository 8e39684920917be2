"""Which version of a fleet is the newest, and who is behind it."""

from __future__ import annotations

import pytest

from liveweight.errors import ChannelClosed, LiveWeightError
from liveweight.rounds.fleet import fleet_of
from liveweight.rounds.replica import WireReplica
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.spec.version_age import START_RUN, newest, older
from liveweight.wire.credentials import Secret
from liveweight.wire.messages import ReplicaState

EXPECTED = Manifest(tensors=(TensorSpec(name="w", dtype=DType.FLOAT32, shape=(1,)),))


def version(label: str | int, run: str = "r", number: int | None = None) -> Version:
    """A version whose number is the label, if the label is an integer and no number is given."""
    if number is None and isinstance(label, int):
        number = label
    return Version(run=run, label=label, digest=f"{run}{label}", number=number)


@pytest.mark.parametrize(
    ("one", "other", "is_older"),
    [
        (version(1), version(2), True),
        (version(2), version(1), False),
        (version("step_9", number=2), version("step_3", number=5), True),
        (version("step_3", number=5), version("step_9", number=2), False),
        (version("step_9"), version("step_10"), False),
        (version("step_9"), version(10), False),
        (version("a"), version("b"), False),
        (version(1), version(2, "another"), False),
    ],
)
def test_age_is_told_by_numbers_within_a_run_and_never_by_how_labels_are_spelled(
    one: Version, other: Version, is_older: bool
) -> None:
    assert older(one, other) is is_older


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([], None),
        ([(version("initial", START_RUN), 1.0)], None),
        ([(version("initial", START_RUN), 1.0), (version(3), 900.0)], version(3)),
        ([(version(3), 1.0), (version(4), 900.0)], version(4)),
        ([(version("a"), 5.0), (version("b"), 2.0)], version("b")),
        ([(version("step_9", number=4), 900.0), (version("step_10", number=3), 1.0)], version("step_9")),
        ([(version("step_9"), 2.0), (version("step_10"), 5.0)], version("step_9")),
        ([(version(9), 50.0), (version(1, "successor"), 2.0)], version(1, "successor")),
    ],
)
def test_the_newest_is_told_by_numbers_and_else_by_which_came_last(
    served: list[tuple[Version, float]], expected: Version | None
) -> None:
    assert newest(served) == newest(reversed(served)) == expected


def state(serving: Version | None, boot: str = "b") -> ReplicaState:
    return ReplicaState(
        replica="r",
        boot=boot,
        state="s",
        expected=EXPECTED,
        serving=serving,
        undo=None,
        round=None,
    )


def test_a_fleet_says_who_is_behind_restarted_or_out_of_reach() -> None:
    replicas = [WireReplica(f"ipc:///nowhere/{name}", Secret(b"s" * 32)) for name in "abcd"]
    gone = ChannelClosed("gone")
    answers: list[ReplicaState | LiveWeightError] = [
        state(version(2)),
        state(version(1)),
        state(version("initial", START_RUN), "anew"),
        gone,
    ]
    found = fleet_of(replicas, answers, published=None, boots=["b", "b", "b", "b"])
    assert found.version == version(2)
    assert found.behind == tuple(replica.name for replica in replicas[1:])
    assert [one.restarted for one in found.replicas] == [False, False, True, False]
    assert found.replicas[3].fault is gone
    published = fleet_of(replicas, answers, published=version(1), boots=[None] * 4)
    assert published.behind == tuple(replicas[number].name for number in (0, 2, 3))
    for replica in replicas:
        replica.close()
