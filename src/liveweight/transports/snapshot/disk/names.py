"""The names of a snapshot's files: FastDeploy's for the weights, our own for manifests and the commit file. Pure.

model_state.tp{rank}.{id}.part{N}.pdparams      a part; {id} is FastDeploy's device id, by default the rank's number
model_state.tp{rank}.{id}.pdparams              all of a rank in one file
model_state.tp0{id}.pdparams                    the old name of that, which is rank 0's alone
manifest.tp{rank}.{id}.json                     what a rank's parts hold; ours
snapshot.json                                   the commit file; ours, and written last
"""

from __future__ import annotations

import re
from typing import TypeAlias

COMMIT = "snapshot.json"
WRITING = ".writing"
"""The file that a writer locks while it writes the snapshot."""

RankFile: TypeAlias = tuple[int, int]
"""A rank and its device id."""

_NUMBER = r"(0|[1-9][0-9]*)"
_PART = re.compile(rf"model_state\.tp{_NUMBER}\.{_NUMBER}\.part(.*)\.pdparams")
_SINGLE = re.compile(rf"model_state\.tp{_NUMBER}\.{_NUMBER}\.pdparams")
_OURS = re.compile(rf"manifest\.tp{_NUMBER}\.{_NUMBER}\.json")
_ANY = re.compile(r"(model_state\..*\.pdparams|manifest\.tp.*\.json)")


def part_name(rank: int, device_id: int, number: int) -> str:
    """A part, numbered from 0."""
    return f"model_state.tp{rank}.{device_id}.part{number}.pdparams"


def single_name(rank: int, device_id: int) -> str:
    """A rank's one file."""
    return f"model_state.tp{rank}.{device_id}.pdparams"


def legacy_name(device_id: int) -> str:
    """The one file under its old name, in which the rank was always written as 0."""
    return f"model_state.tp0{device_id}.pdparams"


def manifest_name(rank: int, device_id: int) -> str:
    """What a rank's parts hold."""
    return f"manifest.tp{rank}.{device_id}.json"


def part_of(name: str) -> tuple[RankFile, str] | None:
    """Whose part a file is by its name, and what stands where its number should; None for any other file."""
    found = _PART.fullmatch(name)
    return None if found is None else ((int(found[1]), int(found[2])), found[3])


def part_number(written: str) -> int | None:
    """The number that stands in a part's name; None where it is none, or is written as no writer of parts does."""
    return int(written) if re.fullmatch(_NUMBER, written) else None


def single_of(name: str) -> RankFile | None:
    """Whose one file it is by its name."""
    found = _SINGLE.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def is_manifest(name: str) -> bool:
    """Whether a file is a manifest of ours by its name."""
    return _OURS.fullmatch(name) is not None


def belongs(name: str) -> bool:
    """Whether a file's name claims to be a part of a snapshot: one that nobody listed is extra."""
    return _ANY.fullmatch(name) is not None


def directory_name(sequence: int, label: str) -> str:
    """The directory of a snapshot: in the order in which they were begun, with as much of the label as a file name may have."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", label)[:80]
    return f"{sequence:06d}-{plain}"


def sequence_of(name: str) -> int | None:
    """The number that `directory_name` wrote; None for a directory of anything else."""
    found = re.fullmatch(r"([0-9]{6,})-[A-Za-z0-9._-]*", name)
    return None if found is None else int(found[1])
