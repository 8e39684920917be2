"""Manifests keep what they say, refuse contradictions, and are compared in both directions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveweight.errors import ManifestInvalid, ManifestMismatch
from liveweight.spec.decoders import from_json, from_msgpack
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, OptionalGroup, TensorSpec, Version, compare, left_out

EMBED = TensorSpec(
    name="embed",
    dtype=DType.BFLOAT16,
    shape=(4, 2),
    aliases=("head",),
    digest="00112233445566778899aabbccddeeff",
)
NORM = TensorSpec(name="norm", dtype=DType.FLOAT32, shape=(2,), digest="f" * 32)
MANIFEST = Manifest(tensors=(EMBED, NORM))

GOLDEN_JSON = (
    b'{"tensors":[{"name":"embed","dtype":"bfloat16","shape":[4,2],"aliases":["head"],'
    b'"digest":"00112233445566778899aabbccddeeff"},'
    b'{"name":"norm","dtype":"float32","shape":[2],"aliases":[],"digest":"ffffffffffffffffffffffffffffffff"}],'
    b'"format":1}'
)

SPECS = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=8),
    dtype=st.sampled_from(DType),
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    digest=st.none() | st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
)
MANIFESTS = st.lists(SPECS, min_size=1, max_size=6, unique_by=lambda spec: spec.name).map(
    lambda specs: Manifest(tensors=tuple(specs))
)


@given(MANIFESTS)
def test_a_manifest_round_trips(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_msgpack(manifest.to_msgpack()) == manifest


def test_the_bytes_of_a_manifest_do_not_change_between_releases() -> None:
    assert MANIFEST.to_json() == GOLDEN_JSON
    assert MANIFEST.to_msgpack().hex() == (
        "82a774656e736f72739285a46e616d65a5656d626564a56474797065a862666c6f61743136a573686170659204"
        "02a7616c696173657391a468656164a6646967657374d92030303131323233333434353536363737383839396161626263636464656566"
        "6685a46e616d65a46e6f726da56474797065a7666c6f61743332a5736861706591"
        "02a7616c696173657390a6646967657374d9206666666666666666666666666666666666666666666666666666666666666666a6666f726d617401"
    )
    assert MANIFEST.digest() == "be1bade426b2a3a4e92d0632320bbbc4"


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    for read in (Manifest.from_json, Manifest.from_msgpack):
        with pytest.raises(ManifestInvalid):
            read(data)


@pytest.mark.parametrize(
    "tensors",
    [(), (NORM, NORM), (EMBED, msgspec.structs.replace(NORM, name="head"))],
    ids=["empty", "twice", "alias taken"],
)
def test_a_manifest_that_contradicts_itself_is_refused(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ManifestInvalid):
        Manifest(tensors=tensors)


def test_a_newer_format_is_refused_with_both_numbers() -> None:
    with pytest.raises(ManifestInvalid, match="format 2, this release reads 1"):
        Manifest.from_json(GOLDEN_JSON.replace(b'"format":1', b'"format":2'))


def test_order_and_tying_do_not_change_the_content() -> None:
    untied = [
        msgspec.structs.replace(EMBED, aliases=()),
        msgspec.structs.replace(EMBED, name="head", aliases=()),
    ]
    assert Manifest(tensors=(NORM, *untied)).digest() == MANIFEST.digest()
    assert Manifest(tensors=(NORM, untied[0])).digest() != MANIFEST.digest()


def test_an_unknown_digest_leaves_the_content_unknown() -> None:
    assert MANIFEST.without_digests().digest() is None


def test_differences_are_named_in_both_directions() -> None:
    wide = msgspec.structs.replace(EMBED, shape=(4, 3))
    half = msgspec.structs.replace(NORM, dtype=DType.FLOAT16)
    extra = TensorSpec(name="bias", dtype=DType.FLOAT32, shape=(2,))
    gone = TensorSpec(name="gone", dtype=DType.FLOAT32, shape=(2,))
    with pytest.raises(ManifestMismatch) as caught:
        compare(Manifest(tensors=(EMBED, NORM, gone)), Manifest(tensors=(wide, half, extra)))
    assert caught.value.differences == (
        "embed expected bfloat16[4, 2], offered bfloat16[4, 3]",
        "norm expected float32[2], offered float16[2]",
        "gone missing",
        "bias unexpected",
    )


def manifest_of(*names: str) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=name, dtype=DType.FLOAT32, shape=(2,)) for name in names))


def test_a_mismatch_of_many_names_shows_some_of_both_sides_and_the_closest_offered_one() -> None:
    names = [f"model.layers.{number}.mlp.weight" for number in range(500)]
    with pytest.raises(ManifestMismatch) as caught:
        compare(manifest_of(*names), manifest_of(*(f"policy.{name}" for name in reversed(names))))
    text = str(caught.value)
    assert "model.layers.0.mlp.weight missing (closest offered: policy.model.layers.0.mlp.weight)" in text
    assert "policy.model.layers.499.mlp.weight unexpected" in text
    assert text.endswith("and 992 more")
    assert len(caught.value.differences) == 1000


@pytest.mark.parametrize(
    ("missing", "offered", "closest"),
    [
        ("model.norm.weight", ["model.norms.weight", "head.bias"], "model.norms.weight"),
        ("model.norm.weight", ["weight", "norm.weight"], "norm.weight"),
        ("scale", ["a.scale", "scales"], "a.scale"),
        ("model.norm.weight", ["x"], None),
        ("model.norm.weight", ["a"], None),
    ],
)
def test_the_closest_offered_name_shares_its_end_or_looks_alike(
    missing: str, offered: list[str], closest: str | None
) -> None:
    with pytest.raises(ManifestMismatch) as caught:
        compare(manifest_of(missing, "same"), manifest_of("same", *offered))
    hint = "" if closest is None else f" (closest offered: {closest})"
    assert caught.value.differences[0] == f"{missing} missing{hint}"


def test_the_text_of_a_mismatch_is_bounded_whatever_the_names() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        compare(
            manifest_of(*(f"{number}.{'a' * 50_000}" for number in range(20))),
            manifest_of(*(f"{number}.{'b' * 50_000}" for number in range(20))),
        )
    assert len(str(caught.value)) < 3000


def test_ties_match_where_they_can() -> None:
    untied = (
        msgspec.structs.replace(EMBED, aliases=()),
        msgspec.structs.replace(EMBED, name="head", aliases=()),
    )
    compare(Manifest(tensors=untied), Manifest(tensors=(EMBED,)))
    compare(Manifest(tensors=(EMBED,)), Manifest(tensors=(untied[1],)))
    with pytest.raises(ManifestMismatch, match="embed is tied to head, offered as separate tensors"):
        compare(Manifest(tensors=(EMBED,)), Manifest(tensors=untied))


@pytest.mark.parametrize("wrong", [{"name": ""}, {"shape": (-1,)}, {"digest": "xyz"}])
def test_a_tensor_cannot_be_built_wrong(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.structs.replace(NORM, **wrong)


def test_run_and_label_name_a_version() -> None:
    one = Version(run="r", label=1, digest="0" * 32)
    numbered = Version(run="r", label=1, digest="0" * 32, number=7)
    assert one == numbered and hash(one) == hash(numbered), "the number is no part of what a version is"
    assert one.same_name(Version(run="r", label=1))
    assert not one.same_name(Version(run="s", label=1))
    assert one.same_name(Version(run="r", label="1")), "labels are compared as text"
    assert not one.same_name(Version(run="r", label=2))


def test_a_group_may_be_left_out_whole_or_not_at_all() -> None:
    more = [TensorSpec(name=name, dtype=DType.FLOAT32, shape=(2,)) for name in ("draft.a", "draft.b")]
    expected = Manifest(tensors=(EMBED, *more))
    group = OptionalGroup(name="draft", tensors=("draft.a", "draft.b"))
    compare(expected, Manifest(tensors=(EMBED,)), [group])
    compare(expected, expected, [group])
    with pytest.raises(ManifestMismatch, match=r"draft.a missing, draft.b missing"):
        compare(expected, Manifest(tensors=(EMBED,)))
    with pytest.raises(ManifestMismatch, match=r"refused: draft.b missing"):
        compare(expected, Manifest(tensors=(EMBED, more[0])), [group])
    assert left_out(Manifest(tensors=(EMBED,)), [group]) == (group,)
    assert left_out(Manifest(tensors=(EMBED, more[0])), [group]) == ()


def test_versions_from_before_they_had_numbers_are_still_read() -> None:
    golden = Version(run="r", label="step_9", digest="0" * 32)
    as_json = b'{"run":"r","label":"step_9","digest":"00000000000000000000000000000000"}'
    as_msgpack = bytes.fromhex("83a372756ea172a56c6162656ca6737465705f39a6646967657374d920") + b"0" * 32
    for old in (from_json(as_json, Version), from_msgpack(as_msgpack, Version)):
        assert (old, old.number) == (golden, None)
    numbered = Version(run="r", label=1, number=3)
    assert from_msgpack(msgspec.msgpack.encode(numbered), Version).number == 3
