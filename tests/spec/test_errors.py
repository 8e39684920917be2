"""The error tree: stable codes, one remedy each, and pages that say the same as the code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from liveweight import errors
from liveweight.errors import LiveWeightError, RoundFailed, catalogue
from tests.arch.source_tree import ROOT

CATALOGUE = [error for error in catalogue() if error.__module__ == errors.__name__]
WITHOUT_CODE_OF_THEIR_OWN = {
    "LiveWeightError",
    "Refused",
    "WireError",
    "Damage",
    "Unavailable",
    "EngineError",
    "RoundFailed",
}

Entry = tuple[str, str, str | None]
"""Name of a class, of its parent, and its own code."""


def meaning(error: type[LiveWeightError]) -> str:
    return (error.__doc__ or "").splitlines()[0]


def in_code(root: type[LiveWeightError] = LiveWeightError) -> Iterator[Entry]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child.__name__, root.__name__, vars(child).get("code")
            yield from in_code(child)


def drawn(picture: str) -> Iterator[Entry]:
    """Read the tree at the top of the file: four columns of indentation per generation."""
    parents: dict[int, str] = {0: "LiveWeightError"}
    for line in picture.splitlines():
        branch = re.fullmatch(r"([│ ]*)[├└]── (\w+) +(?:(LW-\d{3}) +)?(\S.*)", line)
        if branch is not None:
            depth = len(branch[1]) // 4
            parents[depth + 1] = branch[2]
            yield branch[2], parents[depth], branch[3]


def test_only_the_families_have_no_code_of_their_own() -> None:
    everything = {"LiveWeightError", *(name for name, _, _ in in_code())}
    assert everything - {error.__name__ for error in CATALOGUE} == WITHOUT_CODE_OF_THEIR_OWN


def test_codes_are_unique() -> None:
    codes = [error.code for error in CATALOGUE]
    assert len(set(codes)) == len(codes) > 0


@pytest.mark.parametrize("error", CATALOGUE, ids=lambda error: str(error.__name__))
def test_an_error_has_a_code_a_meaning_and_a_remedy(error: type[LiveWeightError]) -> None:
    assert re.fullmatch(r"LW-[1-9]\d{2}", error.code)
    assert meaning(error)
    assert error.remedy
    assert error.remedy != LiveWeightError.remedy, "a remedy of the class or its family, not the general one"


def test_a_family_shares_the_first_digit_of_its_codes() -> None:
    digits: dict[str, set[str]] = {}
    for _, parent, code in in_code():
        if code is not None and parent != "LiveWeightError":
            digits.setdefault(parent, set()).add(code[3])
    assert digits == {
        "Refused": {"1"},
        "WireError": {"2"},
        "Damage": {"4"},
        "Unavailable": {"5"},
        "EngineError": {"7"},
    }


def test_the_tree_at_the_top_of_the_file_is_the_real_one() -> None:
    picture = list(drawn(errors.__doc__ or ""))
    assert len(set(picture)) == len(picture)
    assert set(picture) == set(in_code())


def test_a_wrong_drawing_would_be_noticed() -> None:
    picture = errors.__doc__ or ""
    for before, after in [("LW-203", "LW-207"), ("│   ├── RoundOpen ", "├── RoundOpen "), ("Torn ", "Tore ")]:
        assert before in picture
        assert set(drawn(picture.replace(before, after))) != set(in_code())


def test_the_operations_page_lists_exactly_the_errors() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| LW-")]
    assert rows == [
        f"| {e.code} | `{e.__name__}` | {meaning(e)} | {'yes' if e.retryable else 'no'} | {e.remedy} |"
        for e in sorted(CATALOGUE, key=lambda error: error.code)
    ]


def test_a_failed_round_says_who_where_how_long_what_serves_and_whether_to_retry() -> None:
    cause = errors.DeadlineExceeded("rank 1 to stage", 5.0)
    failed = RoundFailed(cause, replica="a", rank=1, step="stage", waited_s=5.0, serving="step_1")
    assert (failed.code, failed.retryable, failed.rank) == ("LW-301", True, 1)
    for fact in ("LW-301", "a, rank 1", "stage", "5.0 s", "Still serving step_1", "a retry may help"):
        assert fact in str(failed)
    assert RoundFailed.code == LiveWeightError.code, "the class has none; only an instance knows its cause"


def test_a_failed_round_at_rank_zero_names_rank_zero() -> None:
    cause = errors.ChecksumMismatch("part 3")
    failed = RoundFailed(cause, replica="a", rank=0, step="stage", waited_s=0.0, serving=None)
    assert "a, rank 0" in str(failed)
    assert "no version of ours" in str(failed)


def test_long_lists_of_names_are_cut_in_the_message_and_whole_in_the_error() -> None:
    names = [f"layer.{i}" for i in range(20)]
    error = errors.ManifestMismatch(names)
    assert "and 12 more" in str(error)
    assert error.differences == tuple(names)
