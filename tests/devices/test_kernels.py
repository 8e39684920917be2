"""The copy kernels against plain slicing; what binding refuses; ranges in threads; memories that stay alive."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices import _native, bounds, kernels
from liveweight.devices.kernels import Kernels, Table, choose_kernels
from liveweight.devices.memory import Memory
from liveweight.devices.native_kernels import NativeKernels
from liveweight.devices.numpy_kernels import NumpyKernels
from liveweight.devices.torch_kernels import TorchKernels
from liveweight.errors import LayoutInvalid
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import KernelsChosen
from liveweight.plan import copies, digests, freezes
from liveweight.plan.copies import plan_copies, split
from liveweight.plan.digests import plan_digests
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec
from tests.support.layouts import filled, fulls, placed, tilings, view

KERNELS: dict[str, Kernels] = {
    "native": NativeKernels(),
    "portable": NativeKernels(portable=True),
    "numpy": NumpyKernels(),
    "torch": TorchKernels("cpu"),
}
each_kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)


def test_tables_have_the_columns_that_the_kernels_read() -> None:
    assert len(copies.COLUMNS) == bounds.COPY_COLUMNS
    assert len(digests.COLUMNS) == bounds.DIGEST_COLUMNS
    assert len(freezes.COLUMNS) == bounds.FREEZE_COLUMNS
    assert sorted({0, *freezes.CASTS.values()}) == list(range(bounds.CASTS))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_plan_moves_what_slicing_moves(data: st.DataObject) -> None:
    full = data.draw(fulls(max_side=9))
    source = data.draw(placed([(full.spec, tile) for tile in data.draw(tilings(full.spec.shape))]))
    target = data.draw(placed([(full.spec, tile) for tile in data.draw(tilings(full.spec.shape))]))
    rows = split(plan_copies(source, target).rows, data.draw(st.integers(1, 300)))
    memories = filled(source, {"w": full})
    for implementation in KERNELS.values():
        into = [np.full(size, 0xA5, dtype=np.uint8) for size in target.memories_bytes]
        bound = implementation.bind_copy(
            rows, list(map(Memory.from_array, memories)), list(map(Memory.from_array, into))
        )
        bound.run(0, len(rows))
        expected = [np.full(size, 0xA5, dtype=np.uint8) for size in target.memories_bytes]
        for placement in target.placements:
            if full.part(placement.region).size:
                place = view(expected[placement.memory], placement, full.spec.dtype.size_bytes)
                place[...] = full.part(placement.region)
        for got, want in zip(into, expected, strict=True):
            np.testing.assert_array_equal(got, want)


@each_kernels
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 8, 12, 600])
@pytest.mark.parametrize("counts", [(1, 1), (1, 70), (70, 1), (33, 65), (64, 64), (131, 127)])
@pytest.mark.parametrize("shape", ["rows", "columns", "turned", "turned both", "scattered"])
def test_loops_of_chunks_go_where_their_strides_say(
    kernels: Kernels, chunk: int, counts: tuple[int, int], shape: str
) -> None:
    outer, inner = counts
    by_rows, by_columns = (inner * chunk, chunk), (chunk, outer * chunk)
    wide = (inner * (chunk + 5) + 3, chunk + 5)
    strides = {
        "rows": (by_rows, by_rows),
        "columns": (wide, by_rows),
        "turned": (by_columns, by_rows),
        "turned both": (by_rows, by_columns),
        "scattered": (wide, (chunk + 1, outer * (chunk + 1))),
    }[shape]
    (source_outer, source_inner), (target_outer, target_inner) = strides
    sizes = [(outer - 1) * a + (inner - 1) * b + chunk for a, b in strides]
    source = np.random.default_rng(1).integers(0, 256, 3 + sizes[0], dtype=np.uint8)
    target, expected = np.zeros(7 + sizes[1], np.uint8), np.zeros(7 + sizes[1], np.uint8)
    rows = np.array(
        [[0, 3, 0, 7, outer, source_outer, target_outer, inner, source_inner, target_inner, chunk]]
    )
    kernels.bind_copy(rows, [Memory.from_array(source)], [Memory.from_array(target)]).run(0, 1)
    for i in range(outer):
        for j in range(inner):
            a, b = 3 + i * source_outer + j * source_inner, 7 + i * target_outer + j * target_inner
            expected[b : b + chunk] = source[a : a + chunk]
    np.testing.assert_array_equal(target, expected)


@each_kernels
@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 1), (5, 33), (64, 16)])
@pytest.mark.parametrize("size", [(1 << 18) - 1, 1 << 18, (1 << 20) + 77])
def test_long_runs_are_copied_at_any_alignment(kernels: Kernels, shift: tuple[int, int], size: int) -> None:
    source = np.random.default_rng(2).integers(0, 256, size + 128, dtype=np.uint8)
    target = np.zeros(size + 128, dtype=np.uint8)
    rows = np.array([[0, shift[0], 0, shift[1], 1, 0, 0, 1, 0, 0, size]])
    kernels.bind_copy(rows, [Memory.from_array(source)], [Memory.from_array(target)]).run(0, 1)
    np.testing.assert_array_equal(target[shift[1] : shift[1] + size], source[shift[0] : shift[0] + size])
    assert not target[: shift[1]].any()
    assert not target[shift[1] + size :].any()


COPY = [0, 0, 0, 0, 2, 50, 50, 5, 10, 10, 10]
DIGEST = [0, 0, 0, 1, 10, 10, 0, 1, 5, 2, 2, 0]
FREEZE = [*DIGEST, 0, 0, 10, 0]


def bind(
    kind: str, implementation: Kernels, row: list[int], *, writable: bool = True
) -> Callable[[int, int], object]:
    source, target = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    target.flags.writeable = writable
    rows = np.array([row], dtype=np.int64)
    memories = [Memory.from_array(source)], [Memory.from_array(target)]
    match kind:
        case "copy":
            return implementation.bind_copy(rows, *memories).run
        case "digest":
            return implementation.bind_digest(rows, memories[0], 1).run
        case _:
            return implementation.bind_freeze(rows, *memories, 1).run


def changed(row: list[int], **columns: int) -> list[int]:
    return [columns.get(f"c{number}", value) for number, value in enumerate(row)]


HUGE = 1 << 61
REFUSED = {
    "copy": [
        *({f"c{number}": -1} for number in range(11)),
        *({f"c{number}": value} for number in (0, 2) for value in (1, HUGE)),
        *({f"c{number}": value} for number in (1, 3) for value in (1, HUGE, (1 << 63) - 1)),
        *({f"c{number}": value} for number in (4, 5, 6, 7, 8, 9, 10) for value in (51, HUGE, (1 << 63) - 1)),
        {"c4": 1 << 40, "c5": 0, "c6": 0, "c7": 1 << 40, "c8": 0, "c9": 0},
    ],
    "digest": [
        *({f"c{number}": -1} for number in range(12)),
        *({f"c{number}": value} for number in (0, 1, 4, 5, 8, 9, 11) for value in (51, HUGE, (1 << 63) - 1)),
        *({f"c{number}": value} for number in (2, 3, 6, 7) for value in ((1 << 62), (1 << 63) - 1)),
        *({"c10": value} for value in (0, 3, 16)),
        {"c4": 1 << 40, "c5": 0, "c8": 1 << 40, "c9": 0},
    ],
    "freeze": [
        *({f"c{number}": -1} for number in range(16)),
        *({f"c{number}": value} for number in (0, 1, 4, 5, 8, 9, 11, 12, 13, 14) for value in (51, HUGE)),
        {"c15": 3},
        {"c15": 1, "c10": 4, "c9": 4},
        {"c14": 9},
        {"c15": 1, "c9": 4},
    ],
}
GOOD = {"copy": COPY, "digest": DIGEST, "freeze": FREEZE}


@each_kernels
@pytest.mark.parametrize("kind", GOOD)
def test_what_fits_exactly_is_bound(kernels: Kernels, kind: str) -> None:
    bind(kind, kernels, GOOD[kind])(0, 1)


@each_kernels
@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind in REFUSED for wrong in REFUSED[kind]])
def test_a_row_that_leaves_its_memory_or_means_nothing_is_refused_by_number(
    kernels: Kernels, kind: str, wrong: dict[str, int]
) -> None:
    with pytest.raises(LayoutInvalid, match="row 0 of 1"):
        bind(kind, kernels, changed(GOOD[kind], **wrong))


@each_kernels
@pytest.mark.parametrize("kind", ["copy", "freeze"])
def test_read_only_memory_is_never_written(kernels: Kernels, kind: str) -> None:
    with pytest.raises(LayoutInvalid, match="read-only"):
        bind(kind, kernels, GOOD[kind], writable=False)


@each_kernels
def test_memory_is_not_copied_onto_itself(kernels: Kernels) -> None:
    memory = Memory.from_array(np.zeros(150, np.uint8))
    rows = np.array([[0, 0, 0, 50, 1, 0, 0, 1, 0, 0, 50], [0, 0, 0, 49, 1, 0, 0, 1, 0, 0, 50]])
    kernels.bind_copy(rows[:1], [memory], [memory]).run(0, 1)
    with pytest.raises(LayoutInvalid, match="row 1 of 2 copies memory onto itself"):
        kernels.bind_copy(rows, [memory], [memory])


@each_kernels
def test_empty_rows_do_nothing_wherever_they_point(kernels: Kernels) -> None:
    for kind, zero in [("copy", "c4"), ("copy", "c10"), ("digest", "c4"), ("digest", "c8"), ("freeze", "c8")]:
        bind(kind, kernels, changed(GOOD[kind], **{zero: 0, "c1": 1 << 50, "c0": 9}))(0, 1)
    rows = np.empty((0, 11), dtype=np.int64)
    kernels.bind_copy(rows, [], []).run(0, 0)


@each_kernels
@pytest.mark.parametrize("bad", [(-1, 1), (0, 2), (1, 0)])
@pytest.mark.parametrize("kind", GOOD)
def test_a_range_outside_the_table_is_refused(kernels: Kernels, kind: str, bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows"):
        bind(kind, kernels, GOOD[kind])(*bad)


def test_a_table_of_another_shape_or_type_is_refused() -> None:
    memory = [Memory.from_array(np.zeros(100, np.uint8))]
    for wrong in (np.zeros((1, 10), np.int64), np.zeros(11, np.int64), np.zeros((1, 11), np.int32)):
        with pytest.raises(LayoutInvalid, match="columns"):
            choose_kernels().bind_copy(wrong, memory, memory)  # type: ignore[arg-type]


@each_kernels
def test_threads_may_run_disjoint_ranges_at_once(kernels: Kernels) -> None:
    specs = [TensorSpec(name=f"w{i}", dtype=DType.BFLOAT16, shape=(64, 96 + i)) for i in range(40)]
    layout = packed(specs)
    memory = np.random.default_rng(5).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)
    rows = digests.split(plan_digests(layout).rows, 1000)
    bound = kernels.bind_digest(rows, [Memory.from_array(memory)], len(specs))
    cuts = np.linspace(0, len(rows), 9).astype(int).tolist()
    parts: list[Table | None] = [None] * 8

    def work(number: int) -> None:
        parts[number] = bound.run(cuts[number], cuts[number + 1]).astype(np.int64)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(part for part in parts if part is not None) % (1 << 32)
    np.testing.assert_array_equal(total, bound.run(0, len(rows)))


@each_kernels
def test_what_is_bound_keeps_its_memories_alive(kernels: Kernels) -> None:
    array = np.ones(100, np.uint8)
    gone = weakref.ref(array)
    bound = kernels.bind_digest(np.array([DIGEST]), [Memory.from_array(array)], 1)
    del array
    gc.collect()
    assert gone() is not None
    assert bound.run(0, 1).any()
    del bound
    gc.collect()
    assert gone() is None


def test_the_table_that_was_bound_does_not_change_with_the_one_that_was_given() -> None:
    rows = np.array([DIGEST])
    bound = choose_kernels().bind_digest(rows, [Memory.from_array(np.ones(100, np.uint8))], 1)
    before = bound.run(0, 1)
    rows[:] = 1 << 60
    np.testing.assert_array_equal(bound.run(0, 1), before)
    assert not bound.rows.flags.writeable


def test_memories_come_from_arrays_buffers_and_tensors() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert Memory.from_array(array).size_bytes == 48
    assert bytes(Memory.from_array(array).bytes()) == array.tobytes()
    assert not Memory.from_buffer(b"abc").writable
    assert bytes(Memory.from_buffer(b"abc").bytes()) == b"abc"
    with mmap.mmap(-1, 4096) as mapping:
        memory = Memory.from_buffer(mapping)
        assert memory.writable
        memory.bytes()[:2] = 7
        assert mapping[:3] == b"\x07\x07\x00"
        del memory
    tensor = torch.arange(6, dtype=torch.int16)[2:]
    memory = Memory.from_tensor(tensor)
    assert memory.size_bytes == 12
    assert memory.address + 4 == tensor.data_ptr()
    assert Memory.from_array(np.zeros(0, np.uint8)).size_bytes == 0
    with pytest.raises(LayoutInvalid, match="one run of bytes"):
        Memory.from_array(array.T)
    with pytest.raises(LayoutInvalid, match="on meta"):
        Memory.from_tensor(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="memory of -1 bytes"):
        Memory(address=0, size_bytes=-1, writable=True, owner=None)


def test_the_choice_of_kernels_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, recorder = Bus(), Recorder()
    with bus.subscribe(recorder):
        assert isinstance(choose_kernels(bus), NativeKernels)
        monkeypatch.setitem(__import__("sys").modules, "liveweight.devices.native_kernels", None)
        assert isinstance(choose_kernels(bus), NumpyKernels)
    first, second = recorder.of(KernelsChosen)
    assert (first.name, first.reason) == (f"native ({NativeKernels().simd})", None)
    assert second.name == "numpy"
    assert second.reason
    assert kernels.choose().reason


def test_the_module_refuses_what_is_no_table() -> None:
    table, lanes = np.array([DIGEST]), np.zeros((1, 4), np.uint32)
    for wrong in (table.astype(np.float64), table[:, ::2], table[:, :11], table.astype(np.uint64)):
        with pytest.raises((ValueError, BufferError)):
            _native.digest(wrong, 0, 1, lanes)  # type: ignore[arg-type]
    for bad in (lanes.astype(np.int64), np.zeros((1, 3), np.uint32), np.zeros((0, 4), np.uint32)):
        with pytest.raises(ValueError, match=r"lanes|slot"):
            _native.digest(table, 0, 1, bad)  # type: ignore[arg-type]
    lanes.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _native.digest(table, 0, 1, lanes)
