"""The outcome of a round as a message from a trainer's rank 0 to its other ranks: a report, or an error with all its facts."""

from __future__ import annotations

import msgspec

from liveweight.errors import LiveWeightError, MessageInvalid, RoundFailed, Unavailable
from liveweight.rounds.report import Report
from liveweight.spec.decoders import from_msgpack
from liveweight.spec.manifest import Version
from liveweight.wire.messages import Outcome
from liveweight.wire.messages.values import fault_of


def encode_outcome(number: int, version: Version, end: Report | BaseException) -> Outcome:
    """The message for a report, or for the error that ended the round."""
    match end:
        case Report():
            return Outcome(number=number, version=end.version, report=msgspec.msgpack.encode(end))
        case RoundFailed(cause=cause):
            fault = fault_of(cause, step=end.step, rank=end.rank, waited_s=end.waited_s)
            return Outcome(
                number=number,
                version=version,
                fault=fault,
                replica=end.replica,
                serving=end.serving,
                answers=end.answers,
            )
        case LiveWeightError():
            return Outcome(number=number, version=version, fault=fault_of(end, step="round"))
        case _:  # not a LiveWeightError; the other ranks must still learn that the round is over
            error = Unavailable(f"trainer rank 0 failed: {type(end).__name__}: {end}")
            return Outcome(number=number, version=version, fault=fault_of(error, step="round"))


def decode_outcome(outcome: Outcome) -> Report:
    """Return the report in the message, or raise the error in it."""
    fault = outcome.fault
    if fault is None:
        try:
            return from_msgpack(outcome.report or b"", Report)
        except msgspec.DecodeError as error:
            raise MessageInvalid(f"no report of ours: {error}") from error
    if outcome.replica is None:
        raise fault.to_error()
    raise RoundFailed(
        fault.to_error(),
        replica=outcome.replica,
        rank=fault.rank,
        step=fault.step,
        waited_s=fault.waited_s,
        serving=outcome.serving,
        answers=outcome.answers,
    )
