"""Manifests: the ordered list of a version's tensors, and what a version is.

A manifest says what is offered; it holds no bytes of weights. Its digests are made in spec/digest.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import xxhash

from liveweight.errors import ManifestInvalid, ManifestMismatch
from liveweight.spec.decoders import from_json, from_msgpack
from liveweight.spec.dtype import DType

FORMAT = 1
FIRST_OF_EACH = 2
"""How many missing, unexpected and differing names stand first in a mismatch; errors show eight in all."""
CLOSE_AMONG = 1000
"""How many offered names are searched for one that looks like a missing one: each takes some microseconds."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One full tensor: its name, dtype, shape, further names that share it (tied weights), and its content's digest if known."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    digest: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor without a name")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape}")
        if self.digest is not None and not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"{self.name}: a digest is 32 hex digits, not {self.digest!r}")

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """How many bytes its elements take."""
        return self.elements * self.dtype.size_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)

    def describe(self) -> str:
        """dtype and shape, as in error messages."""
        return f"{self.dtype.value}{list(self.shape)}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensors of one version, in the source's order; every name occurs once."""

    tensors: tuple[TensorSpec, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ManifestInvalid(f"manifest format {self.format}, this release reads {FORMAT}")
        if not self.tensors:
            raise ManifestInvalid("a manifest without tensors")
        named = Counter(name for tensor in self.tensors for name in tensor.names)
        twice = sorted(name for name, times in named.items() if times > 1)
        if twice:
            raise ManifestInvalid(f"named more than once: {', '.join(twice)}")

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def by_name(self) -> Mapping[str, TensorSpec]:
        """Every name, aliases included, to its tensor."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def digest(self) -> str | None:
        """The digest of the content: of every name's dtype, shape and digest, in name order. None if a tensor's is unknown.

        Order and tying do not matter: two sources with the same values under the same names have the same digest. `named_as` gives
        them the same names, where an engine knows a tensor by several.
        """
        digests = [tensor.digest for tensor in self.in_name_order()]
        if any(digest is None for digest in digests):
            return None
        return content_digest(
            self.names_digest(), b"".join(bytes.fromhex(digest or "") for digest in digests)
        )

    def in_name_order(self) -> list[TensorSpec]:
        """The tensor of every name, aliases included, by name."""
        return [
            tensor for _, tensor in sorted((name, tensor) for tensor in self.tensors for name in tensor.names)
        ]

    def names_digest(self) -> bytes:
        """A digest of every name's dtype and shape, in name order; content does not matter."""
        named = sorted((name, t.dtype.value, t.shape) for t in self.tensors for name in t.names)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(named))

    def without_digests(self) -> Manifest:
        """The same tensors, their content unknown."""
        return Manifest(
            tensors=tuple(msgspec.structs.replace(tensor, digest=None) for tensor in self.tensors)
        )

    def with_digests(self, digests: Sequence[str]) -> Manifest:
        """The same tensors with these digests, in the manifest's order."""
        return Manifest(
            tensors=tuple(
                msgspec.structs.replace(tensor, digest=digest)
                for tensor, digest in zip(self.tensors, digests, strict=True)
            )
        )

    def to_json(self) -> bytes:
        """As JSON; the same manifest gives the same bytes."""
        return msgspec.json.encode(self)

    def to_msgpack(self) -> bytes:
        """As msgpack; the same manifest gives the same bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read what `to_json` wrote; ManifestInvalid for anything else."""
        return _decoded(lambda: from_json(data, cls))

    @classmethod
    def from_msgpack(cls, data: bytes) -> Manifest:
        """Read what `to_msgpack` wrote; ManifestInvalid for anything else."""
        return _decoded(lambda: from_msgpack(data, cls))


def content_digest(names: bytes, digests: bytes) -> str:
    """The digest of a version: of its names (`names_digest`) and of its tensors' digests in name order, 16 bytes each."""
    return xxhash.xxh3_128_hexdigest(names + digests)


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights: the trainer's run, a label within it, and the digest of the content where it is known.

    Labels are compared as text: `10` and `"10"` are one label, since commands, HTTP and files know only texts. `number` counts the versions
    that a run's publisher has offered, from 1; it tells their age (spec/version_age). None: unknown, as of weights that an engine was
    started on. It takes no part in equality.
    """

    run: str
    label: str | int
    digest: str | None = None
    number: int | None = None

    @property
    def content_known(self) -> bool:
        """Whether the digest is one of content. Where content is unknown, a round's id (`boot/epoch`) stands in for it."""
        return self.digest is not None and "/" not in self.digest

    def same_name(self, other: Version) -> bool:
        """Whether run and label, which identify a version within a run, are the same."""
        return self.run == other.run and str(self.label) == str(other.label)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self.same_name(other) and self.digest == other.digest

    def __ne__(self, other: object) -> bool:
        return not self == other  # a Struct has one of its own, which compares fields

    def __hash__(self) -> int:
        return hash((self.run, str(self.label), self.digest))

    def __str__(self) -> str:
        return str(self.label)


class OptionalGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors of an engine that an offer may leave out, all of them or none; the engine then keeps those that it has."""

    name: str
    tensors: tuple[str, ...]


class KeptSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors that a publisher leaves out on purpose, so that the engine keeps its own: `name` is what the publisher calls them.

    A tensor with a digest must have that content in the engine; one without must be what the engine was started with.
    """

    name: str
    tensors: tuple[TensorSpec, ...]

    def group(self) -> OptionalGroup:
        """As tensors that an offer may leave out."""
        return OptionalGroup(name=self.name, tensors=tuple(spec.name for spec in self.tensors))


def structure_of(layout: str, kept: KeptSet | None) -> str:
    """The name that rounds use for what a publisher offers, from the fingerprint of its layout: the same only for the same tensors in the
    same order, and the same kept tensors with the same content."""
    return layout if kept is None else f"{layout}-{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(kept))}"


def left_out(offered: Manifest, optional: Iterable[OptionalGroup]) -> tuple[OptionalGroup, ...]:
    """The groups of which an offer has nothing. One of which it has a part is no such group: the rest of it is missing."""
    offers = offered.by_name()
    return tuple(group for group in optional if not any(name in offers for name in group.tensors))


def compare(expected: Manifest, offered: Manifest, optional: Iterable[OptionalGroup] = ()) -> None:
    """Raise ManifestMismatch with every name that an engine misses, does not know, or wants in another dtype or shape.

    A few of each kind come first, so that a text that is cut off still has names of both sides. A missing name that stands there says
    which unexpected one is closest to it. A group of `optional` tensors that is left out whole is not missed.
    """
    missing: list[str] = []
    differing: list[str] = []
    offers, expects = offered.by_name(), expected.by_name()
    spared = {name for group in left_out(offered, optional) for name in group.tensors}
    for want in expected:
        match next((offers[name] for name in want.names if name in offers), None):
            case None if want.name in spared:
                pass
            case None:
                missing.append(want.name)
            case have if (have.dtype, have.shape) != (want.dtype, want.shape):
                differing.append(f"{want.name} expected {want.describe()}, offered {have.describe()}")
            case _:
                pass
    unexpected = [have.name for have in offered if not any(name in expects for name in have.names)]
    differing += _split_ties(expected, offered)
    if missing or unexpected or differing:
        kinds = (
            differing,
            [
                _missing(name, unexpected) if place < FIRST_OF_EACH else f"{name} missing"
                for place, name in enumerate(missing)
            ],
            [f"{name} unexpected" for name in unexpected],
        )
        first = [text for kind in kinds for text in kind[:FIRST_OF_EACH]]
        raise ManifestMismatch([*first, *(text for kind in kinds for text in kind[FIRST_OF_EACH:])])


def named_as(manifest: Manifest, expected: Manifest) -> Manifest:
    """The manifest's tensors under all names of the expected tensors that they fill, so that the same weights have one content digest,
    whichever names of a tied tensor a source has. A tensor that fills none, or the same one as another, keeps its names."""
    expects = expected.by_name()
    filled = [
        {expects[name].name: expects[name] for name in spec.names if name in expects} for spec in manifest
    ]
    times = Counter(name for wants in filled for name in wants)
    return Manifest(
        tensors=tuple(
            _with_names(spec, [name for want in wants.values() for name in want.names])
            if wants and all(times[name] == 1 for name in wants)
            else spec
            for spec, wants in zip(manifest, filled, strict=True)
        )
    )


def _with_names(spec: TensorSpec, names: Sequence[str]) -> TensorSpec:
    """The tensor under these names. Its own stays the first one, if it is among them: passes of a source go by it."""
    first = spec.name if spec.name in names else names[0]
    aliases = tuple(name for name in names if name != first)
    return msgspec.structs.replace(spec, name=first, aliases=aliases)


def _missing(name: str, unexpected: Sequence[str]) -> str:
    closest = _closest(name, unexpected)
    return f"{name} missing" if closest is None else f"{name} missing (closest offered: {closest})"


def _closest(name: str, offered: Sequence[str]) -> str | None:
    """The offered name that shares the most last components with this one, or else looks like it. None: none is like it."""
    parts = name.split(".")[::-1]
    shared = [_common(parts, other.split(".")[::-1]) for other in offered]
    most = max(shared, default=0)
    if most > 1 or most == len(parts):
        return offered[shared.index(most)]
    return next(iter(difflib.get_close_matches(name, offered[:CLOSE_AMONG], 1)), None)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many components are the same, from the beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _split_ties(expected: Manifest, offered: Manifest) -> Iterator[str]:
    """Names that the engine holds as one tensor and the source offers as several."""
    offers = offered.by_name()
    for want in expected:
        found = {offers[name].name for name in want.names if name in offers}
        if len(found) > 1:
            yield f"{want.name} is tied to {', '.join(want.aliases)}, offered as separate tensors"


def _decoded(decode: Callable[[], Manifest]) -> Manifest:
    try:
        return decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"not a manifest: {error}") from error
