"""Every state and every command: what is allowed goes where the design says, and everything else is refused unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from liveweight.errors import WrongState
from liveweight.rounds import states as s
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import RoundId

A, B = Version(run="r", label=1), Version(run="r", label=2)
ROUND = RoundId(boot="b", epoch=1, publisher="p")
TORN = s.TornState(A, "killed")

STATES: dict[str, s.State] = {
    "serving": s.ServingState(A),
    "serving with undo": s.ServingState(B, A, can_undo=True),
    "staging": s.StagingState(A, B, ROUND),
    "ready": s.ReadyState(A, B, ROUND),
    "swapping": s.SwappingState(A, B, ROUND),
    "undoing": s.SwappingState(B, A, ROUND, undo=True),
    "overwriting": s.OverwritingState(A, B, ROUND),
    "torn": TORN,
    "staging over torn": s.StagingState(None, B, ROUND, TORN),
    "ready over torn": s.ReadyState(None, B, ROUND, TORN),
    "swapping over torn": s.SwappingState(None, B, ROUND, torn=TORN),
    "overwriting torn": s.OverwritingState(None, B, ROUND, TORN),
    "asleep": s.ReleasedState(A, weights=True, kv_cache=True),
    "weights only": s.ReleasedState(A, weights=False, kv_cache=True),
}

COMMANDS: dict[str, Callable[[s.State], s.State]] = {
    "open": lambda state: s.open_round(state, B, ROUND),
    "verified": s.verified,
    "commit": s.begin_swap,
    "undo": lambda state: s.begin_undo(state, ROUND),
    "keep": lambda state: s.settled(state, keep=True),
    "back": lambda state: s.settled(state, keep=False),
    "fail": lambda state: s.after_failure(state, "why"),
    "overwrite": s.overwrite,
    "untouched": s.untouched,
    "overwritten": s.overwritten,
    "sleep": lambda state: s.sleep(state, weights=True, kv_cache=False),
    "wake": lambda state: s.wake(state, weights=True, kv_cache=True),
}

ALLOWED: dict[tuple[str, str], s.State] = {
    ("serving", "open"): s.StagingState(A, B, ROUND),
    ("serving with undo", "open"): s.StagingState(B, B, ROUND),
    ("torn", "open"): s.StagingState(None, B, ROUND, TORN),
    ("staging over torn", "verified"): s.ReadyState(None, B, ROUND, TORN),
    ("staging over torn", "fail"): TORN,
    ("ready over torn", "commit"): s.SwappingState(None, B, ROUND, torn=TORN),
    ("ready over torn", "overwrite"): s.OverwritingState(None, B, ROUND, TORN),
    ("ready over torn", "fail"): TORN,
    ("swapping over torn", "keep"): s.ServingState(B),
    ("swapping over torn", "back"): TORN,
    ("swapping over torn", "fail"): TORN,
    ("overwriting torn", "fail"): s.TornState(B, "why"),
    ("overwriting torn", "untouched"): TORN,
    ("overwriting torn", "overwritten"): s.ServingState(B),
    ("staging", "verified"): s.ReadyState(A, B, ROUND),
    ("ready", "commit"): s.SwappingState(A, B, ROUND),
    ("serving with undo", "undo"): s.SwappingState(B, A, ROUND, undo=True),
    ("swapping", "keep"): s.ServingState(B, A, can_undo=True),
    ("swapping", "back"): s.ServingState(A),
    ("undoing", "keep"): s.ServingState(A),
    ("undoing", "back"): s.ServingState(B),
    ("undoing", "fail"): s.ServingState(B),
    ("staging", "fail"): s.ServingState(A),
    ("ready", "fail"): s.ServingState(A),
    ("swapping", "fail"): s.ServingState(A),
    ("overwriting", "fail"): s.TornState(B, "why"),
    ("overwriting", "untouched"): s.ServingState(A),
    ("ready", "overwrite"): s.OverwritingState(A, B, ROUND),
    ("overwriting", "overwritten"): s.ServingState(B),
    ("serving", "sleep"): s.ReleasedState(A, weights=True, kv_cache=False),
    ("serving with undo", "sleep"): s.ReleasedState(B, weights=True, kv_cache=False),
    ("asleep", "sleep"): s.ReleasedState(A, weights=True, kv_cache=True),
    ("weights only", "sleep"): s.ReleasedState(A, weights=True, kv_cache=True),
    ("asleep", "wake"): s.ServingState(A),
    ("weights only", "wake"): s.ServingState(A),
    ("serving", "wake"): s.ServingState(A),
    ("serving with undo", "wake"): s.ServingState(B, A, can_undo=True),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", STATES)
def test_every_state_answers_every_command(state: str, command: str) -> None:
    expected = ALLOWED.get((state, command))
    if expected is not None:
        assert COMMANDS[command](STATES[state]) == expected
        return
    with pytest.raises(WrongState) as refused:
        COMMANDS[command](STATES[state])
    assert s.describe(STATES[state]) in str(refused.value)


def test_waking_only_the_weights_leaves_the_cache_asleep() -> None:
    assert s.wake(STATES["asleep"], weights=True, kv_cache=False) == s.ReleasedState(
        A, weights=False, kv_cache=True
    )


@pytest.mark.parametrize(
    ("state", "version"),
    [
        ("serving", A),
        ("serving with undo", B),
        ("staging", A),
        ("ready", A),
        ("swapping", None),
        ("undoing", None),
        ("overwriting", None),
        ("torn", None),
        ("staging over torn", None),
        ("ready over torn", None),
        ("overwriting torn", None),
        ("asleep", None),
        ("weights only", A),
    ],
)
def test_nothing_serves_while_a_swap_or_an_overwrite_is_under_way(
    state: str, version: Version | None
) -> None:
    assert s.serving_version(STATES[state]) == version


def test_torn_weights_are_known_as_such_until_a_round_has_overwritten_them() -> None:
    known = {name for name, state in STATES.items() if s.torn_by(state) is not None}
    assert known == {name for name in STATES if "torn" in name}
    assert all(
        "torn by" in s.describe(STATES[name]) for name in ("torn", "staging over torn", "ready over torn")
    )
