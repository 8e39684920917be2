"""The faults that the digest is for: each is detected in ten thousand random trials.

A trial changes a random matrix or vector, and compares digests. Trials run in bulk: the contents of many lie in one memory, one slot each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.plan.digests import COLUMNS
from liveweight.spec.digest import SEEDS, Lanes

Words: TypeAlias = npt.NDArray[np.uint16]
Generator: TypeAlias = np.random.Generator
Fault: TypeAlias = Callable[[Generator, Words], Words]

TRIALS, BATCH = 10_000, 1000
HEIGHT, WIDTH = 16, 96


def digests(batch: Words) -> Lanes:
    """The digest of each matrix of a batch."""
    count, height, width = batch.shape
    rows = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    rows[:, 1] = np.arange(count) * height * width * 2
    rows[:, 2:11] = 0, 1, height, width * 2, 0, 1, width, 2, 2
    rows[:, 11] = np.arange(count)
    memory = Memory.from_array(np.ascontiguousarray(batch))
    return choose_kernels().bind_digest(rows, [memory], count).run(0, count)


def weights(rng: Generator, shape: tuple[int, ...]) -> Words:
    """bfloat16 like a trained matrix's."""
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def norms(rng: Generator, shape: tuple[int, ...]) -> Words:
    """bfloat16 like a norm's: nearly one, few distinct values."""
    near = 1 + 0.02 * rng.standard_normal(shape)
    return (near.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def two(rng: Generator, size: int) -> tuple[int, int]:
    a, b = rng.choice(size, 2, replace=False)
    return int(a), int(b)


def ranges(rng: Generator, size: int) -> tuple[slice, slice]:
    """Two ranges of equal length that do not overlap."""
    length = int(rng.integers(1, size // 2 + 1))
    first = int(rng.integers(0, size - 2 * length + 1))
    second = int(rng.integers(first + length, size - length + 1))
    return slice(first, first + length), slice(second, second + length)


def changed_unit(rng: Generator, x: Words) -> Words:
    x.reshape(-1)[rng.integers(x.size)] ^= rng.integers(1, 1 << 16, dtype=np.uint16)
    return x


def flipped_bit(rng: Generator, x: Words) -> Words:
    x.reshape(-1)[rng.integers(x.size)] ^= np.uint16(1 << rng.integers(16))
    return x


def swapped_rows(rng: Generator, x: Words) -> Words:
    a, b = two(rng, len(x))
    x[[a, b]] = x[[b, a]]
    return x


def swapped_columns(rng: Generator, x: Words) -> Words:
    a, b = two(rng, x.shape[1])
    x[:, [a, b]] = x[:, [b, a]]
    return x


def exchanged_ranges(rng: Generator, x: Words) -> Words:
    flat = x.reshape(-1)
    a, b = ranges(rng, flat.size)
    flat[a], flat[b] = flat[b].copy(), flat[a].copy()
    return x


def shifted_range(rng: Generator, x: Words) -> Words:
    flat = x.reshape(-1)
    first, last = sorted(two(rng, flat.size + 1))
    if last - first < 2:
        first, last = 0, flat.size
    flat[first:last] = np.roll(flat[first:last], int(rng.integers(1, last - first)))
    return x


def zeroed_block(rng: Generator, x: Words) -> Words:
    a, _ = ranges(rng, x.size)
    x.reshape(-1)[a] = 0
    return x


def duplicated_block(rng: Generator, x: Words) -> Words:
    flat = x.reshape(-1)
    a, b = ranges(rng, flat.size)
    flat[b] = flat[a]
    return x


def flipped_signs(rng: Generator, x: Words) -> Words:
    a, _ = ranges(rng, x.size)
    x.reshape(-1)[a] ^= np.uint16(0x8000)
    return x


def transposed(_: Generator, x: Words) -> Words:
    return np.ascontiguousarray(x.T).reshape(x.shape)


FAULTS: dict[str, Fault] = {
    "changed unit": changed_unit,
    "flipped bit": flipped_bit,
    "swapped rows": swapped_rows,
    "swapped columns": swapped_columns,
    "exchanged ranges": exchanged_ranges,
    "shifted range": shifted_range,
    "zeroed block": zeroed_block,
    "duplicated block": duplicated_block,
    "flipped signs": flipped_signs,
    "transposed content": transposed,
}
FOR_VECTORS = sorted(set(FAULTS) - {"swapped rows", "transposed content"})


def missed(
    fault: Fault, content: Callable[[Generator, tuple[int, ...]], Words], shape: tuple[int, int]
) -> int:
    """How many of the trials that changed something left the digest as it was."""
    rng = np.random.default_rng(7)
    undetected = 0
    for _ in range(TRIALS // BATCH):
        before = content(rng, (BATCH, *shape))
        after = np.stack([fault(rng, x.copy()) for x in before])
        differs = (before != after).reshape(BATCH, -1).any(axis=1)
        assert differs.mean() > 0.5
        same = (digests(before) == digests(after)).all(axis=1)
        assert same[~differs].all()
        undetected += int((same & differs).sum())
    return undetected


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_matrix_is_noticed(fault: str) -> None:
    assert missed(FAULTS[fault], weights, (HEIGHT, WIDTH)) == 0


@pytest.mark.parametrize("fault", FOR_VECTORS)
def test_a_damaged_vector_of_nearly_equal_values_is_noticed(fault: str) -> None:
    assert missed(FAULTS[fault], norms, (1, 512)) == 0


@pytest.mark.parametrize("content", [weights, norms])
def test_two_tensors_exchanged_are_noticed(content: Callable[[Generator, tuple[int, ...]], Words]) -> None:
    rng = np.random.default_rng(11)
    a, b = content(rng, (TRIALS, 1, 256)), content(rng, (TRIALS, 1, 256))
    differs = (a != b).reshape(TRIALS, -1).any(axis=1)
    assert differs.all()
    assert not (digests(a) == digests(b)).all(axis=1).any()


def test_a_single_changed_unit_changes_every_lane_that_it_can() -> None:
    """C and R are odd: the difference, less than 2^16 in size and not zero, never becomes zero mod 2^32 in any lane."""
    rng = np.random.default_rng(3)
    before = weights(rng, (TRIALS, 1, 64))
    after = np.stack([changed_unit(rng, x.copy()) for x in before])
    assert (digests(before) != digests(after)).all()
    assert digests(before).shape == (TRIALS, SEEDS)
