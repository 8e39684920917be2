"""Frames: every message comes back as it went; any other bytes raise a WireError and nothing else."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.errors import MessageInvalid, MessageTooLarge, ProtocolMismatch, WireError
from liveweight.wire.codec import MAGIC, PROTOCOL, Codec, version_of
from liveweight.wire.limits import WireLimits
from tests.support.wire import CODEC, CODEC_OF_ANOTHER, OTHER, Ping, Pong, Say, Small

LIMITS = WireLimits(message_bytes=4096)
MIB = 1024 * 1024

MESSAGES = st.one_of(
    st.builds(Ping, st.integers(-(2**63), 2**64 - 1)),
    st.builds(
        Say,
        text=st.text(max_size=50),
        data=st.binary(max_size=200),
        list=st.lists(st.integers(0, 2**40), max_size=20).map(tuple),
        table=st.dictionaries(
            st.text(max_size=5), st.tuples(st.floats(allow_nan=False), st.none() | st.text(max_size=5))
        ),
    ),
)
EXAMPLES: list[Small] = [
    Ping(0),
    Pong(-1),
    Say("héllo", b"\0" * 40, (1, 2, 3), {"a": (1.5, None), "b": (2.0, "x")}),
]


def frame_of(body: bytes, version: int = PROTOCOL) -> bytes:
    return struct.pack("<2sH", MAGIC, version) + body


@settings(deadline=None)
@given(MESSAGES, st.integers(0, 2**64 - 1))
def test_a_message_comes_back_as_it_went(body: Small, call: int) -> None:
    envelope = CODEC.decode(CODEC.encode(body, call=call, limits=WireLimits()), limits=WireLimits())
    assert (envelope.call, envelope.body) == (call, body)


def test_the_bytes_of_a_frame_are_fixed() -> None:
    assert CODEC.encode(Ping(3), call=7, limits=LIMITS) == b"LW\x08\x00\x92\x07\x82\xa4type\xa4Ping\xa1n\x03"
    assert CODEC.refusal(9) == b"LW\x00\x00\x82\xa4ours\x08\xa6theirs\x09"
    assert CODEC.greeting == b"LW\x08\x00"


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_have_a_call_or_none_and_raise_nothing(noise: bytes, framed: bool) -> None:
    frame = frame_of(noise) if framed else noise
    call = CODEC.call_of(frame, limits=LIMITS)
    assert call >= 0
    with suppress(WireError):
        assert CODEC.decode(frame, limits=LIMITS).call == call


def test_the_call_of_a_frame_is_read_only_from_a_whole_envelope_of_our_version() -> None:
    wrong = msgspec.msgpack.encode([7, {"type": "Ping", "n": "no number"}])
    assert CODEC.call_of(frame_of(wrong), limits=LIMITS) == 7
    assert CODEC.call_of(frame_of(wrong, OTHER), limits=LIMITS) == 0
    assert CODEC.call_of(frame_of(wrong[:-1]), limits=LIMITS) == 0, "cut"
    assert CODEC.call_of(frame_of(wrong + b"\0"), limits=LIMITS) == 0, "with more behind it"
    assert CODEC.call_of(frame_of(msgspec.msgpack.encode([7, 1, 2])), limits=LIMITS) == 0, "no envelope"
    assert CODEC.call_of(frame_of(msgspec.msgpack.encode([-7, {}])), limits=LIMITS) == 0, "no call"
    assert CODEC.call_of(frame_of(b"\x92\x07" + b"\x91" * 4000), limits=LIMITS) == 0, "nested without end"
    assert CODEC.call_of(frame_of(msgspec.msgpack.encode([7, "x" * 5000])), limits=LIMITS) == 0, "too large"


def test_a_message_beyond_the_limit_is_neither_encoded_nor_decoded() -> None:
    with pytest.raises(MessageTooLarge, match="the limit is 4096"):
        CODEC.encode(Say("x" * 5000), call=0, limits=LIMITS)
    with pytest.raises(MessageTooLarge, match="message of 5000 bytes"):
        CODEC.decode(b"\0" * 5000, limits=LIMITS)


def test_another_version_is_named_on_both_sides() -> None:
    with pytest.raises(ProtocolMismatch) as refused:
        CODEC.decode(CODEC_OF_ANOTHER.encode(Ping(1), call=1, limits=LIMITS), limits=LIMITS)
    assert (refused.value.ours, refused.value.theirs) == (PROTOCOL, OTHER)
    with pytest.raises(ProtocolMismatch) as learned:
        CODEC_OF_ANOTHER.decode(CODEC.refusal(OTHER), limits=LIMITS)
    assert (learned.value.ours, learned.value.theirs) == (OTHER, PROTOCOL)


@pytest.mark.parametrize("protocol", [0, -1, 65536])
def test_no_codec_speaks_a_version_that_does_not_fit_or_is_reserved(protocol: int) -> None:
    with pytest.raises(ValueError, match="protocol"):
        Codec(Small, protocol=protocol)


DEEP = {
    "arrays": b"\x91" * 3000,
    "pairs": b"\x92" * 3000,
    "maps": b"\x81\xa1a" * 1300,
    "maps as keys": b"\x81" * 3000,
    "in an unknown field": b"\x92\x01\x82\xa4type\xa4Ping\xa1z" + b"\x91" * 3000,
    "in a field": b"\x92\x01\x82\xa4type\xa3Say\xa4list" + b"\x91" * 3000,
}
INVALID = {
    "nothing": b"",
    "a part of the header": b"LW\x02",
    "a header alone": frame_of(b""),
    "another magic": b"XY\x01\x00\x90",
    "no msgpack": frame_of(b"\xc1"),
    "an unknown tag": frame_of(b"\x92\x01\x82\xa4type\xa4Pung\xa1n\x03"),
    "no tag": frame_of(b"\x92\x01\x81\xa1n\x03"),
    "an unknown field": frame_of(b"\x92\x01\x83\xa4type\xa4Ping\xa1n\x03\xa1z\x03"),
    "a field missing": frame_of(b"\x92\x01\x81\xa4type\xa4Ping"),
    "a negative call": frame_of(b"\x92\xff\x82\xa4type\xa4Ping\xa1n\x03"),
    "one more in the envelope": frame_of(b"\x93\x01\x82\xa4type\xa4Ping\xa1n\x03\x01"),
    "bytes after the message": frame_of(b"\x92\x01\x82\xa4type\xa4Ping\xa1n\x03\x00"),
    "bytes that are no text": frame_of(b"\x92\x01\x82\xa4type\xa3Say\xa4text\xa2\xff\xfe"),
    "an array of four thousand million": frame_of(b"\x92\x01\x82\xa4type\xa3Say\xa4list\xdd\xff\xff\xff\xff"),
    "bytes of four thousand million": frame_of(b"\x92\x01\x82\xa4type\xa3Say\xa4data\xc6\xff\xff\xff\xff"),
    "a refusal without a body": frame_of(b"", 0),
    "a refusal of strings": frame_of(b"\x82\xa4ours\xa1a\xa6theirs\xa1b", 0),
    "a refusal by version 0": frame_of(b"\x82\xa4ours\x00\xa6theirs\x01", 0),
    "a refusal with more": frame_of(b"\x83\xa4ours\x03\xa6theirs\x01\xa1z\x00", 0),
    **{f"deep {name}": frame_of(body) for name, body in DEEP.items()},
    **{f"a deep refusal, {name}": frame_of(body, 0) for name, body in DEEP.items()},
}


@pytest.mark.parametrize("what", INVALID)
def test_what_is_no_message_is_invalid(what: str) -> None:
    with pytest.raises(MessageInvalid):
        CODEC.decode(INVALID[what], limits=LIMITS)


class Loose(msgspec.Struct, frozen=True, tag=True):
    """A message that skips unknown fields and takes anything: the hardest to decode safely."""

    anything: object = None


@pytest.mark.parametrize("field", ["anything", "unknown"])
@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a", b"\x81", b"\xdd\x00\x00\x00\x02"])
def test_nesting_without_end_is_invalid_whatever_the_type_allows(field: str, nest: bytes) -> None:
    codec: Codec[Loose] = Codec(Loose)
    head = b"\x92\x01\x82\xa4type\xa5Loose" + bytes([0xA0 | len(field)]) + field.encode()
    with pytest.raises(MessageInvalid):
        codec.decode(frame_of(head + nest * 1_000_000), limits=WireLimits())


class Choosy(msgspec.Struct, frozen=True, tag=True):
    """A message whose own check raises something foreign."""

    n: int

    def __post_init__(self) -> None:
        raise LookupError("not today")


def test_what_a_message_of_its_own_raises_is_translated() -> None:
    codec: Codec[Choosy] = Codec(Choosy)
    with pytest.raises(MessageInvalid, match="not today"):
        codec.decode(frame_of(b"\x92\x01\x82\xa4type\xa6Choosy\xa1n\x03"), limits=LIMITS)


def test_what_a_peer_sent_is_quoted_in_one_printable_line() -> None:
    forged = msgspec.msgpack.encode([1, {"type": "x\n2026 ERROR forged\x1b[2J"}])
    with pytest.raises(MessageInvalid, match="ERROR forged") as invalid:
        CODEC.decode(frame_of(forged), limits=LIMITS)
    assert str(invalid.value).isprintable()


def test_decoding_near_the_end_of_the_stack_still_raises_only_our_errors() -> None:
    def at_depth(depth: int) -> None:
        if depth > 0:
            at_depth(depth - 1)
        else:
            with pytest.raises(MessageInvalid):
                CODEC.decode(frame_of(DEEP["arrays"]), limits=LIMITS)

    at_depth(sys.getrecursionlimit() // 2)


@settings(deadline=None, max_examples=500)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", MAGIC, CODEC.greeting, b"LW\0\0", CODEC.greeting + b"\x92\x01"]),
)
def test_any_bytes_decode_or_raise_a_wire_error(tail: bytes, head: bytes) -> None:
    try:
        CODEC.decode(head + tail, limits=LIMITS)
    except WireError:
        return


def damaged(chance: random.Random, frames: list[bytes]) -> bytes:
    """One hostile frame."""
    frame = bytearray(chance.choice(frames))
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return CODEC.greeting + chance.randbytes(chance.randrange(200))
        case 2:
            return bytes(frame[: chance.randrange(len(frame))])
        case 3:
            return bytes(frame) + chance.randbytes(chance.randrange(LIMITS.message_bytes + 100))
        case 4:
            return struct.pack("<2sH", MAGIC, chance.randrange(65536)) + bytes(frame[4:])
        case 5:
            at = chance.randrange(4, len(frame))
            return bytes(frame[:at]) + chance.choice(list(DEEP.values()))[: chance.randrange(1, 3000)]
        case 6:
            at = chance.randrange(len(frame))
            claim = bytes([chance.choice([0xC6, 0xDB, 0xDD, 0xDF, 0xC9])]) + b"\xff" * 4
            return bytes(frame[:at]) + claim + bytes(frame[at:])
        case _:
            for _ in range(chance.randrange(1, 4)):
                frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
            return bytes(frame)


def test_a_hundred_thousand_hostile_frames_raise_only_wire_errors_and_hold_no_memory() -> None:
    chance = random.Random(20260)
    frames = [CODEC.encode(body, call=1, limits=LIMITS) for body in EXAMPLES] + [CODEC.refusal(OTHER)]
    outcomes: dict[str, int] = {}
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100_000):
            frame = damaged(chance, frames)
            try:
                CODEC.decode(frame, limits=LIMITS)
                outcome = "decoded"
            except WireError as error:
                outcome = type(error).__name__
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(outcomes) == {"decoded", "MessageInvalid", "MessageTooLarge", "ProtocolMismatch"}
    assert outcomes["MessageInvalid"] > 50_000
    assert peak - before < MIB
    assert after - before < MIB // 4


def test_a_header_is_read_without_the_rest() -> None:
    assert version_of(b"LW\x07\x00garbage") == 7
