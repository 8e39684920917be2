"""Spans and regions behave like the sets of positions that they stand for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveweight.errors import LayoutInvalid
from liveweight.spec.region import Region, Span, box, canonical, check_tiling, count, intersection, whole
from tests.support.layouts import regions, tilings

SPANS = st.builds(Span, st.integers(0, 30), st.integers(0, 12), st.integers(1, 7))
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def positions(span: Span) -> set[int]:
    return set(range(span.start, span.start + span.count * span.step, span.step))


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(positions(span) for span in region)))


@given(SPANS, SPANS)
def test_two_spans_meet_in_exactly_their_common_positions(a: Span, b: Span) -> None:
    assert positions(a.intersection(b)) == positions(a) & positions(b)


@given(SPANS, SPANS)
def test_spans_with_the_same_positions_have_one_canonical_form(a: Span, b: Span) -> None:
    assert (a.canonical() == b.canonical()) == (positions(a) == positions(b))


@given(st.data(), SHAPES)
def test_two_regions_meet_in_exactly_their_common_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    both = intersection(a, b)
    assert (set() if both is None else elements(both)) == elements(a) & elements(b)


@given(st.data(), SHAPES)
def test_a_tiling_with_copies_is_accepted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tiles = data.draw(tilings(shape))
    check_tiling("w", tiles + tiles, shape)


@given(st.data(), SHAPES)
def test_a_tiling_is_accepted_exactly_when_every_element_has_one_owner(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    tiles = [canonical(tile) for tile in data.draw(st.lists(regions(shape), max_size=4))]
    distinct = {tile for tile in tiles if count(tile)}
    owners = [element for tile in distinct for element in elements(tile)]
    whole_and_disjoint = sorted(owners) == sorted(elements(whole(shape)))
    try:
        check_tiling("w", tiles, shape)
        accepted = True
    except LayoutInvalid:
        accepted = False
    assert accepted == whole_and_disjoint


def test_a_partial_overlap_is_refused_by_name() -> None:
    with pytest.raises(LayoutInvalid, match=r"q_proj.*\[0:3\].*\[2:4\]"):
        check_tiling("q_proj", [box((0, 3)), box((2, 4))], (4,))


def test_an_element_without_an_owner_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match="1 of 4 elements"):
        check_tiling("w", [box((0, 3))], (4,))


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_a_span_cannot_be_built_wrong(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="span"):
        Span(*arguments)
