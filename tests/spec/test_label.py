"""What a version may be called: a text or an integer; everything else is refused where it is given, by its value and type."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch

from liveweight.errors import LabelInvalid
from liveweight.spec.label import LONGEST, checked_label
from liveweight.spec.manifest import Version


class Step(enum.StrEnum):
    """Labels as an enumeration has them."""

    LAST = "step_9"


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (7, 7),
        (-(2**63), -(2**63)),
        (2**63 - 1, 2**63 - 1),
        ("step_100", "step_100"),
        ("Schritt 9, größer", "Schritt 9, größer"),
        ("x" * LONGEST, "x" * LONGEST),
        (Step.LAST, "step_9"),
        (np.str_("a"), "a"),
        (np.int32(5), 5),
        (np.uint64(5), 5),
        (torch.tensor(5), 5),
        (torch.tensor([5]), 5),
    ],
)
def test_texts_and_integers_are_labels_and_become_plain_ones(given: object, label: str | int) -> None:
    found = checked_label(given)
    assert found == label
    assert type(found) is type(label)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "not None (NoneType)"),
        (1.5, "not 1.5 (float)"),
        (True, "not True (bool)"),
        (b"step", "not b'step' (bytes)"),
        ((1, 2), "not (1, 2) (tuple)"),
        (np.float32(1), "(float32)"),
        (np.True_, "(bool)"),
        (np.array([1, 2]), "(ndarray)"),
        (torch.tensor(1.0), "(Tensor)"),
        (torch.tensor(True), "(Tensor)"),
        (torch.tensor([1, 2]), "(Tensor)"),
        (2**63, "at most 64 bits, not 9223372036854775808"),
        (-(2**63) - 1, "at most 64 bits"),
        pytest.param(10**5000, "at most 64 bits", id="5000 digits"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), "(Tensor)"),
        ("", "must not be empty"),
        ("x" * (LONGEST + 1), f"has {LONGEST + 1}"),
        ("two\nlines", r"not 'two\nlines'"),
        ("nul\0", "printable"),
        ("half \ud800", "printable"),
    ],
)
def test_anything_else_is_refused_by_its_value_and_type(given: object, said: str) -> None:
    with pytest.raises(LabelInvalid) as refused:
        checked_label(given)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 200


def test_versions_are_compared_by_the_text_of_their_labels() -> None:
    number, text = Version(run="r", label=10, digest="a"), Version(run="r", label="10", digest="a")
    assert number == text
    assert not number != text  # noqa: SIM202
    assert hash(number) == hash(text)
    assert number.same_name(text)
    for other in (
        Version(run="s", label=10, digest="a"),
        Version(run="r", label=1, digest="a"),
        Version(run="r", label=10, digest="b"),
        "10",
    ):
        assert number != other
        assert not number == other  # noqa: SIM201
