"""Labels: what a trainer may call a version.

A label is a text or an integer. Two labels are the same if their texts are: `10` and `"10"` name one version.
"""

from __future__ import annotations

import operator
import reprlib
from typing import SupportsIndex

from liveweight.errors import LabelInvalid

LONGEST = 256
"""How many characters a label may have: it travels in messages, headers, log lines and names of directories."""
BITS = 63
"""An integer is from -2**63 to 2**63 - 1."""


def checked_label(label: object) -> str | int:
    """The label as a plain str or int. Raises LabelInvalid, which names the value and its type, for anything else.

    Integers of NumPy and integer tensors of one element count as integers; reading one from a device waits for the device. Booleans and
    floats are refused: `True` and `1.0` are hardly meant as labels.
    """
    if isinstance(label, str):
        text = str.__str__(label)  # also of a subclass, which no peer could decode
        if not text:
            raise LabelInvalid("a label must not be empty")
        if len(text) > LONGEST:
            raise LabelInvalid(f"a label has at most {LONGEST} characters, {show(label)} has {len(text)}")
        if not text.isprintable():
            raise LabelInvalid(f"a label has printable characters only, not {show(label)}")
        return text
    number = _integer(label)
    if number is None:
        raise LabelInvalid(f"a label is a str or an int, not {show(label)} ({type(label).__name__})")
    if not -(1 << BITS) <= number < 1 << BITS:
        raise LabelInvalid(f"a label of type int has at most 64 bits, not {show(number)}")
    return number


def show(label: object) -> str:
    """Any value as error messages name it: its repr, cut; or its type, if it has no repr."""
    try:
        return reprlib.repr(label)
    except Exception:  # foreign code; and an int of thousands of digits has no text
        return f"a value of type {type(label).__name__}"


def _integer(label: object) -> int | None:
    if isinstance(label, bool) or not isinstance(label, SupportsIndex):
        return None
    if str(getattr(label, "dtype", "")).endswith("bool"):  # torch gives a tensor of bool an index
        return None
    try:
        return operator.index(label)
    except (
        Exception
    ):  # foreign code: a tensor of floats, or one without data, has the method and is no integer
        return None
