"""The state of a publisher's fleet: what each replica serves, and which are behind. Requested from the replicas, outside a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from liveweight.errors import LiveWeightError
from liveweight.rounds.replica import Replica, ReplicaRefused
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.spec.version_age import newest
from liveweight.wire.messages import ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica's status, `state` in words. `boot` names its incarnation; `restarted`: the publisher knew another one. `behind`: it does
    not serve the fleet's version, or cannot be asked; `fault` then says why. `not_serving`: what it does with requests while it does not
    serve them, as when it is paused or waits for weights."""

    name: str
    serving: Version | None
    state: str
    boot: str | None
    restarted: bool
    behind: bool
    fault: LiveWeightError | None = None
    not_serving: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All replicas of a publisher. `version` is what was published last, or, by a publisher that has published nothing, the newest that
    one of them serves; None: all serve what they were started on."""

    version: Version | None
    replicas: tuple[ReplicaStatus, ...]

    @property
    def behind(self) -> tuple[str, ...]:
        """The replicas that do not serve the fleet's version."""
        return tuple(replica.name for replica in self.replicas if replica.behind)


def get_state(replica: Replica, deadline: Deadline) -> ReplicaState | LiveWeightError:
    """The replica's state, or the error if it cannot be learned."""
    try:
        return replica.replica_state(deadline)
    except ReplicaRefused as refused:
        return refused.to_error()
    except LiveWeightError as error:
        return error


def fleet_of(
    replicas: Sequence[Replica],
    states: Iterable[ReplicaState | LiveWeightError],
    *,
    published: Version | None,
    boots: Sequence[str | None],
) -> Fleet:
    """The fleet from the replicas' states. `boots` are the incarnations that the publisher knew before."""
    answers = list(states)
    served = [(one.serving, one.serving_s) for one in answers if isinstance(one, ReplicaState)]
    known = [(version, age_s) for version, age_s in served if version is not None]
    version = newest(known) if published is None else published
    return Fleet(
        version=version,
        replicas=tuple(
            _replica_state(replica.name, one, version, boot)
            for replica, one, boot in zip(replicas, answers, boots, strict=True)
        ),
    )


def _replica_state(
    name: str, answer: ReplicaState | LiveWeightError, version: Version | None, boot: str | None
) -> ReplicaStatus:
    if not isinstance(answer, ReplicaState):
        return ReplicaStatus(
            name=name,
            serving=None,
            state="out of reach",
            boot=None,
            restarted=False,
            behind=version is not None,
            fault=answer,
        )
    return ReplicaStatus(
        name=name,
        serving=answer.serving,
        state=_described(answer),
        boot=answer.boot,
        restarted=boot not in (None, answer.boot),
        behind=version is not None and answer.serving != version,
        not_serving=answer.not_serving,
    )


def _described(answer: ReplicaState) -> str:
    """The replica's state in words. It is not called serving if its engine does not serve."""
    if answer.not_serving is None:
        return answer.state
    return f"{answer.state.replace('serving', 'holding', 1)}; {answer.not_serving}"
