"""The states of a rank and of its replica, and every transition between them. Pure.

Serving ── open ──▶ Staging ── verified ──▶ Ready ── commit ──▶ Serving(undo) ── undo ──▶ Serving
In place: Ready ── overwrite ──▶ Overwriting ── ok ──▶ Serving, or Torn; a torn one stays torn until a round has overwritten it whole.
A sum type: data exists only where it means something. Pausing requests is the engine's (engine/serving/pauses), not a state here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from liveweight.errors import WrongState
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import RoundId


@dataclass(frozen=True, slots=True)
class ServingState:
    """Whole, on one version (None: weights of unknown origin); `undo` is the version in the shadow, if one is."""

    version: Version | None
    undo: Version | None = None
    can_undo: bool = False


@dataclass(frozen=True, slots=True)
class TornState:
    """An in-place round failed: a mixture, which must never serve."""

    target: Version
    cause: str


@dataclass(frozen=True, slots=True)
class StagingState:
    """A round reads into the shadow; live weights are the base's, or `torn`. In place it has only located its source."""

    base: Version | None
    target: Version
    round: RoundId
    torn: TornState | None = None


@dataclass(frozen=True, slots=True)
class ReadyState:
    """The shadow holds the target, verified if that was asked; live weights are the base's, or `torn`."""

    base: Version | None
    target: Version
    round: RoundId
    torn: TornState | None = None


@dataclass(frozen=True, slots=True)
class SwappingState:
    """Shadow and live weights are being swapped, for a commit or an undo; nothing serves until the outcome is known."""

    base: Version | None
    target: Version | None
    round: RoundId
    undo: bool = False
    torn: TornState | None = None


@dataclass(frozen=True, slots=True)
class OverwritingState:
    """In place: live weights, the base's or `torn`, are being overwritten; nothing serves until the outcome is known."""

    base: Version | None
    target: Version
    round: RoundId
    torn: TornState | None = None


@dataclass(frozen=True, slots=True)
class ReleasedState:
    """Asleep: weights, KV cache or both were given back."""

    version: Version | None
    weights: bool
    kv_cache: bool


State: TypeAlias = (
    ServingState | StagingState | ReadyState | SwappingState | OverwritingState | TornState | ReleasedState
)


def open_round(state: State, target: Version, round_id: RoundId) -> State:
    """A round begins; the undo of the round before is given up. A torn rank may be healed by one."""
    match state:
        case ServingState(version=base):
            return StagingState(base, target, round_id)
        case TornState():
            return StagingState(None, target, round_id, state)
        case _:
            raise WrongState(describe(state), "open")


def verified(state: State) -> State:
    """Everything is in the shadow, and is right."""
    match state:
        case StagingState(base=base, target=target, round=round_id, torn=torn):
            return ReadyState(base, target, round_id, torn)
        case _:
            raise WrongState(describe(state), "verify")


def begin_swap(state: State) -> State:
    """The decision to commit has reached the boundary."""
    match state:
        case ReadyState(base=base, target=target, round=round_id, torn=torn):
            return SwappingState(base, target, round_id, torn=torn)
        case _:
            raise WrongState(describe(state), "commit")


def begin_undo(state: State, round_id: RoundId) -> State:
    """The decision to go back has reached the boundary."""
    match state:
        case ServingState(version=version, undo=undo, can_undo=True):
            return SwappingState(version, undo, round_id, undo=True)
        case ServingState():
            raise WrongState(f"{describe(state)}, with no version before it", "undo")
        case _:
            raise WrongState(describe(state), "undo")


def settled(state: State, *, keep: bool) -> State:
    """The outcome of a swap is known: all ranks keep it, or all have swapped back.

    After a commit the undo is what was live before it; after an undo there is none: the way forward is a new round.
    """
    match state:
        case SwappingState(target=target, undo=undo, torn=torn) if keep and (undo or torn is not None):
            return ServingState(target)  # what is in the shadow now is not to come back
        case SwappingState(base=base, target=target) if keep:
            return ServingState(target, base, can_undo=True)
        case SwappingState(base=base, torn=torn):
            return torn or ServingState(base)
        case _:
            raise WrongState(describe(state), "settle")


def after_failure(state: State, cause: str) -> State:
    """What a failure leaves. Before a commit nothing was touched; in place there is no way back."""
    match state:
        case (
            StagingState(base=base, torn=torn)
            | ReadyState(base=base, torn=torn)
            | SwappingState(base=base, torn=torn)
        ):
            return torn or ServingState(base)
        case OverwritingState(target=target):
            return TornState(target, cause)
        case _:
            raise WrongState(describe(state), "fail")


def overwrite(state: State) -> State:
    """The decision to commit in place has reached the boundary."""
    match state:
        case ReadyState(base=base, target=target, round=round_id, torn=torn):
            return OverwritingState(base, target, round_id, torn)
        case _:
            raise WrongState(describe(state), "overwrite")


def untouched(state: State) -> State:
    """An in-place round ended before it had written anything."""
    match state:
        case OverwritingState(base=base, torn=torn):
            return torn or ServingState(base)
        case _:
            raise WrongState(describe(state), "leave untouched")


def overwritten(state: State) -> State:
    """An in-place round came to its end, verified."""
    match state:
        case OverwritingState(target=target):
            return ServingState(target)
        case _:
            raise WrongState(describe(state), "finish overwriting")


def sleep(state: State, *, weights: bool, kv_cache: bool) -> State:
    """Give memory back; what is asleep stays asleep."""
    match state:
        case ServingState(version=version):
            return ReleasedState(version, weights, kv_cache)
        case ReleasedState(version=version, weights=w, kv_cache=k):
            return ReleasedState(version, w or weights, k or kv_cache)
        case _:
            raise WrongState(describe(state), "sleep")


def wake(state: State, *, weights: bool, kv_cache: bool) -> State:
    """Restore what was given back; serving again only when nothing is missing."""
    match state:
        case ReleasedState(version=version, weights=w, kv_cache=k):
            w, k = w and not weights, k and not kv_cache
            return ReleasedState(version, w, k) if w or k else ServingState(version)
        case ServingState():
            return state
        case _:
            raise WrongState(describe(state), "wake up")


def serving_version(state: State) -> Version | None:
    """What can be generated with now; None where nothing can, or its origin is unknown."""
    match state:
        case ServingState(version=version) | StagingState(base=version) | ReadyState(base=version):
            return version
        case ReleasedState(version=version, weights=False):
            return version
        case _:
            return None


def torn_by(state: State) -> TornState | None:
    """What live weights are torn by, also while a round that is to heal them is under way."""
    match state:
        case TornState():
            return state
        case (
            StagingState(torn=torn)
            | ReadyState(torn=torn)
            | SwappingState(torn=torn)
            | OverwritingState(torn=torn)
        ):
            return torn
        case _:
            return None


def describe(state: State) -> str:
    """A state as error messages say it."""
    match state:
        case ServingState(version=None):
            return "serving weights that nobody named"
        case ServingState(version=version):
            return f"serving {version}"
        case StagingState(torn=torn, target=target) | ReadyState(torn=torn, target=target) if (
            torn is not None
        ):
            return f"{describe(torn)}, and about to be healed by {target}"
        case StagingState(base=base, target=target):
            return f"staging {target} over {base}"
        case ReadyState(base=base, target=target):
            return f"ready to go from {base} to {target}"
        case SwappingState(base=base, target=target):
            return f"going from {base} to {target}"
        case OverwritingState(target=target):
            return f"overwriting with {target}"
        case TornState(target=target, cause=cause):
            return f"torn by {target} ({cause})"
        case ReleasedState(version=version):
            return f"asleep at {version}"
