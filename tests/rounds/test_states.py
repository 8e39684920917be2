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
TORN = s.Torn(A, "killed")

STATES: dict[str, s.State] = {
    "serving": s.Serving(A),
    "serving with undo": s.Serving(B, A, can_undo=True),
    "staging": s.Staging(A, B, ROUND),
    "ready": s.Ready(A, B, ROUND),
    "swapping": s.Swapping(A, B, ROUND),
    "undoing": s.Swapping(B, A, ROUND, undo=True),
    "overwriting": s.Overwriting(A, B, ROUND),
    "torn": TORN,
    "staging over torn": s.Staging(None, B, ROUND, TORN),
    "ready over torn": s.Ready(None, B, ROUND, TORN),
    "swapping over torn": s.Swapping(None, B, ROUND, torn=TORN),
    "overwriting torn": s.Overwriting(None, B, ROUND, TORN),
    "asleep": s.Released(A, weights=True, kv_cache=True),
    "weights only": s.Released(A, weights=False, kv_cache=True),
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
    ("serving", "open"): s.Staging(A, B, ROUND),
    ("serving with undo", "open"): s.Staging(B, B, ROUND),
    ("torn", "open"): s.Staging(None, B, ROUND, TORN),
    ("staging over torn", "verified"): s.Ready(None, B, ROUND, TORN),
    ("staging over torn", "fail"): TORN,
    ("ready over torn", "commit"): s.Swapping(None, B, ROUND, torn=TORN),
    ("ready over torn", "overwrite"): s.Overwriting(None, B, ROUND, TORN),
    ("ready over torn", "fail"): TORN,
    ("swapping over torn", "keep"): s.Serving(B),
    ("swapping over torn", "back"): TORN,
    ("swapping over torn", "fail"): TORN,
    ("overwriting torn", "fail"): s.Torn(B, "why"),
    ("overwriting torn", "untouched"): TORN,
    ("overwriting torn", "overwritten"): s.Serving(B),
    ("staging", "verified"): s.Ready(A, B, ROUND),
    ("ready", "commit"): s.Swapping(A, B, ROUND),
    ("serving with undo", "undo"): s.Swapping(B, A, ROUND, undo=True),
    ("swapping", "keep"): s.Serving(B, A, can_undo=True),
    ("swapping", "back"): s.Serving(A),
    ("undoing", "keep"): s.Serving(A),
    ("undoing", "back"): s.Serving(B),
    ("undoing", "fail"): s.Serving(B),
    ("staging", "fail"): s.Serving(A),
    ("ready", "fail"): s.Serving(A),
    ("swapping", "fail"): s.Serving(A),
    ("overwriting", "fail"): s.Torn(B, "why"),
    ("overwriting", "untouched"): s.Serving(A),
    ("ready", "overwrite"): s.Overwriting(A, B, ROUND),
    ("overwriting", "overwritten"): s.Serving(B),
    ("serving", "sleep"): s.Released(A, weights=True, kv_cache=False),
    ("serving with undo", "sleep"): s.Released(B, weights=True, kv_cache=False),
    ("asleep", "sleep"): s.Released(A, weights=True, kv_cache=True),
    ("weights only", "sleep"): s.Released(A, weights=True, kv_cache=True),
    ("asleep", "wake"): s.Serving(A),
    ("weights only", "wake"): s.Serving(A),
    ("serving", "wake"): s.Serving(A),
    ("serving with undo", "wake"): s.Serving(B, A, can_undo=True),
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
    assert s.wake(STATES["asleep"], weights=True, kv_cache=False) == s.Released(
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
