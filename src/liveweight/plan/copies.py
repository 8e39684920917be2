"""Copy plans: which bytes of a source's layout go to which bytes of a target's.

Computed once per pair of layouts, then replayed. A plan is a table of integers that the kernels of devices/ execute without a
decision left: each row copies `outer` x `inner` chunks of contiguous bytes, with a stride on either side for both loops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan.strided_loops import Loop, merged, unrolled
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, count, intersection, show
from liveweight.spec.row_table import Table

COLUMNS = (
    "source_memory",
    "source_offset",
    "target_memory",
    "target_offset",
    "outer",
    "outer_source_stride",
    "outer_target_stride",
    "inner",
    "inner_source_stride",
    "inner_target_stride",
    "chunk_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """`rows` is an int64 table with COLUMNS, in the target's order; `size_bytes` is what it moves."""

    source: str
    target: str
    rows: Table
    size_bytes: int


def row_bytes(rows: Table) -> Table:
    """How many bytes each row of a copy table moves."""
    moved: Table = rows[:, 4] * rows[:, 7] * rows[:, 10]
    return moved


def plan_copies(source: Layout, target: Layout, *, prefer: int = 0) -> CopyPlan:
    """The copies that fill every placement of the target. Where the source holds a region several times, `prefer` picks the copy.

    Raises ManifestMismatch for a tensor that the source lacks or has otherwise, LayoutInvalid where its regions do not cover the target's.
    """
    found = _by_tensor(source, prefer)
    names, target_specs = source.specs(), target.specs()
    tables = []
    for placement in target.placements:
        wanted = target_specs[placement.name]
        offered = next((names[name] for name in wanted.names if name in names), None)
        if offered is None:
            raise ManifestMismatch([f"{wanted.name} missing"])
        if (offered.dtype, offered.shape) != (wanted.dtype, wanted.shape):
            raise ManifestMismatch(
                [f"{wanted.name} expected {wanted.describe()}, offered {offered.describe()}"]
            )
        tables.append(_fill(placement, found[offered.name], wanted))
    rows = np.concatenate(tables) if tables else np.empty((0, len(COLUMNS)), dtype=np.int64)
    rows.flags.writeable = False
    return CopyPlan(
        source=source.fingerprint, target=target.fingerprint, rows=rows, size_bytes=int(row_bytes(rows).sum())
    )


class CopyPlans:
    """Plans by pair of layouts: the second round of a pair replays the first one's. Used by one thread."""

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._plans: dict[tuple[str, str, int], CopyPlan] = {}

    def get(self, source: Layout, target: Layout, *, prefer: int = 0) -> CopyPlan:
        """The plan of this pair, from memory where it was made before; the least recently used one makes room."""
        key = (source.fingerprint, target.fingerprint, prefer)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = plan_copies(source, target, prefer=prefer)
        self._plans[key] = plan
        while len(self._plans) > self._keep:
            del self._plans[next(iter(self._plans))]
        return plan


def split(rows: Table, limit_bytes: int) -> Table:
    """The same copies in rows of at most about `limit_bytes`, so that they can be shared out, paced and interrupted."""
    sizes = row_bytes(rows)
    if not (sizes > limit_bytes).any():
        return rows
    parts = [
        rows[i : i + 1] if sizes[i] <= limit_bytes else _cut(rows[i], limit_bytes) for i in range(len(rows))
    ]
    return np.concatenate(parts)


def _by_tensor(source: Layout, prefer: int) -> Mapping[str, Sequence[Placement]]:
    """Of each tensor the placements that matter: one per distinct region."""
    specs = source.specs()
    copies: dict[str, dict[Region, list[Placement]]] = defaultdict(lambda: defaultdict(list))
    for placement in source.placements:
        copies[specs[placement.name].name][placement.region].append(placement)
    chosen = {
        name: [same[prefer % len(same)] for same in regions.values()] for name, regions in copies.items()
    }
    return defaultdict(tuple, chosen)


def _fill(target: Placement, sources: Sequence[Placement], spec: TensorSpec) -> Table:
    """The rows that fill one placement."""
    tables, filled, wanted = [], 0, count(target.region)
    for source in sources:
        shared = intersection(source.region, target.region) if wanted else None
        if shared is not None:
            filled += count(shared)
            tables.append(copy_rows(source, target, shared, spec.dtype.size_bytes))
    if filled != wanted:
        problem = "does not offer all of" if filled < wanted else "offers more than once parts of"
        raise LayoutInvalid(f"{spec.name}: the source {problem} {show(target.region)}")
    return np.concatenate(tables) if tables else np.empty((0, len(COLUMNS)), dtype=np.int64)


def copy_rows(source: Placement, target: Placement, shared: Region, item_bytes: int) -> Table:
    """The rows that copy a region which both placements hold."""
    from_offset, from_strides = part_offset_and_strides(source, shared)
    to_offset, to_strides = part_offset_and_strides(target, shared)
    nest = [(span.count, a, b) for span, a, b in zip(shared, from_strides, to_strides, strict=True)]
    nest.sort(key=lambda loop: (-loop[2], -loop[1]))  # the target is written forwards
    loops = merged(nest)
    chunk = item_bytes
    if loops and loops[-1][1:] == (item_bytes, item_bytes):
        chunk *= loops.pop()[0]
    return _rows(loops, source.memory, from_offset, target.memory, to_offset, chunk)


def _rows(
    loops: list[Loop], from_memory: int, from_offset: int, to_memory: int, to_offset: int, chunk: int
) -> Table:
    outer, inner = ([(1, 0, 0)] * 2 + loops)[-2:]
    steps = unrolled(loops[:-2], 2)
    rows = np.empty((len(steps), len(COLUMNS)), dtype=np.int64)
    rows[:, 0], rows[:, 1] = from_memory, from_offset + steps[:, 0]
    rows[:, 2], rows[:, 3] = to_memory, to_offset + steps[:, 1]
    rows[:, 4:] = (*outer, *inner, chunk)
    return rows


def part_offset_and_strides(placement: Placement, shared: Region) -> tuple[int, list[int]]:
    """Where a part of a placement's region begins, and its strides."""
    offset, strides = placement.offset_bytes, []
    for own, part, stride in zip(placement.region, shared, placement.strides_bytes, strict=True):
        offset += own.index_of(part.start) * stride
        strides.append(stride * (part.step // own.step if part.count > 1 else 1))
    return offset, strides


def _cut(row: Table, limit_bytes: int) -> Table:
    """One long row as several: along its outermost loop that is long enough, else along its chunk."""
    loops = [
        (int(row[4]), int(row[5]), int(row[6])),
        (int(row[7]), int(row[8]), int(row[9])),
        (int(row[10]), 1, 1),
    ]
    axis = next(i for i, loop in enumerate(loops) if loop[0] > 1)
    inside = int(np.prod([loop[0] for loop in loops[axis + 1 :]]))
    step = max(1, limit_bytes // inside)
    if axis == 2:
        step = max(4096, step // 4096 * 4096)
    starts = np.arange(0, loops[axis][0], step, dtype=np.int64)
    rows = np.repeat(row[None, :], len(starts), axis=0)
    rows[:, 1] += starts * loops[axis][1]
    rows[:, 3] += starts * loops[axis][2]
    rows[:, (4, 7, 10)[axis]] = np.minimum(step, loops[axis][0] - starts)
    return rows if inside <= limit_bytes else np.concatenate([_cut(part, limit_bytes) for part in rows])
